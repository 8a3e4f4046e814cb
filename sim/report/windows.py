"""The windows of a run (`--metrics-every`) as a small table a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.sim.report.table import NONE, number, percent
from twinserve.sim.results.files import RunResult

MOST_LINES = 40  # of one run; more are not read in a terminal
_COLUMNS = ("from, s", "requests", "in/s", "out/s", "in system", "TTFT mean / p99, ms", "attained")


def print_windows(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """A table for each run that has windows, of its real-time requests, or of all where there are
    no such. Nothing for runs without windows, a line where there are too many."""
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
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for window in of_interest(windows):
            table.add_row(*_cells(window))
        whose = ", real-time requests" if any_real_time(windows) else ""
        console.print(Text(f"{label}{whose}", style="bold"))
        console.print(table)


def any_real_time(windows: Sequence[Mapping]) -> bool:
    return any("rt" in window["classes"] for window in windows)


def of_interest(windows: Sequence[Mapping]) -> list[dict]:
    """The windows with the numbers of the real-time requests, or of all where there are no such:
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
