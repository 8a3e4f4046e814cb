"""`twinserve compare`: simulated runs compared with measurements."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Flag, Json, Whole
from twinserve.sim.cli.progress import RunProgress

if TYPE_CHECKING:
    from twinserve.traces.measurement import Measurement


def compare(
    paths: Annotated[list[Path], Parameter(negative="")],
    *,
    format: str | None = None,
    columns: str | None = None,
    benchmark: Whole | None = None,
    metrics_every: float | None = None,
    rerun: Flag = False,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    overwrite: Flag = False,
    as_json: Json = False,
) -> None:
    """Compare simulated runs with measured ones, metric by metric.

    For example:

    $ twinserve compare run measured.json --out compared

    Args:
        paths: Folders that `simulate --out` wrote, and files of measurements; several files are
            repeats of one load.
        format: Format of the measured files, if their content does not show it.
        columns: Columns of any CSV file: arrival=ts,prompt=in,output=out,ttft=first:ms
            (docs/traces.md).
        benchmark: Which benchmark of a report of guidellm with several, from 1.
        metrics_every: Seconds of each window that is compared; by default a tenth of the
            measurement.
        rerun: Simulate again with one term changed at a time, and name the terms that lower the
            error.
        out: Folder for compare.json, compare.md and cdf.png.
        overwrite: Replace an earlier comparison in --out.
        as_json: Print verdicts and numbers as JSON and nothing else: a list of runs.
    """
    from twinserve.sim.results.command import command
    from twinserve.sim.results.files import find_runs, read_run
    from twinserve.sim.results.folders import policy_of
    from twinserve.sim.setup.objectives import metrics_options
    from twinserve.sim.twin.compare_report import check_target, compared, lines, printed, write

    every_s = metrics_options(every_s=metrics_every).every_s
    if out is not None:
        check_target(out, overwrite)
    folders, measured = _sides(paths, format, columns, benchmark)
    found = [(str(folder), read_run(folder)) for folder in find_runs(folders)]
    runs = {policy_of(name, run.config.get("label")): run for name, run in found}
    with RunProgress(shown=rerun and not as_json) as progress:
        found = compared(runs, measured, every_s, rerun, progress.begin)
    print(printed(found) if as_json else "\n".join(lines(found)), end="" if as_json else "\n")
    if out is not None:
        given = {"format": format, "columns": columns, "benchmark": benchmark}
        given |= {"metrics_every": metrics_every, "rerun": rerun, "out": out}
        again = f"{command('twinserve compare', given)} {shlex.join(map(str, paths))}"
        written = write(out, found, overwrite, again)
        print(end="" if as_json else f"{written}\n")


def _sides(
    paths: list[Path], format: str | None, columns: str | None, benchmark: int | None
) -> tuple[list[Path], list[Measurement]]:
    """Folders of runs, and measurements. Raises ResultsError if either is missing."""
    from twinserve.sim.results.folders import ResultsError
    from twinserve.traces.readers.formats import read_measurement
    from twinserve.traces.readers.options import ReadOptions

    for path in paths:
        if not path.exists():
            raise ResultsError(f"{path}: no such file or folder: check the name")
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if not folders:
        raise ResultsError("no run's folder: give one that `simulate --out` wrote")
    if not files:
        raise ResultsError("no measured file: name one too (docs/traces.md)")
    options = ReadOptions(columns=columns, benchmark=benchmark)
    return folders, [read_measurement(path, format, options) for path in files]
