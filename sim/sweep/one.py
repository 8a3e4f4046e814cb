"""One run of a sweep in a worker: settings in, a flat row out."""

import gc
import hashlib
import traceback
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.own_code import fault
from twinserve.profiles.step_times import choose
from twinserve.sim.report.over import HIGH, LOW
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.error_bars import add_error_bars, check_error_bars
from twinserve.sim.setup.hardware import Sources
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import PLAIN, run_each
from twinserve.sim.sweep.points import Kept, sources_digest
from twinserve.sim.sweep.statistics import half_widths
from twinserve.traces.load import load_trace
from twinserve.traces.workload import Workload

NOTICES = "notices"  # column of a run's row
REQUESTS = "requests_sha256"  # another one
HALF = ".half"  # of a number's interval by blocks of time: behind its name
# Of a worker: runs that follow each other mostly have these in common.
_SOURCES = Sources(lru_cache(maxsize=8)(load_trace), lru_cache(maxsize=64)(choose))


def one_run(
    settings: Mapping[str, Any],
    sources: str,
    options: MetricsOptions = PLAIN,
    error_bars: bool = False,
    blocks: int = 0,
) -> Kept:
    """Return the main numbers of a run, or the reason for its failure. Never raises.

    settings    of a SimulationConfig with one policy, as JSON has them
    sources     required digest of the package: another machine may have another version
    options     further metrics
    blocks      of time, for intervals of this run (`sim/sweep/statistics.py`); 0: none
    error_bars  four more runs, with step times off (`sim/setup/error_bars.py`)
    """
    _settle()
    try:
        if sources_digest(one_run) != sources:
            raise RuntimeError(
                "this worker has another twinserve than the sweep; install the same there"
            )
        inputs = resolve(SimulationConfig(**settings), sources=_SOURCES)
        if error_bars:
            check_error_bars(inputs)
        ((spec, result),) = run_each(inputs, options=options)
        if error_bars:
            add_error_bars(inputs, spec, result, options=options)
        row = flat(result.summary) | _bars(result.summary) | _said(result.config["notices"])
        halves = half_widths(result.rows.requests, blocks) if blocks else {}
        row |= {f"{name}{HALF}": half for name, half in halves.items()}
        return Kept([row | {REQUESTS: _requests(inputs.workload)}])
    except Exception as error:
        return Kept([], failure(error))
    finally:
        # a simulation's objects refer to each other in circles; a worker would keep dozens of them
        gc.collect()


def _requests(workload: Workload) -> str:
    """Return a digest of the request list, without batches of the pool."""
    columns = workload.arrival_s, workload.prompt_tokens, workload.output_tokens
    digest = hashlib.sha256()
    for column in columns:
        digest.update(column.astype(np.float64).tobytes())
    return digest.hexdigest()[:16]


def _bars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return NAME.low and NAME.high for each number with an error bar."""
    row: dict[str, float] = {}
    for name, (low, high) in summary.get("error_bars", {}).items():
        row |= {f"{name}{LOW}": low, f"{name}{HIGH}": high}
    return row


def _said(notices: Sequence[str]) -> dict[str, str]:
    """Return notices on the run's requests, which may differ from run to run."""
    return {NOTICES: "\n".join(notices)} if notices else {}


def failure(error: BaseException) -> str:
    """Return one line. For an error not worded for users, add its type and place."""
    said = " ".join(str(error).split())
    if said and isinstance(error, ValueError) and type(error) is not ValueError:
        return said
    if own := fault(error):
        return own
    first = error
    while first.__cause__ is not None:  # simpy raises another one of the same kind
        first = first.__cause__
    frames = traceback.extract_tb(first.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}".rstrip(": ") + where


@cache
def _settle() -> None:
    """Exempt imported objects from the garbage collection after each run."""
    gc.collect()
    gc.freeze()


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every single value of a summary by dotted name: classes.rt.mean_ttft_ms."""
    row: dict[str, Any] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            row |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, (list, tuple)):
            row[f"{prefix}{name}"] = value
    return row
