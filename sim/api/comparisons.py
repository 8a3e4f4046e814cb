"""`twinserve.compare`: simulated runs compared with measurements."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from twinserve.sim.api.html import Printed
from twinserve.sim.api.runs import Run, Runs, read_runs
from twinserve.sim.api.settings import in_pythons_words, several
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.folders import ResultsError
from twinserve.sim.setup.objectives import metrics_options
from twinserve.sim.twin.compare_report import Comparison as Found
from twinserve.sim.twin.compare_report import compared, lines, write
from twinserve.traces.readers.formats import read_measurement
from twinserve.traces.readers.options import ReadOptions


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Printed):
    """The two sides by metric and class, and their first difference (docs/metrics.md)."""

    found: Found

    @property
    def table(self) -> pd.DataFrame:
        """A row a class, metric and statistic: measured, spread between repeats (a share), and of
        each run its value and its error (a share). Latencies in seconds."""
        rows = []
        for row in self.found.rows:
            cells = {
                "class": row.service_class,
                "metric": row.metric,
                "statistic": row.statistic,
                "measured": row.measured,
                "spread": row.spread,
            }
            for run, value, off in zip(self.found.runs, row.simulated, row.errors(), strict=True):
                cells |= {run.name: value, f"{run.name} error": off}
            rows.append(cells)
        return pd.DataFrame(rows)

    def save(self, out: str | os.PathLike, overwrite: bool = False) -> Path:
        """Write compare.json, compare.md and cdf.png. Raises ResultsError."""
        return write(Path(out), self.found, overwrite)

    def __repr__(self) -> str:
        runs = ", ".join(run.name for run in self.found.runs)
        return f"<Comparison of {runs}: {len(self.found.rows)} metrics>"

    def __str__(self) -> str:
        return "\n".join(lines(self.found))


@in_pythons_words
def compare(
    runs: Run | Runs | str | os.PathLike | Sequence[str | os.PathLike],
    measured: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    format: str | None = None,
    columns: str | None = None,
    metrics_every: float | None = None,
    rerun: bool = False,
) -> Comparison:
    """Compare simulated runs with measurements of the same load.

    runs      of `simulate`, or folders that were saved
    measured  files of measurements; several are repeats of one load (docs/traces.md)
    format    of the measured files, if their content does not show it
    columns   of any CSV file: "arrival=ts,prompt=in,output=out,ttft=first:ms"
    metrics_every  seconds of a window in which they may part. [default: a tenth of the measurement]
    rerun     simulate again with one term changed after another, and name those that come closer

    Raises TwinserveError.
    """
    every_s = metrics_options(every_s=metrics_every).every_s
    options = ReadOptions(columns=columns)
    found = [read_measurement(Path(file), format, options) for file in several(measured)]
    if not found:
        raise ResultsError("no measured file: name one as well (docs/traces.md)")
    results = _results(runs)
    if not results:
        raise ResultsError("no run: give one of `simulate`, or a folder that was saved")
    return Comparison(compared(results, found, every_s, rerun))


def _results(
    runs: Run | Runs | str | os.PathLike | Sequence[str | os.PathLike],
) -> Mapping[str, RunResult]:
    if isinstance(runs, Run):
        runs = Runs([runs])
    if not isinstance(runs, Runs):
        runs = read_runs(*several(runs))
    return {label: run.result for label, run in runs.items()}
