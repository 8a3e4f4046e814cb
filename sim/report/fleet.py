"""Tables below that of the run: a fleet file's pools, parts of a TTFT, costs of failures."""

import io
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.sim.report.table import (
    NONE,
    count,
    number,
    overloaded,
    percent,
    text_console,
    warmup_line,
)
from twinserve.sim.results.files import RunResult

Columns = Mapping[str, tuple[str, Callable[[float], str]]]  # title -> key, how it is shown

_COLUMNS: Columns = {
    "replicas": ("replicas", count),
    "completed": ("completed", count),
    "TTFT mean, ms": ("mean_ttft_ms", number),
    "TTFT p99, ms": ("p99_ttft_ms", number),
    "TPOT mean, ms": ("mean_tpot_ms", number),
    "hits": ("prefix_hit_rate", percent),
    "busy": ("busy", percent),
}
_PARTS: Columns = {f"{q}, ms": (f"{q}_ms", number) for q in ("mean", "p50", "p99")}
_BESIDE: Columns = {
    "completed": ("completed", count),
    "failed": ("failed", count),
    "RT attained": ("rt_attainment", percent),
    "BE attained": ("be_attainment", percent),
    "TTFT mean, ms": ("mean_ttft_ms", number),
    "TTFT p99, ms": ("p99_ttft_ms", number),
    "TPOT mean, ms": ("mean_tpot_ms", number),
}


def print_pools(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """Print a line for each pool of each run, and the parts of its TTFT, whose means add up."""
    console = console or Console()
    for label, result in results.items():
        pools, parts = (result.summary.get(name) for name in ("pools", "ttft_parts"))
        if pools:
            console.print(_titled(f"Pools, {label}", _COLUMNS, pools))
        if pools and parts:
            spoken = {name.replace("_", " "): part for name, part in parts.items()}
            console.print(_titled(f"TTFT by parts, {label}", _PARTS, spoken))


def render_pools(results: Mapping[str, RunResult], width: int = 80) -> str:
    """Return what `print_pools` prints, as plain text of `width` columns."""
    sink = io.StringIO()
    print_pools(results, text_console(sink, width=width))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).strip("\n")


def print_beside(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """Print what each run kept without failures and with one more replica, if run."""
    console = console or Console()
    for label, result in results.items():
        if beside := result.summary.get("failures", {}).get("beside"):
            spoken = {name.replace("_", " "): run for name, run in beside.items()}
            known = {key for run in beside.values() for key in run}
            columns = {title: of for title, of in _BESIDE.items() if of[0] in known}
            console.print(_titled(f"What failures cost, {label}", columns, spoken))


def _titled(title: str, columns: Columns, rows: Mapping[str, Mapping]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        values = [(row.get(key), show) for key, show in columns.values()]
        cells = [NONE if value is None else show(value) for value, show in values]
        table.add_row(Text(name), *cells)
    return table


def notes_of(results: Mapping[str, RunResult]) -> list[str]:
    """Return what the warm-up took, which runs do not keep up, and what policies counted."""
    took = [warmup_line(r.summary["warmup"]) for r in results.values() if "warmup" in r.summary]
    loads = [said for label, run in results.items() for said in overloaded(run.summary, label)]
    return [*dict.fromkeys(took), *loads, *_counted(results)]


def _counted(results: Mapping[str, RunResult]) -> list[str]:
    """A line for each policy that counts how its steps were decided."""
    counters = {
        label: result.config["policy"].get("counters", {}) for label, result in results.items()
    }
    return [
        f"{label}: "
        + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in found.items())
        for label, found in counters.items()
        if found
    ]


MOST_LINES = 40  # of one run; more are not read in a terminal
_OF_WINDOW = (
    "from, s",
    "requests",
    "in/s",
    "out/s",
    "in system",
    "TTFT mean / p99, ms",
    "attained",
)


def print_windows(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """A table for each run that has windows, of its real-time requests, or of all if there are
    no such. Nothing for runs without windows, a line if there are too many."""
    console = console or Console()
    for label, result in results.items():
        windows = result.summary.get("windows")
        if windows is None:
            continue
        console.print()
        if len(windows) > MOST_LINES:
            many = f"{len(windows):,} windows, too many to print"
            console.print(Text(f"{label}: {many}; --json and --out have them"))
            continue
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
        for column in _OF_WINDOW:
            table.add_column(column, justify="right", no_wrap=True)
        for window in of_interest(windows):
            table.add_row(*_cells(window))
        whose = ", real-time requests" if any_real_time(windows) else ""
        console.print(Text(f"{label}{whose}", style="bold"))
        console.print(table)


def any_real_time(windows: Sequence[Mapping]) -> bool:
    return any("rt" in window["classes"] for window in windows)


def of_interest(windows: Sequence[Mapping]) -> list[dict]:
    """The windows with the numbers of the real-time requests, or of all if there are no such:
    best-effort batches would drown what real-time requests see."""
    if not any_real_time(windows):
        return [dict(window) for window in windows]
    return [{**window, **window["classes"].get("rt", {})} for window in windows]


def _cells(window: Mapping) -> list[str]:
    ttft = [_shown(window[f"{statistic}_ttft_ms"]) for statistic in ("mean", "p99")]
    attained = window.get("slo_attainment")
    return [
        f"{window['start_s']:,.0f}",
        f"{window['requests']:,}",
        _shown(window["arrivals_per_s"]),
        _shown(window["served_per_s"]),
        f"{window['in_system']:,}",
        NONE if set(ttft) == {NONE} else " / ".join(ttft),
        NONE if attained is None else percent(attained),
    ]


def _shown(value: float | None) -> str:
    return NONE if value is None else number(value)
