"""The tables of a fleet file's pools, and of the parts of a TTFT, below that of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinserve.sim.report.table import NONE, count, number, percent
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
