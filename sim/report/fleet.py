"""The tables of a fleet file's pools, of the parts of a TTFT, and of what failures cost; they stand
below that of the run."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.sim.report.table import NONE, count, number, percent, text_console
from twinserve.sim.results.files import RunResult

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "replicas": ("replicas", count),
    "completed": ("completed", count),
    "TTFT mean, ms": ("mean_ttft_ms", number),
    "TTFT p99, ms": ("p99_ttft_ms", number),
    "TPOT mean, ms": ("mean_tpot_ms", number),
    "hits": ("prefix_hit_rate", percent),
    "busy": ("busy", percent),
}


def print_pools(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """A line for each pool of each run; nothing where there are none."""
    console = console or Console()
    for label, result in results.items():
        pools = result.summary.get("pools")
        if not pools:
            continue
        table = Table(title=f"Pools, {label}", title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        for title in _COLUMNS:
            table.add_column(title, justify="right")
        for name, pool in pools.items():
            cells = [
                NONE if pool[key] is None else show(pool[key]) for key, show in _COLUMNS.values()
            ]
            table.add_row(Text(name), *cells)
        console.print(table)
        if parts := result.summary.get("ttft_parts"):
            console.print(_parts(label, parts))


def render_pools(results: Mapping[str, RunResult], width: int = 80) -> str:
    """What `print_pools` prints, as plain text of `width` columns; empty where there is nothing."""
    sink = io.StringIO()
    print_pools(results, text_console(sink, width=width))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).strip("\n")


_BESIDE = {
    "completed": ("completed", count),
    "failed": ("failed", count),
    "RT attained": ("rt_attainment", percent),
    "BE attained": ("be_attainment", percent),
    "TTFT mean, ms": ("mean_ttft_ms", number),
    "TTFT p99, ms": ("p99_ttft_ms", number),
    "TPOT mean, ms": ("mean_tpot_ms", number),
}


def print_beside(results: Mapping[str, RunResult], console: Console | None = None) -> None:
    """What each run would have kept without its failures, and with one more replica; nothing where
    that was not run."""
    console = console or Console()
    for label, result in results.items():
        beside = result.summary.get("failures", {}).get("beside")
        if not beside:
            continue
        title = f"What failures cost, {label}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        shown = {t: of for t, of in _BESIDE.items() if any(of[0] in run for run in beside.values())}
        for name in shown:
            table.add_column(name, justify="right")
        for name, run in beside.items():
            values = [(run.get(key), show) for key, show in shown.values()]
            cells = [NONE if value is None else show(value) for value, show in values]
            table.add_row(Text(name.replace("_", " ")), *cells)
        console.print(table)


def _parts(label: str, parts: Mapping[str, Mapping[str, float | None]]) -> Table:
    """What a time to first token consists of: the means add up to the mean."""
    title = f"TTFT by parts, {label}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for name in ("mean, ms", "p50, ms", "p99, ms"):
        table.add_column(name, justify="right")
    for name, part in parts.items():
        cells = [NONE if value is None else number(value) for value in part.values()]
        table.add_row(Text(name.replace("_", " ")), *cells)
    return table
