"""Simulated runs compared with measured ones: metric by metric, by class and window of time, with
their first difference.

Several measurements are repeats of one load: their mean is compared, and a difference must exceed
their spread. With one measurement the spread is unknown, and a difference counts from TOLERANCE on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinserve.sim.results.metrics_requests import MS, describe_counted_ms
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.run import MOST_WINDOWS
from twinserve.sim.twin.served import METRICS, Served

TOLERANCE = 0.10  # of a mean, if no repeats say how far it moves by itself
WINDOWS = 10
LEAST = 5  # requests of a window whose mean is compared
PERCENTILES = (50, 90, 99)
STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


@dataclass(frozen=True)
class Row:
    """One number, measured and simulated.

    service_class  "all", "rt" or "be"
    metric         ttft, tpot, itl, e2el, queued (seconds); prompt, output (tokens); throughput
    spread         (highest - lowest) / mean of the repeats; None: one measurement
    """

    service_class: str
    metric: str
    statistic: str
    measured: float
    spread: float | None
    simulated: tuple[float, ...]

    def errors(self) -> tuple[float, ...]:
        """Of each run: simulated / measured - 1."""
        return tuple(value / self.measured - 1 for value in self.simulated)


@dataclass(frozen=True)
class Window:
    """Means over the requests that arrived in start_s .. end_s."""

    metric: str
    start_s: float
    end_s: float
    requests: int
    measured: float
    spread: float | None
    simulated: tuple[float, ...]


@dataclass(frozen=True)
class Distance:
    """Where two distributions are furthest apart: the share of values at or below `seconds`."""

    metric: str
    seconds: float
    measured: float
    simulated: float


def table(measured: Sequence[Served], runs: Sequence[Served]) -> list[Row]:
    """Every number that both sides have; classes of their own only where both have them."""
    classes = set.intersection(*(set(s.service_class) for s in (*measured, *runs)))
    sides = [("all", list(measured), list(runs))]
    if any(len(set(s.service_class)) > 1 for s in measured):
        for name in sorted(classes, reverse=True):
            sides.append(
                (name, *([s.take(s.service_class == name) for s in t] for t in (measured, runs)))
            )
    rows = []
    for name, theirs, ours in sides:
        for metric in (*METRICS, "prompt", "output"):
            for statistic in STATISTICS:
                rows.append(_row(name, metric, statistic, theirs, ours))
        rows.append(_row(name, "throughput", "output tokens/s", theirs, ours))
    return [row for row in rows if row is not None]


def _row(name: str, metric: str, statistic: str, measured, runs) -> Row | None:
    theirs = np.array([number(s, metric, statistic) for s in measured])
    ours = tuple(number(s, metric, statistic) for s in runs)
    mean = theirs.mean()
    if not np.isfinite(mean) or mean <= 0 or not np.isfinite(ours).all():
        return None
    return Row(name, metric, statistic, float(mean), _spread(theirs), ours)


def _spread(values: np.ndarray) -> float | None:
    return float((values.max() - values.min()) / values.mean()) if len(values) > 1 else None


def number(served: Served, metric: str, statistic: str) -> float:
    """A statistic of a metric; NaN if there is none."""
    if metric == "throughput" and served.stated is None:
        seconds = served.duration_s
        known = len(served) and not served.torn and (served.output_tokens >= 0).all()
        return float(served.output_tokens.sum() / seconds) if seconds > 0 and known else np.nan
    if served.stated is not None:
        return served.stated.get((metric, statistic), np.nan)
    of_tokens = metric in ("prompt", "output")
    if served.histograms is not None:
        return _of_histogram(served, f"{metric}_tokens" if of_tokens else metric, statistic)
    if of_tokens:
        tokens = getattr(served, f"{metric}_tokens")
        tokens = tokens[tokens >= 0]  # those that are known
        values, counts = np.sort(tokens.astype(float)), np.ones(len(tokens))
    else:
        values, counts = served.values(metric)
    found = describe_counted_ms("", values, counts.astype(np.int64), PERCENTILES)
    value = found[f"{statistic}__ms"]
    return np.nan if value is None else value / MS


def _of_histogram(served: Served, metric: str, statistic: str) -> float:
    """Return mean and percentiles, linear within a bucket, as Prometheus' histogram_quantile."""
    found = (served.histograms or {}).get(metric)
    if found is None or not found.count:
        return np.nan
    if statistic == "mean":
        return found.mean()
    share = float(statistic[1:]) / 100
    below, edges = found.share_below(), found.edges
    bucket = int(np.searchsorted(below, share))
    if bucket == len(edges) - 1:
        return float(edges[-2]) if len(edges) > 1 else np.nan
    low = edges[bucket - 1] if bucket else 0.0
    before = below[bucket - 1] if bucket else 0.0
    within = (share - before) / (below[bucket] - before)
    return float(low + (edges[bucket] - low) * within)


def windows(
    measured: Sequence[Served], runs: Sequence[Served], every_s: float | None = None
) -> list[Window]:
    """Means of TTFT, TPOT and E2E latency over windows of arrivals; those with fewer than LEAST
    requests in any of the sides are left out. Nothing if arrivals are not known. Raises
    SettingsError for windows that are too short."""
    ends = [np.nanmax(s.arrival_s) for s in measured if np.isfinite(s.arrival_s).any()]
    if len(ends) < len(measured) or not ends or not max(ends) > 0:
        return []
    last = float(max(ends))
    every = last / WINDOWS if every_s is None else every_s
    if last / every > MOST_WINDOWS:
        raise SettingsError(
            f"--metrics-every {every:g}: cuts {last:,.0f} s of arrivals into more than "
            f"{MOST_WINDOWS:,} windows; choose longer ones"
        )
    found = []
    for metric in ("ttft", "tpot", "e2el"):
        for start in np.arange(0.0, last, every).tolist():
            end = min(start + every, last)
            window = _window(metric, start, end, end >= last, measured, runs)
            if window is not None:
                found.append(window)
    return found


def _window(metric, start, end, closed, measured, runs) -> Window | None:
    def mean(served: Served) -> tuple[float, int]:
        at = served.arrival_s
        here = (at >= start) & ((at <= end) if closed else (at < end))
        values = served.latencies[metric][here]
        values = values[~np.isnan(values)]
        return (float(values.mean()), len(values)) if len(values) >= LEAST else (np.nan, 0)

    theirs, ours = [mean(s) for s in measured], [mean(s) for s in runs]
    if not all(count for _, count in (*theirs, *ours)):
        return None
    means = np.array([value for value, _ in theirs])
    if means.mean() <= 0:
        return None
    return Window(
        metric,
        start,
        end,
        min(count for _, count in theirs),
        float(means.mean()),
        _spread(means),
        tuple(value for value, _ in ours),
    )


def parting(found: Sequence[Window], run: int) -> Window | None:
    """Return the first window in which a mean of the run is further from the measured one than
    repeats are from each other; with one measurement, than TOLERANCE. None: no such window."""
    apart = [w for w in found if abs(w.simulated[run] / w.measured - 1) > _allowed(w.spread)]
    return min(apart, key=lambda w: w.start_s, default=None)


def _allowed(spread: float | None) -> float:
    return TOLERANCE if spread is None else spread


def distance(metric: str, measured: Sequence[Served], run: Served) -> Distance | None:
    """Where the distributions are furthest apart (Kolmogorov and Smirnov's distance), all
    measurements pooled; of histograms at the edges of their buckets. None if a side has none."""
    ours, ours_counts = run.values(metric)
    if not ours_counts.sum():
        return None
    if measured[0].histograms is not None:
        found = measured[0].histograms.get(metric)
        if found is None or not found.count:
            return None
        at, theirs_below = found.edges[:-1], found.share_below()[:-1]
    else:
        pooled = [served.values(metric) for served in measured]
        theirs = np.concatenate([values for values, _ in pooled])
        if not len(theirs):
            return None
        theirs = np.sort(theirs)
        at = np.unique(np.concatenate([theirs, ours]))
        theirs_below = np.searchsorted(theirs, at, side="right") / len(theirs)
    cumulated = np.concatenate([[0.0], np.cumsum(ours_counts)])
    ours_below = cumulated[np.searchsorted(ours, at, side="right")] / cumulated[-1]
    if not len(at):
        return None
    furthest = int(np.abs(ours_below - theirs_below).argmax())
    return Distance(
        metric, float(at[furthest]), float(theirs_below[furthest]), float(ours_below[furthest])
    )


def latency_rows(rows: Sequence[Row]) -> list[Row]:
    """Those of all requests' latencies, means and percentiles alike."""
    latencies = [name for name in METRICS if name != "queued"]
    return [row for row in rows if row.service_class == "all" and row.metric in latencies]


def error(rows: Sequence[Row], run: int) -> float:
    """The mean absolute relative error of the run's latencies."""
    found = [abs(row.errors()[run]) for row in latency_rows(rows)]
    return float(np.mean(found)) if found else float("nan")


def tolerance(rows: Sequence[Row]) -> float:
    """Return the error up to which a run agrees: the repeats' mean spread, else TOLERANCE."""
    return float(np.mean([_allowed(row.spread) for row in latency_rows(rows)] or [TOLERANCE]))
