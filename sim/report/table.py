"""The table at the end of a run: one column a policy, side by side over one request list."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.formats import shipped_rows
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.options import Objective, percentile_name
from twinserve.sim.results.paths import lookup

SHOWN_PERCENTILES = (90, 99)
BEST_MARK = "*"
NONE = "-"


@dataclass(frozen=True)
class Line:
    """A line of the table: where its number stands in summary.json, how it is shown, what is best.

    paths   dotted; several make "a / b", and the first one decides which run is best
    show    the number as text; of a line without a best also a whole object of summary.json
    better  "low", "high", or None if neither is
    if_zero  whether it is there where all are zero, which says that the thing was not in play
    """

    title: str
    paths: tuple[str, ...]
    show: Callable[[Any], str]
    better: str | None = None
    if_zero: bool = True


def number(value: float) -> str:
    """About three digits: 0.0123, 1.23, 12.3, 123, 12,345."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def percent(value: float) -> str:
    # Only a true 100 % may read as one.
    share = min(value * 100, 99.99) if value < 1 else value * 100
    return f"{share:.2f} %" if 99 <= share < 100 else f"{share:.1f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{number(value)} s"


def gibibytes(value: float) -> str:
    return f"{number(value / 2**30)} GiB"


def queue(saturation: Mapping) -> str:
    """A class's `saturation`, in a few words."""
    verdict = saturation["verdict"]
    if verdict == "saturated":
        return f"grows {number(saturation['growth_per_s'])}/s"
    if verdict == "sheds":
        return f"sheds {percent(saturation['lost_share'])}"
    return {"keeps up": "steady"}.get(verdict, verdict)


def _distribution(part: str, metric: str, percentiles: Sequence[float], apart: bool) -> list[Line]:
    """Mean and percentiles of a latency: one line, or `apart` one each."""
    statistics = ["mean", *map(percentile_name, percentiles)]
    paths = [f"{part}.{statistic}_{metric}_ms" for statistic in statistics]
    name = {"engine_ttft": "engine TTFT"}.get(metric, metric.upper())
    if not apart:
        return [Line(f"{name} {' / '.join(statistics)}, ms", tuple(paths), number, "low")]
    return [
        Line(f"{name} {statistic}, ms", (path,), number, "low")
        for statistic, path in zip(statistics, paths, strict=True)
    ]


_BOTH, _E2E = "both attained", "e2el_attainment"


_RT = "classes.rt"
_SHOW: dict[str, Callable[[Any], str]] = {
    "number": number,
    "percent": percent,
    "count": count,
    "seconds": seconds,
    "gibibytes": gibibytes,
    "queue": queue,
    "ms_as_s": lambda ms: number(ms / 1000),
}


def _line(row: Mapping[str, str]) -> Line:
    shown, zero = _SHOW[row["show"]], row["if_zero"] != "no"
    return Line(row["title"], tuple(row["paths"].split()), shown, row["better"] or None, zero)


_ROWS = shipped_rows(__package__, "lines.csv")
SECTIONS: dict[str, list[Line]] = {
    section: [_line(row) for row in _ROWS if row["section"] == section]
    for section in dict.fromkeys(row["section"] for row in _ROWS)
}


def overloaded(summary: Mapping, label: str) -> list[str]:
    """A line for each class of a run that does not keep up: what its means are worth."""
    said = []
    for service_class, name in (("rt", "real-time"), ("be", "best-effort")):
        found = summary.get("classes", {}).get(service_class, {}).get("saturation") or {}
        what = "sessions or applications" if found.get("groups") else "requests"
        rates = f"{name} {what}: {{arrived_per_s:.3g}} a second arrive, {{served_per_s:.3g}} are "
        if found.get("verdict") == "saturated":
            growth = "served, so the queue grows by {growth_per_s:.2g} ± {growth_range_per_s:.1g}"
            means = "means depend on the length of the trace"
            said.append(f"{label}: saturated; {(rates + growth).format(**found)} a second; {means}")
        if found.get("verdict") == "sheds":
            ends = "served, {lost_share:.1%} end early; latencies are of those that are served"
            said.append(f"{label}: sheds; {(rates + ends).format(**found)}")
        if found.get("verdict") == "unclear":
            clear = f"not clear whether it keeps up with its {name} {what}"
            said.append(f"{label}: {clear}: {found['reason']}")
    return said


@dataclass(frozen=True)
class Row:
    """A rendered line: a text for each run; which are the best (none, if all agree); and the low
    and high end of error bars ("" if the line has none)."""

    title: str
    cells: list[str]
    best: list[bool]
    ends: list[tuple[str, str] | None]


def table_rows(
    results: Mapping[str, Mapping | RunResult], apart: bool = False
) -> list[tuple[str, list[Row]]]:
    """Return (section, rows) of the lines that apply to any of the runs; summaries by label.

    apart  a line for each percentile of a latency, if one for all of them is too wide
    """
    summaries = [_with_timing(result) for result in results.values()]
    asked = dict.fromkeys(q for summary in summaries for q in summary.get("percentiles", ()))
    sections = []
    for section, lines in SECTIONS.items():
        if section == "Real-time":
            shown = tuple(asked) or SHOWN_PERCENTILES
            latencies = [_distribution(_RT, metric, shown, apart) for metric in ("ttft", "tpot")]
            queueing = Line("queue", (f"{_RT}.saturation",), queue)
            engine = _distribution(_RT, "engine_ttft", shown, apart)
            lines = [queueing, *latencies[0], *engine, *latencies[1], *lines]
        if any(_E2E in part for s in summaries for part in s.get("classes", {}).values()):
            lines = [replace(x, title="all attained") if x.title == _BOTH else x for x in lines]
        rows = [row for line in lines if (row := _row(line, summaries)) is not None]
        if section == "All":
            verdicts = _verdicts(summaries)
            sections += [("Objectives", verdicts)] if verdicts else []
        if rows:
            sections.append((section, rows))
    return sections


def _verdicts(summaries: Sequence[Mapping]) -> list[Row]:
    """A row for each objective that a run was given as a whole: whether it was kept."""
    by_run = [
        {_objective(verdict): verdict for verdict in summary.get("objectives", ())}
        for summary in summaries
    ]
    rows = []
    for title in dict.fromkeys(title for found in by_run for title in found):
        verdicts = [found.get(title) for found in by_run]
        met = [verdict is not None and verdict["met"] is True for verdict in verdicts]
        best = met if any(met) and not all(met) else [False] * len(met)
        ends = [_verdict_ends(summary, title) for summary in summaries]
        rows.append(Row(title, [_kept(v) for v in verdicts], best, ends))
    return rows


def _verdict_ends(summary: Mapping, title: str) -> tuple[str, str] | None:
    """Whether the objective is kept at the ends of a run's error bars; None of a run without."""
    bars = summary.get("error_bars")
    if bars is None:
        return None
    titles = [_objective(verdict) for verdict in summary.get("objectives", ())]
    pair = bars.get(f"objectives.{titles.index(title)}") if title in titles else None
    return ("", "") if pair is None else tuple("kept" if end else "missed" for end in pair)


def _objective(verdict: Mapping) -> str:
    return str(
        Objective(
            verdict["class"],
            verdict["metric"],
            verdict["bound_s"],
            verdict.get("prefills", 0.0),
            verdict["statistic"],
        )
    )


def _kept(verdict: Mapping | None) -> str:
    if verdict is None or verdict["met"] is None:
        return NONE
    if verdict["met"]:
        return "kept"
    if "share" in verdict:
        share, needed = verdict["share"], float(verdict["statistic"][1:]) / 100
        if percent(share) == percent(needed):
            share = needed - (1e-4 if needed > 0.99 else 1e-3)  # as shown, it is missed
        return f"missed ({percent(share)})"
    value = verdict["value_s"]
    return "missed" if value is None else f"missed ({number(value * 1000)} ms)"


def print_table(
    results: Mapping[str, Mapping | RunResult],
    notices: Iterable[str] = (),
    console: Console | None = None,
) -> None:
    """Print runs side by side, then the notices, one line each.

    results  label -> RunResult, or a summary as `summarise` returns it (a "timing" key adds wall
             time and speed, a "fair_ratio" key the fair ratio, an "error_bars" key two columns)

    The best value of a line stands out: bold green, or a star if there is no colour. Runs that
    do not fit the console's width go into a further table below.
    """
    console = console or Console()
    coloured = console.color_system is not None and not console.no_color
    labels = list(results)
    sections = table_rows(results)
    parts = _parts(labels, sections, console.width)
    if not _fit(sections, parts, console.width):
        sections = table_rows(results, apart=True)
        parts = _parts(labels, sections, console.width)
    starred = False
    for n, part in enumerate(parts):
        if n:
            console.print()
        console.print(_table(labels, part, sections, coloured))
        starred |= any(row.best[i] for _, rows in sections for row in rows for i in part)
    if starred and not coloured:
        console.print(f"{BEST_MARK} best of the line", highlight=False)
    for notice in notices:
        console.print(Text("note: ", style="yellow") + Text(str(notice)))


def render_table(
    results: Mapping[str, Mapping | RunResult], notices: Iterable[str] = (), width: int = 80
) -> str:
    """What `print_table` prints, as plain text of `width` columns without trailing blanks."""
    sink = io.StringIO()
    print_table(results, notices, text_console(sink, width=width))
    lines = (line.rstrip() for line in sink.getvalue().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def text_console(sink: IO[str], **how: Any) -> Console:
    """Return a console that prints plain text into `sink`, in a notebook too."""
    return Console(file=sink, color_system=None, force_jupyter=False, legacy_windows=False, **how)


def warmup_line(warmup: Mapping) -> str:
    """What `warmup` of a summary says."""
    return (
        f"warm-up until {number(warmup['end_s'])} s: {warmup['requests']:,} requests that arrived "
        "before are left out"
    )


def print_rows(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), whole: str = ""
) -> None:
    """Print a table without lines. right: columns of numbers. whole: a column that never wraps."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in head:
        side = "right" if name in right else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name == whole)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_lines(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """A titled list of names and values."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False
    )
    for name, value in lines:
        table.add_row(name, value)
    Console().print(table)


def _with_timing(result: Mapping | RunResult) -> Mapping:
    if isinstance(result, RunResult):
        return {**result.summary, "timing": result.timing}
    return result


def _lookup(summary: Mapping, path: str) -> Any:
    value = lookup(summary, path)
    return value if value is None or isinstance(value, Mapping) else float(value)


def _row(line: Line, summaries: Sequence[Mapping]) -> Row | None:
    values = [[_lookup(summary, path) for path in line.paths] for summary in summaries]
    known = [value for row in values for value in row if value is not None]
    if not known or not (line.if_zero or any(known)):
        return None
    shown = [[NONE if v is None else line.show(v) for v in row] for row in values]
    cells = [NONE if set(row) == {NONE} else " / ".join(row) for row in shown]
    best = _best(line, [row[0] for row in values], [row[0] for row in shown])
    return Row(line.title, cells, best, [_ends(line, summary) for summary in summaries])


def _ends(line: Line, summary: Mapping) -> tuple[str, str] | None:
    """The ends of a run's error bars; None of a run without."""
    bars = summary.get("error_bars")
    if bars is None:
        return None
    found = [bars.get(path) for path in line.paths]
    if all(pair is None for pair in found):
        return "", ""
    low, high = (
        " / ".join(NONE if pair is None else line.show(pair[end]) for pair in found)
        for end in (0, 1)
    )
    return low, high


def _best(line: Line, values: Sequence[Any], shown: Sequence[str]) -> list[bool]:
    """Runs whose leading number is best as shown: a difference that is not seen is none."""
    known = [value for value in values if value is not None]
    if line.better is None or len(known) < 2:
        return [False] * len(values)
    top = min(known) if line.better == "low" else max(known)
    best = [text == line.show(top) for text in shown]
    return [False] * len(best) if sum(best) == len(known) else best


def _fit(sections: list[tuple[str, list[Row]]], parts: list[list[int]], width: int) -> bool:
    """Whether all runs are in one table, and that in `width` columns."""
    rows = [row for _, rows in sections for row in rows]
    first = max((len(row.title) + 4 for row in rows), default=0)
    needs = [max(len(row.cells[i]) + 4 for row in rows) for i in parts[0]] if rows else []
    needs += [_ends_width(rows, i) for i in parts[0]]
    return len(parts) == 1 and first + sum(needs) <= width


def _parts(
    labels: Sequence[str], sections: list[tuple[str, list[Row]]], width: int
) -> list[list[int]]:
    """Indices of the runs, cut into tables that fit `width` columns."""
    rows = [row for _, rows in sections for row in rows]
    first = max((len(row.title) + 2 for row in rows), default=0) + 2
    needs = [
        max([min(len(label), 24), *(len(row.cells[i]) + 2 for row in rows)]) + 2
        for i, label in enumerate(labels)
    ]
    needs = [need + _ends_width(rows, i) for i, need in enumerate(needs)]
    parts: list[list[int]] = [[]]
    used = first
    for i, need in enumerate(needs):
        if parts[-1] and used + need > width:
            parts.append([])
            used = first
        parts[-1].append(i)
        used += need
    return parts


def _ends_width(rows: Sequence[Row], run: int) -> int:
    """Columns that the ends of a run's error bars take."""
    if not _has_bars(rows, run):
        return 0
    return sum(max(len((row.ends[run] or ("", ""))[end]) for row in rows) + 2 for end in (0, 1))


def _has_bars(rows: Sequence[Row], run: int) -> bool:
    return any(row.ends[run] is not None for row in rows)


def _table(
    labels: Sequence[str],
    part: Sequence[int],
    sections: list[tuple[str, list[Row]]],
    coloured: bool,
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True)
    bars = {i for i in part if _has_bars([row for _, rows in sections for row in rows], i)}
    for i in part:
        cells = max(len(row.cells[i]) + 2 for _, rows in sections for row in rows)
        table.add_column(
            Text(labels[i]), justify="right", overflow="fold", max_width=max(24, cells)
        )
        for end in ("low", "high") if i in bars else ():
            table.add_column(end, justify="right", overflow="fold", max_width=24)
    for section, rows in sections:
        table.add_row(Text(section, style="bold"))
        for row in rows:
            cells: list[Text] = []
            for i in part:
                cells.append(_cell(row.cells[i], row.best[i], coloured))
                cells += [Text(end) for end in row.ends[i] or ("", "")] if i in bars else []
            table.add_row(Text(f"  {row.title}"), *cells)
    return table


def _cell(text: str, best: bool, coloured: bool) -> Text:
    if coloured:
        return Text(text, style="bold green" if best else "")
    # The mark has a column of its own, so that numbers stay aligned.
    return Text(text + (f" {BEST_MARK}" if best else "  "))
