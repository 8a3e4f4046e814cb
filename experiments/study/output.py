"""What the experiments write: tables as Markdown and CSV, and plots."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.sim.report.static import png
from twinserve.traces.write import write_atomically


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[object]], rules: Sequence[str] = ()
) -> list[str]:
    """A Markdown table; cells may hold `|`. rules: of the columns, as they stand between two `|`;
    by default `---`."""
    top = "|".join(f" {name} " if name else " " for name in header)
    cells = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows)
    return [
        f"|{top}|",
        f"|{'|'.join(rules or ['---'] * len(header))}|",
        *(f"| {row} |" for row in cells),
    ]


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], rules: Sequence[str] = ()
) -> str:
    """`table_lines` as a text that ends its last line."""
    return "\n".join(table_lines(header, rows, rules)) + "\n"


def write_tables(out: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """`NAME.csv` of each. Raises WorkloadError."""
    for name, table in tables.items():
        write_atomically(out / f"{name}.csv", table.to_csv(index=False).encode())


def write_plot(path: Path, canvas: Canvas, dpi: int = 120) -> None:
    """A PNG, the same bytes for the same canvas. Raises WorkloadError."""
    write_atomically(path, png(canvas, dpi))


@cache
def code_version() -> str:
    """`0.1.0`, of a checkout with its commit, and `+` where files have changed since."""
    here = Path(__file__).resolve().parent
    told = _git(here, "describe", "--always", "--exclude=*", "--dirty=+")
    return version("twinserve") + (f" at commit {told}" if told else "")


@cache
def commits_of(folder: Path) -> Mapping[str, str]:
    """File below `folder` -> the commit that wrote it last, and its day; nothing outside of a
    repository."""
    words = ["log", "--format=@%h of %cs", "--name-only", "--relative", "--", "."]
    said = _git(folder, *words) or ""
    found: dict[str, str] = {}
    for block in said.split("@")[1:]:
        commit, *files = block.split("\n")
        found |= {file: commit for file in files if file and file not in found}
    return found


def _git(folder: Path, *words: str) -> str | None:
    try:
        told = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()
