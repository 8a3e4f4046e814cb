"""What the experiments on profiles write, and their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import cyclopts
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure as Canvas

from ..profiles.specs import ProfileError
from ..sim.config import SettingsError
from ..traces.workload import WorkloadError
from ..traces.write import write_atomically

# quick, seeds, workers, folder, any version -> Markdown
Experiment = Callable[[bool, int, int | None, Path, bool], str]


def write_tables(out: Path, tables: Mapping[str, pd.DataFrame], markdown: str) -> None:
    """`NAME.csv` of each, and `report.md`."""
    for name, table in tables.items():
        write_atomically(out / f"{name}.csv", table.to_csv(index=False).encode())
    write_atomically(out / "report.md", markdown.encode())


def write_plot(path: Path, canvas: Canvas) -> None:
    partial = path.with_name(f".{path.name}.partial.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(partial, dpi=120, metadata={"Software": None})
    partial.replace(path)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def command_line(name: str, text: str, experiment: Experiment, seeds_default: int, arguments: list[str] | None = None) -> None:
    """Run `experiment` from the command line; bad input ends as one line."""

    def command(
        *,
        quick: Annotated[bool, Parameter(negative="")] = False,
        seeds: int | None = None,
        workers: int | None = None,
        out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
        any_version: Annotated[bool, Parameter(negative="")] = False,
    ) -> None:
        """Run it, write tables and plot, print the report.

        Parameters
        ----------
        quick: bool
            The smallest grid that makes every table and plot; two seeds.
        seeds: int
            Seeds of each point.
        workers: int
            Processes. [default: one for each core]
        out: Path
            Folder for CSV, PNG and Markdown; what has been run stays there. [default: out/NAME]
        any_version: bool
            Also take points that another version of the code has run.
        """
        count = (2 if quick else seeds_default) if seeds is None else seeds
        if count < 1 or (workers is not None and workers < 1):
            raise SettingsError("--seeds and --workers must be at least 1")
        print(experiment(quick, count, workers, out if out is not None else Path("out") / name, any_version), end="")

    app = cyclopts.App(name=f"twinserve.experiments.{name}", help=text, version_flags=[])
    app.default(command)
    app.suppress_keyboard_interrupt = False  # else it ends without a word
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, SettingsError, WorkloadError, ProfileError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted; what has ended is kept: the same command goes on from there")
