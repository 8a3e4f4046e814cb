"""A run over time: metrics for each window of arrivals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twinserve.sim.results.columns import Columns
from twinserve.sim.results.metrics_objectives import describe_attainment, e2el_bound
from twinserve.sim.results.metrics_requests import RequestColumns, describe_ms, with_always
from twinserve.sim.results.options import MetricsOptions

_ATTAINED = ("ttft_attainment", "tpot_attainment", "slo_attainment", "e2el_attainment")


def describe_windows(
    requests: Columns, options: MetricsOptions, first_s: float, end_s: float
) -> list[dict]:
    """Return `windows` of summary.json: one each `options.every_s` seconds from `first_s` until all
    that arrives and ends by `end_s` has ended (seconds on the run's clock); or one for each stage.

        first_s                                     end_s
        |---------- every ---------|-- every --|-- rest --|

    A window includes its start but not its end; the last one includes both. Latencies and
    attainment are of requests that arrived in the window, whenever they ended. served and in_system
    count all requests, also those that arrived before `first_s`.
    """
    if not math.isfinite(first_s) or not end_s >= first_s:
        return []
    edges = _edges(options, first_s, end_s)
    n = len(edges) - 1
    r = RequestColumns.of(requests)
    arrived = _window_of(r.arrival, edges)
    ended = _window_of(requests["ended_s"], edges)
    order = np.argsort(arrived, kind="stable")
    cuts = np.searchsorted(arrived[order], np.arange(n + 1))
    everyone = _Flow.of(arrived, ended, r.finished, n)
    classes = {}
    for name in ("rt", "be"):
        if (mine := r.service_class == name).any():
            classes[name] = _Flow.of(arrived[mine], ended[mine], r.finished[mine], n)
    windows = []
    for i in range(n):
        here = r.take(order[cuts[i] : cuts[i + 1]])
        span = float(edges[i]), float(edges[i + 1])
        window = {"start_s": span[0], "end_s": span[1], "classes": {}}
        window |= _describe(here, everyone, i, span, options)
        for name, flow in classes.items():
            part = here.take(here.service_class == name)
            attained = _attained(part, e2el_bound(options.objectives, name))
            window["classes"][name] = _describe(part, flow, i, span, options) | attained
        windows.append(window)
    return windows


def _edges(options: MetricsOptions, first_s: float, end_s: float) -> np.ndarray:
    """Return float64[n + 1] of n windows. The first stage begins before the first request unless a
    warm-up cuts it; what ends after the last stage has a window of its own."""
    if options.every_s is not None:
        n = max(math.ceil((end_s - first_s) / options.every_s), 1)
        edges = np.minimum(first_s + options.every_s * np.arange(n + 1), end_s)
        edges[-1] = end_s
        return edges
    begun = [moment for moment in options.stages_s if moment <= first_s]
    start = max(begun) if begun and options.warmup is None else first_s
    within = [moment for moment in options.stages_s if start < moment < end_s]
    return np.array([start, *within, end_s])


@dataclass(frozen=True)
class _Flow:
    """int64[n] each, by window: requests completed in it, and present at its end."""

    served: np.ndarray
    in_system: np.ndarray

    @classmethod
    def of(cls, arrived: np.ndarray, ended: np.ndarray, finished: np.ndarray, n: int) -> _Flow:
        """Count by windows of arrival and end: -1 is before the first, n never."""
        served = np.bincount(ended[finished] + 1, minlength=n + 2)[1 : n + 1]
        came, went = (np.bincount(x + 1, minlength=n + 2).cumsum() for x in (arrived, ended))
        return cls(served, (came - went)[1 : n + 1])


def _window_of(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return int64[m], the windows between `edges`; NaN is after the last one."""
    last = len(edges) - 2
    window = np.searchsorted(edges[:-1], times, side="right") - 1
    return np.where(np.isnan(times), last + 1, window)


def _describe(
    here: RequestColumns, flow: _Flow, i: int, span: tuple[float, float], options: MetricsOptions
) -> dict:
    """Describe the requests that arrived in window i."""
    percentiles = with_always(options.percentiles)
    n, seconds, served = len(here.e2el), span[1] - span[0], int(flow.served[i])
    done = here.finished
    return {
        "requests": n,
        "completed": int(done.sum()),
        "served": served,
        "arrivals_per_s": _rate(n, seconds),
        "served_per_s": _rate(served, seconds),
        "in_system": int(flow.in_system[i]),
        **describe_ms("ttft", here.ttft[done], percentiles),
        **describe_ms("tpot", here.tpot[done & (here.output > 1)], percentiles),
        **describe_ms("e2el", here.e2el[done], percentiles),
    }


def _attained(here: RequestColumns, e2el_s: float | None) -> dict:
    found = describe_attainment(here, np.ones(len(here.e2el), bool), e2el_s)
    return {name: found[name] for name in _ATTAINED if name in found}


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
