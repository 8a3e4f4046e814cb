"""Leaving the start of a run out of its metrics, while its queues and caches fill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.columns import Columns
from twinserve.sim.results.files import POOL_GROUP, ResultsError, RunRows
from twinserve.sim.results.options import Warmup
from twinserve.traces.workload import WorkloadError

if TYPE_CHECKING:
    import pandas as pd


def warmup_end_s(warmup: Warmup, requests: Columns) -> float:
    """Seconds on the clock of the run. Raises WorkloadError where no request is left after it.

    Of N requests: when request N + 1 arrives, in order of arrival. Those of the best-effort pool
    are not counted: a batch of them comes at once, when the one before it ends.
    """
    arrival = requests["arrival_s"]
    if warmup.seconds is not None:
        end = np.min(arrival, initial=np.inf) + warmup.seconds
        if not (arrival >= end).any():
            span = np.max(arrival, initial=-np.inf) - np.min(arrival, initial=np.inf)
            raise WorkloadError(warmup.too_long(f"requests arrive for {max(span, 0):,.4g} s"))
        return float(end)
    listed = np.sort(arrival[requests["group"] != POOL_GROUP])
    if len(listed) <= warmup.requests:
        raise WorkloadError(warmup.too_long(f"there are {len(listed):,} requests"))
    return float(listed[warmup.requests])


def after_warmup(rows: RunRows, end_s: float) -> RunRows:
    """Requests that arrived at `end_s` (seconds) or later, steps that began then, and the gaps of
    their tokens. Raises ResultsError where gaps were not kept apart in the run."""
    if "warmup" not in rows.gaps:
        raise ResultsError(
            "--warmup: the gaps of this run are pooled from its start on; run it again with that "
            "warm-up"
        )
    return replace(
        rows,
        requests=rows.request_columns.take(rows.request_columns["arrival_s"] >= end_s),
        steps=rows.steps[rows.steps["start_s"] >= end_s],
        gaps=rows.gaps[~rows.gaps["warmup"].to_numpy(bool)],
    )


def whole_groups(requests: pd.DataFrame, since_s: float) -> np.ndarray:
    """bool[n]: not of an application or session that began before `since_s`."""
    first = requests.groupby("group")["arrival_s"].transform("min")  # NaN: of no group
    return ~(first < since_s).to_numpy()
