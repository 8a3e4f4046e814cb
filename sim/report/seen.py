"""What a page needs of a run, without the run's rows. A folder of many large runs is read one by
one, and each leaves a few thousand numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from twinserve.sim.report.chart import thinned_steps
from twinserve.sim.report.metric_names import CLASS_NAMES
from twinserve.sim.results.files import POOL_GROUP, RunResult
from twinserve.sim.results.metrics import job_completion
from twinserve.sim.results.metrics_objectives import due_and_met
from twinserve.sim.results.metrics_requests import RequestColumns, latencies
from twinserve.sim.results.parts import by_parts, ratio

LATENCIES = ("ttft_s", "tpot_s", "e2el_s")
BINS = 240  # of the time axis
MOST_REPLICAS = 16  # drawn one by one
_TIMES = (
    *("waiting", "decode_requests", "prefill_tokens"),
    *("kv_used_blocks", "kv_be_blocks", "kv_cached_blocks"),
)


@dataclass(frozen=True)
class Cdf:
    """Of `count` values: seconds, ascending, and the share at or below each."""

    seconds: np.ndarray
    share: np.ndarray
    count: int
    median: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Cdf | None:
        values = values[~np.isnan(values)]
        if not len(values):
            return None
        middle, high = np.percentile(values, [50, 99]).tolist()
        return cls(*thinned_steps(values), len(values), middle, high)


@dataclass(frozen=True)
class OverTime:
    """Means over bins of time, summed over replicas, and the highest of each on one replica:
    float64[bins]. most: the highest sum of the whole run."""

    mean: np.ndarray
    highest: np.ndarray
    most: float


@dataclass(frozen=True)
class Seen:
    """config, summary, timing   as in the run's files
    cdfs        (class, latency) -> its distribution; ("all", "jct_s"): of applications
    bounds      (class, latency) -> the objective, where all requests of the class have the same
    attained    class -> (share, half width of its 95 % interval) of all objectives together
    edges       float64[BINS + 1] seconds; times: column of the steps -> its course, summed over
                replicas; by_replica: the same, (column, replica)
    kv_blocks   of all replicas that were up at once; 0: no bound
    steps       rows of steps.parquet; requests: rows of requests.parquet that were sent
    arrivals_per_s  of requests that are not of the pool; None: all at once
    same        of the real-time requests and their lengths: equal where two runs share a list
    """

    label: str
    folder: Path
    config: dict
    summary: dict
    timing: dict
    cdfs: dict[tuple[str, str], Cdf]
    bounds: dict[tuple[str, str], float]
    attained: dict[str, tuple[float, float]]
    edges: np.ndarray
    times: dict[str, OverTime]
    by_replica: dict[tuple[str, int], OverTime] = field(default_factory=dict)
    kv_blocks: int = 0
    steps: int = 0
    requests: int = 0
    arrivals_per_s: float | None = None
    same: str = ""


def look(label: str, folder: Path, run: RunResult) -> Seen:
    rows = run.rows
    requests, steps = rows.requests, rows.steps
    r = RequestColumns.of(requests)
    edges = np.linspace(0.0, float(steps["end_s"].max()) if len(steps) else 1.0, BINS + 1)
    replicas = sorted(steps["replica"].unique().tolist())
    apart = replicas if 1 < len(replicas) <= MOST_REPLICAS else []
    went = gone(rows.replicas)
    return Seen(
        label,
        folder,
        run.config,
        run.summary,
        run.timing,
        _cdfs(requests, run.summary),
        _bounds(requests),
        _attained(r, run),
        edges,
        {name: _course(steps, name, edges, went) for name in _TIMES} if len(steps) else {},
        {
            (name, replica): _course(steps[steps["replica"] == replica], name, edges, went)
            for name in ("waiting", "kv_used_blocks")
            for replica in apart
        },
        run.rows.kv_blocks,
        len(steps),
        len(requests),
        _arrivals_per_s(requests),
        _same(requests),
    )


def _cdfs(requests: pd.DataFrame, summary: dict) -> dict[tuple[str, str], Cdf]:
    frame = latencies(requests)
    found = {
        (name, column): Cdf.of(frame.loc[frame["service_class"] == name, column].to_numpy())
        for name in CLASS_NAMES
        for column in LATENCIES
    }
    if "applications" in summary:
        found["all", "jct_s"] = Cdf.of(job_completion(requests)["jct_s"].to_numpy(np.float64))
    return {key: cdf for key, cdf in found.items() if cdf is not None}


def _bounds(requests: pd.DataFrame) -> dict[tuple[str, str], float]:
    found = {}
    for name in CLASS_NAMES:
        mine = requests[requests["service_class"] == name]
        for latency in ("ttft_s", "tpot_s"):
            distinct = mine[f"slo_{latency}"].unique()
            if len(distinct) == 1 and not np.isnan(distinct[0]):
                found[name, latency] = float(distinct[0])
    return found


def _attained(r: RequestColumns, run: RunResult) -> dict[str, tuple[float, float]]:
    """Return the summary's share, and its interval from ten parts (infinite for one part)."""
    found = {}
    measured = r.arrival >= (run.summary.get("warmup") or {}).get("end_s", -np.inf)
    bounds = {
        objective["service_class"]: objective["bound_s"]
        for objective in (run.config.get("metrics") or {}).get("objectives", ())
        if objective["metric"] == "e2el"
    }
    for name in CLASS_NAMES:
        share = run.summary.get("classes", {}).get(name, {}).get("slo_attainment")
        due, met = due_and_met(r, measured & (r.service_class == name), bounds.get(name))
        parts = [part for part in by_parts(r.arrival, due, met) if part[0]]
        if share is not None:
            found[name] = share, ratio(parts)[1] if parts else float("inf")
    return found


def _course(
    steps: pd.DataFrame, column: str, edges: np.ndarray, gone_s: Mapping[int, float]
) -> OverTime:
    """gone_s: replica -> when it went, and its cached prefixes with it."""
    values = steps[column].to_numpy(np.float64)
    place = np.clip(np.searchsorted(edges, steps["start_s"], side="right") - 1, 0, len(edges) - 2)
    highest = np.zeros(len(edges) - 1)
    np.maximum.at(highest, place, values)
    mean = over_time(steps, column, edges, column == "kv_cached_blocks", gone_s)
    most = max(summed_peak(steps, column), float(mean.max(initial=0.0)))
    return OverTime(mean, np.maximum(highest, mean), most)


def _arrivals_per_s(requests: pd.DataFrame) -> float | None:
    """Requests of the pool come when the last ones have ended: they are no load of their own."""
    at = requests.loc[requests["group"] != POOL_GROUP, "arrival_s"].to_numpy(np.float64)
    span = float(np.ptp(at)) if len(at) else 0.0
    return len(at) / span if span > 0 else None


def _same(requests: pd.DataFrame) -> str:
    mine = requests[requests["service_class"] == "rt"].sort_values("request_id")
    listed = "\n".join(
        f"{name} {tokens}"
        for name, tokens in zip(mine["request_id"], mine["prompt_tokens"], strict=True)
    )
    return hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest()


# -- steps over time -------------------------------------------------------------------------------
def over_time(
    steps: pd.DataFrame,
    column: str,
    edges: np.ndarray,
    stays: bool = False,
    gone_s: Mapping[int, float] = MappingProxyType({}),
) -> np.ndarray:
    """Time-weighted mean of a column in each bin, summed over replicas; 0 while no step runs.

    stays   it is of something that outlasts steps, such as cached prefixes: between two steps it
            is the larger of what both had, and after the last one what that had, until the run's
            last step has ended. (What a step's requests leave behind is seen in the next one, and
            what the next one's requests take up was seen in the one before, so this is never too
            much.)
    gone_s  replica -> when it went, and what it had with it
    """
    total = np.zeros(len(edges) - 1)
    last_s = float(steps["end_s"].max()) if len(steps) else 0.0
    for replica, mine in steps.groupby("replica", sort=True):
        starts, ends = _apart(mine)
        values = mine[column].to_numpy(np.float64)
        if stays:
            until = max(min(last_s, gone_s.get(int(replica), np.inf)), ends[-1])
            starts, ends, values = _with_gaps(starts, ends, values, until)
        area = np.cumsum(values * (ends - starts))
        times = np.column_stack([starts, ends]).ravel()
        integral = np.column_stack([np.concatenate([[0.0], area[:-1]]), area]).ravel()
        total += np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return total


def summed_peak(steps: pd.DataFrame, column: str) -> float:
    """The highest sum of a column over the steps that replicas run at one instant; 0 of none."""
    at, change = [np.zeros(0)], [np.zeros(0)]
    for _, mine in steps.groupby("replica", sort=True):
        starts, ends = _apart(mine)
        values = mine[column].to_numpy(np.float64)
        at += [starts, ends]
        change += [values, -values]
    times, changes = np.concatenate(at), np.concatenate(change)
    order = np.lexsort((changes, times))  # at one instant those that end come first
    return float(changes[order].cumsum().max(initial=0.0))


def _apart(mine: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of one replica's steps. With pipelined steps one may begin before the last has
    ended: it counts from there."""
    ends = mine["end_s"].to_numpy(np.float64)
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
    starts = np.maximum(mine["start_s"].to_numpy(np.float64), reached)
    return starts, np.maximum(ends, starts)


def _with_gaps(
    starts: np.ndarray, ends: np.ndarray, values: np.ndarray, until: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps and, after each of them, the time to the next one, the last until `until`:

    start[0] .. end[0] .. start[1] .. end[1] .. until
        value[0]    larger     value[1]    value[1]
    """
    between = np.maximum(values, np.append(values[1:], values[-1:]))
    of_steps = np.column_stack([starts, ends]).ravel()
    return of_steps, np.append(of_steps[1:], until), np.column_stack([values, between]).ravel()


def gone(replicas: pd.DataFrame | None) -> dict[int, float]:
    """Replica -> when it went (seconds), of those that did: `gone_s` of `over_time`."""
    return {} if replicas is None else replicas.set_index("replica")["down_s"].dropna().to_dict()
