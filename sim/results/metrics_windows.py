"""A run over time: the metrics of each window of arrivals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from twinserve.sim.results.metrics_attainment import describe_attainment, e2el_bound
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.results.metrics_stats import describe_ms, with_always
from twinserve.sim.results.options import MetricsOptions

_ATTAINED = ("ttft_attainment", "tpot_attainment", "slo_attainment", "e2el_attainment")


def describe_windows(
    requests: pd.DataFrame, options: MetricsOptions, first_s: float, end_s: float
) -> list[dict]:
    """`windows` of summary.json, `options.every_s` seconds each, from `first_s` on until all that
    comes and ends until `end_s` has (seconds on the clock of the run).

        first_s                                     end_s
        |---------- every ---------|-- every --|-- rest --|

    A window has its start and lacks its end, but for the last one, which has both. Latencies and
    attainment are of the requests that arrived in it, whenever they ended; served and in_system
    of all, also of those that arrived before `first_s`.
    """
    if options.every_s is None or not math.isfinite(first_s) or not end_s >= first_s:
        return []
    n = max(math.ceil((end_s - first_s) / options.every_s), 1)
    edges = np.minimum(first_s + options.every_s * np.arange(n + 1), end_s)
    edges[-1] = end_s
    r = RequestColumns.of(requests)
    ended = requests["ended_s"].to_numpy(np.float64)
    when = _Events(_window_of(r.arrival, edges), _window_of(ended, edges), r.finished)
    return [
        {
            "start_s": float(edges[i]),
            "end_s": float(edges[i + 1]),
            **_describe(r, when, np.ones(len(ended), bool), i, edges, options),
            "classes": {
                name: _describe(r, when, mine, i, edges, options)
                | _attained(r, mine & (when.arrived == i), e2el_bound(options.objectives, name))
                for name in ("rt", "be")
                if (mine := r.service_class == name).any()
            },
        }
        for i in range(n)
    ]


@dataclass(frozen=True)
class _Events:
    """Of each request: windows in which it arrived and ended (-1: before the first; n, where there
    are n: not in the run), and whether it was completed."""

    arrived: np.ndarray
    ended: np.ndarray
    finished: np.ndarray


def _window_of(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """int64[m], by the windows between `edges`; NaN is after the last one."""
    last = len(edges) - 2
    window = np.searchsorted(edges[:-1], times, side="right") - 1
    return np.where(np.isnan(times), last + 1, window)


def _describe(
    r: RequestColumns,
    when: _Events,
    mine: np.ndarray,
    i: int,
    edges: np.ndarray,
    options: MetricsOptions,
) -> dict:
    percentiles = with_always(options.percentiles)
    here = mine & (when.arrived == i)
    done = here & r.finished
    served = int((mine & when.finished & (when.ended == i)).sum())
    seconds = float(edges[i + 1] - edges[i])
    return {
        "requests": int(here.sum()),
        "completed": int(done.sum()),
        "served": served,
        "arrivals_per_s": _rate(int(here.sum()), seconds),
        "served_per_s": _rate(served, seconds),
        "in_system": int((mine & (when.arrived <= i) & (when.ended > i)).sum()),
        **_latencies(r, done, percentiles),
    }


def _latencies(r: RequestColumns, done: np.ndarray, percentiles: Sequence[float]) -> dict:
    return {
        **describe_ms("ttft", r.ttft[done], percentiles),
        **describe_ms("tpot", r.tpot[done & (r.output > 1)], percentiles),
        **describe_ms("e2el", r.e2el[done], percentiles),
    }


def _attained(r: RequestColumns, here: np.ndarray, e2el_s: float | None) -> dict:
    found = describe_attainment(r, here, e2el_s)
    return {name: found[name] for name in _ATTAINED if name in found}


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
