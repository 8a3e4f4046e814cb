"""The command lines of the experiments whose points are kept (`grid.run_grid`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from ..sim.cli import run_app
from ..sim.config import SettingsError

RESUMABLE = "interrupted; what has ended is kept: the same command goes on from there"
# quick, seeds, workers, folder, any version -> what to print
Experiment = Callable[[bool, int, int | None, Path, bool], str]


def check_counts(seeds: int, workers: int | None) -> None:
    if not 1 <= seeds <= 1000 or (workers is not None and not 1 <= workers <= 1000):
        raise SettingsError("--seeds and --workers must be from 1 to 1000")


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
        check_counts(count, workers)
        print(experiment(quick, count, workers, out if out is not None else Path("out") / name, any_version), end="")

    app = cyclopts.App(name=f"twinserve.experiments.{name}", help=text, version_flags=[], result_action="return_value")
    app.default(command)
    run_app(app, arguments, RESUMABLE)
