"""Distributions of seconds as `vllm bench serve` reports them, also of values with counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinserve.sim.results.options import percentile_name

PERCENTILES = (50, 90, 95, 99)
MS = 1000.0  # milliseconds a second


def with_always(percentiles: Sequence[float]) -> tuple[float, ...]:
    """PERCENTILES, then those of `percentiles` that are not among them."""
    return (*PERCENTILES, *(q for q in percentiles if q not in PERCENTILES))


def describe_ms(
    name: str, seconds: np.ndarray, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float | None]:
    """{mean,median,std,p50,p90,p95,p99}_{name}_ms of `seconds` (float64[n]); None where n is 0.

    The standard deviation is the population's, as numpy's default and vLLM's.
    """
    if len(seconds) == 0:
        return _named(name, percentiles, None, None, None, [None] * len(percentiles))
    return _named(
        name,
        percentiles,
        np.mean(seconds) * MS,
        np.median(seconds) * MS,
        np.std(seconds) * MS,
        np.percentile(seconds, percentiles) * MS,
    )


def describe_counted_ms(
    name: str, seconds: np.ndarray, counts: np.ndarray, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float | None]:
    """`describe_ms` of a list with counts[i] >= 1 times seconds[i]; `seconds` ascending."""
    total = counts.sum()
    if total == 0:
        return describe_ms(name, seconds[:0], percentiles)
    mean = sum_of_products(seconds, counts) / total
    std = np.sqrt(sum_of_products(np.square(seconds - mean), counts) / total)
    cumulated = np.cumsum(counts)
    middle = _order_statistic(seconds, cumulated, np.array([(total - 1) // 2, total // 2]))
    found = _percentiles(seconds, cumulated, percentiles) * MS
    return _named(name, percentiles, mean * MS, np.mean(middle) * MS, std * MS, found)


def sum_of_products(values: np.ndarray, weights: np.ndarray) -> float:
    """Sum of values[i] * weights[i]; not np.dot, whose last bits depend on the processor and on the
    number of threads that its BLAS finds."""
    return float(np.sum(values * weights))


def counted_order(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64[m]: what sorts `values` ascending, count 0 left out. ValueError: a negative count."""
    if len(counts) and counts.min() < 0:
        raise ValueError("a count below zero")
    order = np.argsort(values, kind="stable")
    return order[counts[order] > 0]


def _percentiles(
    values: np.ndarray, cumulated: np.ndarray, percentiles: Sequence[float]
) -> np.ndarray:
    """numpy's linearly interpolated percentiles of the expanded list, without that list: the same
    virtual index, the same two-sided interpolation, so bit for bit the same."""
    last = cumulated[-1] - 1
    position = last * np.true_divide(percentiles, 100.0)
    lower = np.floor(position).astype(np.int64)
    share = position - lower
    a = _order_statistic(values, cumulated, lower)
    b = _order_statistic(values, cumulated, np.minimum(lower + 1, last))
    # Interpolate from the nearer end, as numpy does: the rounding then agrees in the last bit.
    step = b - a
    return np.where(share >= 0.5, b - step * (1 - share), a + step * share)


def _order_statistic(values: np.ndarray, cumulated: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """values[ranks] of the expanded list, ranks from 0."""
    return values[np.searchsorted(cumulated, ranks, side="right")]


def _named(
    name: str, percentiles: Sequence[float], mean, median, std, values
) -> dict[str, float | None]:
    stats = {"mean": mean, "median": median, "std": std}
    stats |= {percentile_name(q): v for q, v in zip(percentiles, values, strict=True)}
    return {
        f"{stat}_{name}_ms": None if value is None else float(value)
        for stat, value in stats.items()
    }
