"""Request columns for metrics, latencies and distributions as in `vllm bench serve`, and the
warm-up that metrics leave out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.columns import ENGINE_ARRIVAL, ENGINE_FIRST_TOKEN, OUTCOMES, Columns
from twinserve.sim.results.files import POOL_GROUP, ResultsError, RunRows
from twinserve.sim.results.options import Warmup, percentile_name
from twinserve.sim.results.versions import with_ends
from twinserve.traces.workload import WorkloadError

if TYPE_CHECKING:
    import pandas as pd


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Return ttft_s, tpot_s, e2el_s and normalized_s (seconds a token), with service_class, by
    `requests`' index.

    NaN if undefined: no token yet, not finished, or TPOT of a single token.
    """
    import pandas as pd

    r = RequestColumns.of(requests)
    columns = {
        "service_class": r.service_class,
        "ttft_s": r.ttft,
        "tpot_s": np.where(r.output > 1, r.tpot, np.nan),
        "e2el_s": r.e2el,
        "normalized_s": r.normalized,
    }
    return pd.DataFrame(columns, index=requests.index)


@dataclass(frozen=True)
class RequestColumns:
    """Columns for latencies, numpy arrays of one length; seconds and tokens."""

    service_class: np.ndarray
    finished: np.ndarray
    lost: dict[
        str, np.ndarray
    ]  # outcome but "completed" -> bool[n]: which requests ended like that
    left: np.ndarray  # ended before it had all its tokens, or its client no longer waited
    arrival: np.ndarray
    last: np.ndarray  # last token emitted, NaN for none
    prompt: np.ndarray
    output: np.ndarray
    computed: np.ndarray  # tokens with KV at the end
    queued: np.ndarray  # arrival in the engine to first scheduled
    ttft: np.ndarray  # NaN: no token yet
    engine_ttft: np.ndarray | None  # None: no front end, so that it is the same
    tpot: np.ndarray  # 0 for a single token; NaN: not finished
    e2el: np.ndarray  # NaN: not finished
    normalized: np.ndarray  # e2el a token
    late: np.ndarray
    slo_ttft: np.ndarray
    slo_tpot: np.ndarray

    @classmethod
    def of(cls, table: pd.DataFrame | Columns) -> RequestColumns:
        def number(name: str) -> np.ndarray:
            return np.asarray(table[name], np.float64)

        if not isinstance(table, Columns):
            table = with_ends(table)
        outcome = np.asarray(table["outcome"], object)
        lost = {name: outcome == name for name in OUTCOMES[1:]}
        finished = np.asarray(table["finished"], bool)
        arrival, output = number("arrival_s"), number("output_tokens")
        last = np.where(output > 0, number("last_token_s"), np.nan)
        ttft = number("first_token_s") - arrival
        engine_ttft, came = None, arrival
        if ENGINE_ARRIVAL in table:
            came = number(ENGINE_ARRIVAL)
            engine_ttft = number(ENGINE_FIRST_TOKEN) - came
        e2el = np.where(finished, last - arrival, np.nan)
        single = np.where(finished, 0.0, np.nan)
        tpot = np.where(output > 1, (e2el - ttft) / np.maximum(output - 1, 1), single)
        return cls(
            service_class=np.asarray(table["service_class"], object),
            finished=finished,
            lost=lost,
            left=np.any(list(lost.values()), axis=0),
            arrival=arrival,
            last=last,
            prompt=number("prompt_tokens"),
            output=output,
            computed=number("computed_tokens"),
            queued=number("first_scheduled_s") - came,
            ttft=ttft,
            engine_ttft=engine_ttft,
            tpot=tpot,
            e2el=e2el,
            normalized=e2el / np.maximum(output, 1),
            late=number("late_tokens"),
            slo_ttft=number("slo_ttft_s"),
            slo_tpot=number("slo_tpot_s"),
        )

    def take(self, rows: np.ndarray) -> RequestColumns:
        """Return these rows: positions, or bool[n]."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        lost = {name: who[rows] for name, who in columns.pop("lost").items()}
        taken = {name: None if c is None else c[rows] for name, c in columns.items()}
        return RequestColumns(lost=lost, **taken)


PERCENTILES = (50, 90, 95, 99)
MS = 1000.0  # milliseconds a second
_CHUNK = 1 << 16  # entries of a column that are made at once
Part = Callable[[int, int], np.ndarray]
"""int64 or float64[end - begin]: a column's entries from `begin` to `end`."""


def with_always(percentiles: Sequence[float]) -> tuple[float, ...]:
    """Return PERCENTILES, then the new ones of `percentiles`."""
    return (*PERCENTILES, *(q for q in percentiles if q not in PERCENTILES))


def describe_ms(
    name: str, seconds: np.ndarray, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float | None]:
    """Return {mean,median,std,p50,p90,p95,p99}_{name}_ms of `seconds` (float64[n]); None if n is 0.

    The standard deviation is the population's, as in numpy and vLLM.
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
    """Return `describe_ms` of counts[i] >= 1 times seconds[i]; `seconds` ascending."""
    total = counts.sum()
    if total == 0:
        return describe_ms(name, seconds[:0], percentiles)
    mean = sum_of_products(seconds, counts) / total

    def squares(begin: int, end: int) -> np.ndarray:
        return np.square(seconds[begin:end] - mean) * counts[begin:end]

    std = np.sqrt(summed(squares, 0, len(seconds)) / total)
    cumulated = np.cumsum(counts)
    middle = _order_statistic(seconds, cumulated, np.array([(total - 1) // 2, total // 2]))
    found = _percentiles(seconds, cumulated, percentiles) * MS
    return _named(name, percentiles, mean * MS, np.mean(middle) * MS, std * MS, found)


def sum_of_products(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the sum of values[i] * weights[i]. np.dot is avoided: its last bits depend on the
    processor and on the threads of its BLAS."""
    return summed(lambda begin, end: values[begin:end] * weights[begin:end], 0, len(values))


def summed(part: Part, begin: int, end: int) -> float:
    """Return the sum of a column in pieces, bit for bit numpy's sum of the whole column, which adds
    up halves (`pairwise_sum` in numpy/_core/src/umath/loops_utils.h.src)."""
    n = end - begin
    if n <= _CHUNK:
        return float(np.sum(part(begin, end)))
    half = n // 2
    middle = begin + half - half % 8
    return summed(part, begin, middle) + summed(part, middle, end)


def largest(part: Part, begin: int, end: int) -> float:
    """Return the largest entry, of at least one."""
    starts = range(begin, end, _CHUNK)
    return max(part(start, min(start + _CHUNK, end)).max().item() for start in starts)


def counted_order(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return int64[m] that sorts `values`, without count 0. Raises ValueError: negative count."""
    if len(counts) and counts.min() < 0:
        raise ValueError("a count below zero")
    order = np.argsort(values, kind="stable")
    return order if (counts > 0).all() else order[counts[order] > 0]


def _percentiles(
    values: np.ndarray, cumulated: np.ndarray, percentiles: Sequence[float]
) -> np.ndarray:
    """Return numpy's linearly interpolated percentiles of the expanded list, without expanding it:
    the same virtual index and two-sided interpolation, so bit for bit equal."""
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
    """Return values[ranks] of the expanded list, ranks from 0."""
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


def warmup_end_s(warmup: Warmup, requests: Columns) -> float:
    """Return the warm-up's end, seconds on the run's clock. Raises WorkloadError if no request is
    left.

    A warm-up of N requests ends when request N + 1 arrives. Requests of the best-effort pool do not
    count: each batch comes at once when the last one ends.
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
    """Return requests that arrived at `end_s` (seconds) or later, steps that began then, and the
    gaps of their tokens. Raises ResultsError if the run did not keep gaps apart."""
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
    """Return bool[n]: the application or session did not begin before `since_s`."""
    first = requests.groupby("group")["arrival_s"].transform("min")  # NaN: of no group
    return ~(first < since_s).to_numpy()
