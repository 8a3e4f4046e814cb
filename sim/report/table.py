"""The table at the end of a run: one column a policy, side by side over one request list."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.sim.results.files import RunResult

BEST_MARK = "*"
NONE = "-"


@dataclass(frozen=True)
class Line:
    """A line of the table: where its number stands in summary.json, how it is shown, what is best.

    paths   dotted; several make "a / b", and the first one decides which run is best
    show    the number as text; of a line without a best also a whole object of summary.json
    better  "low", "high", or None where neither is
    """

    title: str
    paths: tuple[str, ...]
    show: Callable[[Any], str]
    better: str | None = None


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


def _latency(part: str) -> list[Line]:
    return [
        Line("queue", (f"{part}.saturation",), queue),
        Line("TTFT mean / p99, ms", (f"{part}.mean_ttft_ms", f"{part}.p99_ttft_ms"), number, "low"),
        Line(
            "engine TTFT mean / p99, ms",
            (f"{part}.mean_engine_ttft_ms", f"{part}.p99_engine_ttft_ms"),
            number,
            "low",
        ),
        Line("TPOT mean / p99, ms", (f"{part}.mean_tpot_ms", f"{part}.p99_tpot_ms"), number, "low"),
        Line("normalized latency, ms", (f"{part}.normalized_latency_ms",), number, "low"),
        Line("TTFT attainment", (f"{part}.ttft_attainment",), percent, "high"),
        Line("TPOT attainment", (f"{part}.tpot_attainment",), percent, "high"),
        Line("both attained", (f"{part}.slo_attainment",), percent, "high"),
        Line("goodput, req/s", (f"{part}.request_goodput",), number, "high"),
    ]


_BE = "classes.be"
SECTIONS: dict[str, list[Line]] = {
    "Real-time": [
        *_latency("classes.rt"),
        Line("request throughput, /s", ("classes.rt.request_throughput",), number, "high"),
    ],
    "Best-effort": [
        Line("queue", (f"{_BE}.saturation",), queue),
        Line("throughput, req/s", (f"{_BE}.window_request_throughput",), number, "high"),
        Line("throughput, tok/s", (f"{_BE}.window_total_token_throughput",), number, "high"),
        Line("latency mean, s", (f"{_BE}.mean_e2el_ms",), lambda ms: number(ms / 1000), "low"),
    ],
    "Applications": [
        Line("completion mean, s", ("applications.mean_jct_s",), number, "low"),
        Line("completion p90, s", ("applications.p90_jct_s",), number, "low"),
        Line("max fair ratio", ("fair_ratio.max_fair_ratio",), number, "low"),
    ],
    "All": [
        Line("requests completed", ("completed",), count),
        Line("requests unfinished", ("unfinished",), count, "low"),
        Line("requests timed out", ("timed_out",), count, "low"),
        Line("failed with another", ("failed",), count, "low"),
        Line("requests never sent", ("never_sent",), count, "low"),
        Line("output tokens wasted", ("wasted_output_tokens",), count, "low"),
        Line("throughput, tok/s", ("total_token_throughput",), number, "high"),
        Line("KV peak", ("kv.peak_use",), percent),
        Line("prefix hit rate", ("kv.prefix_hit_rate",), percent, "high"),
        Line("preemptions: recompute", ("kv.preemptions.recompute",), count),
        Line("preemptions: swap", ("kv.preemptions.swap",), count),
        Line("swapped out", ("kv.swapped_bytes.to_host",), gibibytes),
        Line("steps", ("scheduler.steps",), count),
        Line("mean batch", ("scheduler.mean_batch",), number),
        Line("simulated time", ("duration",), seconds),
        Line("wall time", ("timing.wall_s",), seconds),
        Line("simulated steps/s", ("timing.simulated_steps_per_s",), count),
    ],
}


def overloaded(summary: Mapping, label: str) -> list[str]:
    """A line for each class of a run that does not keep up: what its means are worth."""
    said = []
    for service_class, name in (("rt", "real-time"), ("be", "best-effort")):
        found = summary.get("classes", {}).get(service_class, {}).get("saturation") or {}
        rates = f"{name} requests: {{arrived_per_s:.3g}} a second arrive, {{served_per_s:.3g}} are "
        if found.get("verdict") == "saturated":
            growth = "served, so the queue grows by {growth_per_s:.2g} ± {growth_range_per_s:.1g}"
            means = "means depend on the length of the trace"
            said.append(f"{label}: saturated; {(rates + growth).format(**found)} a second; {means}")
        if found.get("verdict") == "sheds":
            ends = "served, {lost_share:.1%} end early; latencies are of those that are served"
            said.append(f"{label}: sheds; {(rates + ends).format(**found)}")
    return said


# Zero everywhere says that the thing was not in play: such a line is left out.
_ONLY_IF_NONZERO = {
    "requests unfinished",
    "requests timed out",
    "failed with another",
    "requests never sent",
    "output tokens wasted",
    "prefix hit rate",
    "preemptions: recompute",
    "preemptions: swap",
    "swapped out",
}


@dataclass(frozen=True)
class Row:
    """A rendered line: a text for each run, and which are the best (none, where all agree)."""

    title: str
    cells: list[str]
    best: list[bool]


def table_rows(results: Mapping[str, Mapping | RunResult]) -> list[tuple[str, list[Row]]]:
    """(section, rows) of the lines that apply to at least one of the runs; summaries by label."""
    summaries = [_with_timing(result) for result in results.values()]
    sections = []
    for section, lines in SECTIONS.items():
        rows = [row for line in lines if (row := _row(line, summaries)) is not None]
        if rows:
            sections.append((section, rows))
    return sections


def print_table(
    results: Mapping[str, Mapping | RunResult],
    notices: Iterable[str] = (),
    console: Console | None = None,
) -> None:
    """Print runs side by side, then the notices, one line each.

    results  label -> RunResult, or a summary as `summarise` returns it (a "timing" key adds wall
             time and speed, a "fair_ratio" key the fair ratio)

    The best value of a line stands out: bold green, or a star where there is no colour. Runs that
    do not fit the console's width go into a further table below.
    """
    console = console or Console()
    coloured = console.color_system is not None and not console.no_color
    sections = table_rows(results)
    starred = False
    for n, part in enumerate(_parts(list(results), sections, console.width)):
        if n:
            console.print()
        console.print(_table(list(results), part, sections, coloured))
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
    console = Console(file=sink, width=width, color_system=None, legacy_windows=False)
    print_table(results, notices, console)
    lines = (line.rstrip() for line in sink.getvalue().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


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
    value: object = summary
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value if value is None or isinstance(value, Mapping) else float(value)


def _row(line: Line, summaries: Sequence[Mapping]) -> Row | None:
    values = [[_lookup(summary, path) for path in line.paths] for summary in summaries]
    known = [value for row in values for value in row if value is not None]
    if not known or (line.title in _ONLY_IF_NONZERO and not any(known)):
        return None
    shown = [[NONE if v is None else line.show(v) for v in row] for row in values]
    cells = [NONE if set(row) == {NONE} else " / ".join(row) for row in shown]
    best = _best(line, [row[0] for row in values], [row[0] for row in shown])
    return Row(line.title, cells, best)


def _best(line: Line, values: Sequence[Any], shown: Sequence[str]) -> list[bool]:
    """Runs whose leading number is best as shown: a difference that is not seen is none."""
    known = [value for value in values if value is not None]
    if line.better is None or len(known) < 2:
        return [False] * len(values)
    top = min(known) if line.better == "low" else max(known)
    best = [text == line.show(top) for text in shown]
    return [False] * len(best) if sum(best) == len(known) else best


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
    parts: list[list[int]] = [[]]
    used = first
    for i, need in enumerate(needs):
        if parts[-1] and used + need > width:
            parts.append([])
            used = first
        parts[-1].append(i)
        used += need
    return parts


def _table(
    labels: Sequence[str],
    part: Sequence[int],
    sections: list[tuple[str, list[Row]]],
    coloured: bool,
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True)
    for i in part:
        table.add_column(Text(labels[i]), justify="right", overflow="fold", max_width=24)
    for section, rows in sections:
        table.add_row(Text(section, style="bold"))
        for row in rows:
            cells = [_cell(row.cells[i], row.best[i], coloured) for i in part]
            table.add_row(Text(f"  {row.title}"), *cells)
    return table


def _cell(text: str, best: bool, coloured: bool) -> Text:
    if coloured:
        return Text(text, style="bold green" if best else "")
    # The mark has a column of its own, so that numbers stay aligned.
    return Text(text + (f" {BEST_MARK}" if best else "  "))
