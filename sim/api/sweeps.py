"""`twinserve.sweep`: many runs, over combinations of settings."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack

import pandas as pd
from rich.console import Console

from twinserve.sim.api.html import printed
from twinserve.sim.api.plots import Plot
from twinserve.sim.api.settings import (
    Settings,
    check_names,
    config_of,
    in_pythons_words,
    measured_with,
    several,
)
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep import combinations as of
from twinserve.sim.sweep import draw, output
from twinserve.sim.sweep.executors import InThisProcess, check_count, processes
from twinserve.sim.sweep.repeats import parse_repeat
from twinserve.sim.sweep.sweep import Sweep as Runner
from twinserve.sim.sweep.sweep import check_names as check_runnable

_WIDTH = 110  # of a table as text


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """table     a row a combination: means over seeds of every number, NAME_ci the half width of
                 its 95 % interval
    runs      a row a run that completed
    failures  a row a run that failed, with its error
    axes      what tells combinations apart
    """

    table: pd.DataFrame
    runs: pd.DataFrame
    failures: pd.DataFrame
    axes: tuple[str, ...]

    def plot(
        self,
        x: str | None = None,
        y: str | Sequence[str] = (),
        size: Literal["page", "column"] = "page",
        title: str = "",
    ) -> Plot:
        """Draw columns `y` of `table` over setting `x`, a line for each combination of the others.
        size: `column` for a paper's column. Raises SettingsError."""
        draw.check_x(self.axes, x)
        names = draw.choose_y(self.table, several(y))
        chosen = x or draw.choose_x(self.table, self.axes)
        if chosen is None:
            raise SettingsError("nothing varies in this sweep: there is no axis to draw over")
        said = f"{', '.join(names)} over {chosen}"
        return Plot(draw.plot(self.table, self.axes, chosen, names, size, title), said)

    def __repr__(self) -> str:
        lost = f", {len(self.failures)} failed" if len(self.failures) else ""
        return f"<Sweep over {', '.join(self.axes)}: {len(self.runs)} runs{lost}>"

    def __str__(self) -> str:
        def show(console: Console) -> None:
            output.print_all(self.runs, self.table, self.axes, console=console)

        return printed(show, width=_WIDTH)

    def _repr_html_(self) -> str:
        known = {name: head for name, head in output.COLUMNS.items() if name in self.table}
        shown = self.table[[*self.axes, *known]].rename(columns=known)
        return shown.to_html(index=False, float_format=lambda value: f"{value:.4g}")


@in_pythons_words
def sweep(
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    seeds: int = 1,
    repeat: str | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    preset: str | None = None,
    config: str | os.PathLike | None = None,
    goodput: Mapping[str, float] | Sequence[str] | None = None,
    warmup: str | int | None = None,
    percentiles: Sequence[float] | str | None = None,
    error_bars: bool = False,
    retry_failed: bool = False,
    any_version: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    policy: str | None = None,
    trace: str | os.PathLike | None = None,
    **settings: Unpack[Settings],
) -> Sweep:
    """Run `simulate` over combinations of its settings.

    grid      setting -> values, all crossed: {"policy": ["vllm", "bros"], "load": [0.5, 0.9]}; or
              a list of combinations: [{"policy": "vllm", "load": 0.5}, ...]
    seeds     runs of each combination, with seed, seed + 1, ...
    repeat    instead of seeds, of a recorded trace: "windows=5", "blocks=20" (docs/sweep.md)
    out       folder in which runs that ended are kept, so that the same call goes on from there;
              None: nothing is kept
    workers   processes; 1: this one. [default: one for each core] A script that is run as a file
              needs `if __name__ == "__main__":` around a call with more than one
    progress  called with (runs done, failed, of all)

    Other arguments are those of `simulate`. Raises TwinserveError.
    """
    check_count("seeds", seeds)
    check_count("workers", workers)
    copies = parse_repeat(repeat, seeds)
    fixed: dict[str, Any] = {**settings}
    fixed |= {} if policy is None else {"policy": (policy,)}
    fixed |= {} if trace is None else {"trace": trace}
    check_names(fixed)

    def build(varied: dict[str, Any]):
        found = config_of(preset, config, {**fixed, **varied})
        check_runnable(found)
        return found

    runs = of.runs_of(of.crossed(sources_of(grid)), copies, build)
    measured = measured_with(goodput, warmup, percentiles=percentiles)

    def report(done: int, failed: int) -> None:
        if progress is not None:
            progress(done, failed, len(runs))

    with TemporaryDirectory(prefix="twinserve-") as temporary:
        folder = Path(temporary if out is None else out)
        if (folder / "run.json").exists():
            raise SettingsError(f"out {folder}: is the folder of a run; name another one")
        runner = Runner(runs, folder, any_version, retry_failed, measured, error_bars, copies)
        runner.run(
            lambda count: InThisProcess() if workers == 1 else processes(workers, count), report
        )
        results, axes = runner.results(), output.axes_of(runs)
        frame = output.runs_frame(results, axes)
        failures = output.failures_frame(results, axes)
        table = output.seed_table(frame, axes) if len(frame) else frame
        if out is not None:
            about = output.about(runs, measured, error_bars, copies)
            output.write_results(folder, frame, table, failures, about)
    return Sweep(table, frame, failures, tuple(axes))


def sources_of(grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> list[of.Source]:
    """Of what a caller has instead of flags and files. Raises SettingsError."""
    if isinstance(grid, Mapping):
        if not grid:
            raise SettingsError('grid: names no setting; write {"load": [0.5, 0.9], ...}')
        return [of.axis("grid", name, several(values)) for name, values in grid.items()]
    return [of.listed("grid", grid)]
