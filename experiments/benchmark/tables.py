"""Tables of text: on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from twinserve.experiments.study.output import table_lines


@dataclass(frozen=True)
class Table:
    """rows hold text; the first column is a name, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def machine_lines(computer: dict) -> list[str]:
    """What a report's `machine` says."""
    libraries = ", ".join(f"{name} {number}" for name, number in computer["versions"].items())
    load = computer["load_average_1min"]
    return [
        f"Machine: {computer['cpu']}, {computer['cores']} cores, {computer['system']}; "
        + ("on one core" if computer["core"] is not None else "not pinned to a core")
        + ("" if load is None else f"; load average at the start {load:.2f}"),
        f"Python {computer['python']}; {libraries}",
    ]


def show(lines: Iterable[str], found: Iterable[Table], console: Console) -> None:
    """Lines and tables on `console`."""
    for line in lines:
        console.print(line, soft_wrap=True)
    for table in found:
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, column in enumerate(table.header):
            shown.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*row)
        console.print()
        console.print(table.title, style="bold", soft_wrap=True)
        console.print(shown)


def markdown(lines: Iterable[str], found: Iterable[Table]) -> str:
    """Lines and tables as Markdown."""
    parts = ["\n".join(f"- {line}" for line in lines)]
    for table in found:
        rules = [" :-- ", *(" --: " for _ in table.header[1:])]
        parts += [f"### {table.title}", "\n".join(table_lines(table.header, table.rows, rules))]
    return "\n\n".join(parts) + "\n"
