"""`twinserve study`: the studies of this package, by name."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from twinserve.sim.cli.options import Flag
from twinserve.sim.setup.config import SettingsError

RESUMABLE = "interrupted; finished runs are kept: the same command goes on from there"
QUICK_SEEDS = 2
# name -> the question it answers; `experiments/NAME/main.py` has it as STUDY
STUDIES = {
    "bros": "The figures and tables of BROS's paper.",
    "echo": "The figures and tables of Echo's paper.",
    "layerkv": "The figures of LayerKV's paper.",
    "justitia": "The figures and tables of Justitia's paper.",
    "systems": "The four systems side by side, and which part of each earns what.",
    "routers": "Routers on the same requests.",
    "apart": "When prefill apart from decode pays on equal GPUs.",
    "benchmark": "How fast the simulator is on this machine.",
    "serving": "Live vLLM servers on this machine: what a policy costs, how far predictions hold.",
    "route": "`twinserve route` before live servers, and simulated.",
    "validation": "Runs and steps that others measured on vLLM, simulated.",
    "step_times": "Forms of step times on steps and runs that others measured.",
    "silicon": "Closed loops that others measured on GPUs, simulated.",
    "optimality": "How far BROS's Algorithm 1 is from the best batch.",
}


@Parameter(name="*")
@dataclass(frozen=True)
class GridOptions:
    """Options of every study.

    Parameters
    ----------
    quick:
        The smallest grid that makes every table and plot; two seeds.
    seeds:
        Seeds of each point. [default: the study's own]
    workers:
        Processes. [default: one for each core]
    out:
        Folder for its files; what has been run stays there. [default: out/NAME]
    any_version:
        Also take points that another version of the code has run.
    only:
        AXIS=VALUE: only points with this value, such as policy=vllm; several: any of an axis's
        values.
    redraw:
        Run nothing: tables, plots and claims again, from points.csv.
    check:
        Run nothing: name the figures whose kept results this code does not make; exit status 1 if
        there are some.
    """

    quick: Flag = False
    seeds: int | None = None
    workers: int | None = None
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None
    any_version: Flag = False
    only: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    redraw: Flag = False
    check: Flag = False

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


def study(
    name: Annotated[
        str, Parameter(help="A study's name, or your own file with one. Without: list them.")
    ] = "",
    *figure: Annotated[str, Parameter(help="Names of its figures; none: all of them.")],
    options: GridOptions = GridOptions(),
) -> None:
    """Run a study: its grid of runs, its tables, plots and claims."""
    if not name:
        print("\n".join(f"{known:12} {line}" for known, line in STUDIES.items()))
        return
    found = _of_file(Path(name)) if name.endswith(".py") else _of_package(name)
    if options.check:
        stale = found.check(figure, options.out or Path("out") / found.system)
        print("\n".join(stale or ["what is kept is what this code makes"]))
        sys.exit(1 if stale else 0)
    try:
        print(found.command(figure, options), end="")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(RESUMABLE) from None


def _of_package(name: str) -> Any:
    if name not in STUDIES:
        from twinserve.policies.names import hint  # help waits for no numpy

        raise SettingsError(
            f"no study {name!r}{hint(name, list(STUDIES))}; `twinserve study` lists them"
        )
    return import_module(f"twinserve.experiments.{name}.main").STUDY


def _of_file(file: Path) -> Any:
    """STUDY of a Python file. Raises SettingsError."""
    try:
        return runpy.run_path(str(file))["STUDY"]
    except FileNotFoundError:
        raise SettingsError(f"{file}: there is no such file; check the path") from None
    except KeyError:
        raise SettingsError(f"{file}: names no STUDY; docs/sweep.md has an example") from None
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SettingsError(f"{file}: {said}") from None
