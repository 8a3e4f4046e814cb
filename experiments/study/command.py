"""The command lines of the experiments whose points are kept (`grid.run_grid`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from twinserve.sim.cli.main import run_app
from twinserve.sim.setup.config import SettingsError

RESUMABLE = "interrupted; what has ended is kept: the same command goes on from there"
QUICK_SEEDS = 2


@Parameter(name="*")
@dataclass(frozen=True)
class GridOptions:
    """What all of them can be told."""

    quick: Annotated[
        bool,
        Parameter(
            negative="", help="The smallest grid that makes every table and plot; two seeds."
        ),
    ] = False
    seeds: Annotated[int | None, Parameter(help="Seeds of each point.")] = None
    workers: Annotated[int | None, Parameter(help="Processes. [default: one for each core]")] = None
    out: Annotated[
        Path | None,
        Parameter(
            name=["--out", "-o"],
            help="Folder for its files; what has been run stays there. [default: out/NAME]",
        ),
    ] = None
    any_version: Annotated[
        bool,
        Parameter(negative="", help="Also take points that another version of the code has run."),
    ] = False

    def of(self, experiment: str, seeds: int, least_seeds: int = 1) -> GridOptions:
        """With this experiment's defaults for what was left out: so many seeds, and the folder
        out/EXPERIMENT. Raises SettingsError."""
        count = (QUICK_SEEDS if self.quick else seeds) if self.seeds is None else self.seeds
        if not least_seeds <= count <= 1000 or (
            self.workers is not None and not 1 <= self.workers <= 1000
        ):
            raise SettingsError(
                f"--seeds must be from {least_seeds} to 1000, --workers from 1 to 1000"
            )
        return replace(
            self, seeds=count, out=self.out if self.out is not None else Path("out") / experiment
        )


def command_line(
    name: str,
    text: str,
    experiment: Callable[[GridOptions], str],
    seeds: int,
    arguments: list[str] | None = None,
    least_seeds: int = 1,
) -> None:
    """Run `experiment` from the command line and print the report that it returns; bad input ends
    as one line. seeds: unless other ones are asked for."""

    def command(*, options: GridOptions = GridOptions()) -> None:
        print(experiment(options.of(name, seeds, least_seeds)), end="")

    run_app(experiment_app(name, text, seeds, command), arguments, RESUMABLE)


def experiment_app(name: str, text: str, seeds: int, command: Callable) -> cyclopts.App:
    """For `run_app`."""
    text = f"{text} {seeds} seeds, if no other number is asked for."
    app = cyclopts.App(
        name=f"twinserve.experiments.{name}",
        help=text,
        version_flags=[],
        result_action="return_value",
    )
    app.default(command)
    return app
