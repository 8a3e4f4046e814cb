"""Means over seeds, with their confidence intervals."""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pandas as pd

from twinserve.sim.results.metrics_objectives import due_and_met
from twinserve.sim.results.metrics_requests import RequestColumns


def interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return mean and half width of its Student interval; half width nan for a single value."""
    found = np.asarray(list(values), float)
    if len(found) < 2:
        return float(found.mean()), float("nan")
    half = _student(confidence, len(found)) * found.std(ddof=1) / np.sqrt(len(found))
    return float(found.mean()), float(half)


@cache
def _student(confidence: float, count: int) -> float:
    """Return the interval's half width in standard errors, cached for tables."""
    from scipy import special  # the workers of a grid need none; scipy.stats takes a second

    return float(special.stdtrit(count - 1, 0.5 + confidence / 2))


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return a row for each combination of `by`, in order of appearance: the mean of each of
    `values`, and the half width as NAME_ci."""
    rows = []
    for keys, group in frame.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, keys if isinstance(keys, tuple) else (keys,), strict=True)) | {
            "seeds": len(group)
        }
        for name in values:
            row[name], row[f"{name}_ci"] = interval(group[name])
        rows.append(row)
    return pd.DataFrame(rows)


DRAWS = 1000
_PERCENTILES = (50, 90, 95, 99)


def half_widths(requests: pd.DataFrame, blocks: int) -> dict[str, float]:
    """Return half widths of 95 % intervals by dotted name in summary.json: means and percentiles of
    latencies in ms, and attainment by class.

    requests  rows of a run; blocks: of equal time, of the arrivals
    """
    r = RequestColumns.of(requests)
    if not len(requests):
        return {}
    edges = np.linspace(np.nanmin(r.arrival), np.nanmax(r.arrival), blocks + 1)
    place = np.clip(np.searchsorted(edges, r.arrival, side="right") - 1, 0, blocks - 1)
    drawn = np.random.default_rng(0).integers(0, blocks, (DRAWS, blocks))
    times = np.stack([np.bincount(row, minlength=blocks) for row in drawn])
    found: dict[str, float] = {}
    for name in ("rt", "be"):
        mine = r.service_class == name
        for metric in ("ttft", "tpot", "e2el"):
            seconds = getattr(r, metric)
            known = mine & ~np.isnan(seconds)
            known &= (r.output > 1) if metric == "tpot" else True
            if known.any():
                found |= _of(f"classes.{name}", metric, seconds[known] * 1e3, place[known], times)
        due, met = due_and_met(r, mine)
        if due.any():
            path = f"classes.{name}.slo_attainment"
            found[path] = _half(_means(met[due].astype(float), place[due], times))
    return found


def _of(part: str, metric: str, ms: np.ndarray, place: np.ndarray, times: np.ndarray) -> dict:
    found = {f"{part}.mean_{metric}_ms": _half(_means(ms, place, times))}
    order = np.argsort(ms, kind="stable")
    ms, place = ms[order], place[order]
    values = np.empty((len(times), len(_PERCENTILES)))
    for draw, weights in enumerate(times):
        ranks = np.cumsum(weights[place])
        wanted = np.array(_PERCENTILES) / 100 * ranks[-1]
        values[draw] = ms[np.minimum(np.searchsorted(ranks, wanted), len(ms) - 1)]
    halves = map(_half, values.T)
    return found | {
        f"{part}.p{q}_{metric}_ms": half for q, half in zip(_PERCENTILES, halves, strict=True)
    }


def _means(values: np.ndarray, place: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return float64[draws]; nan for a draw without values."""
    blocks = times.shape[1]
    counts = times @ np.bincount(place, minlength=blocks)
    sums = times @ np.bincount(place, values, minlength=blocks)
    return np.divide(sums, counts, out=np.full(len(times), np.nan), where=counts > 0)


def _half(draws: np.ndarray) -> float:
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(high - low) / 2
