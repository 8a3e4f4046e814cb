"""Requests as they were served, simulated or measured, in one form: what a comparison needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from twinserve.sim.results.columns import ENGINE_ARRIVAL
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import MS, RequestColumns
from twinserve.traces.measurement import SERVER, Histogram, Measurement

LATENCIES = ("ttft", "tpot", "e2el", "queued")
METRICS = (*LATENCIES, "itl")
_TAILS = ("p90", "p99")


# what a run.json says of its requests; here they are the measured ones, as they came
OF_REQUESTS = (
    *("columns", "raw_arrivals", "rate", "duration", "requests", "rate_scale", "load", "window"),
    *("cap_length", "pool", "client_timeout"),
)


@dataclass(frozen=True)
class Served:
    """Requests that got all their tokens; arrays have one entry each.

    arrival_s    from the first request on (of failed ones too); NaN: not known
    latencies    by LATENCIES: seconds, NaN if there is none
    gaps_s, gap_counts   inter-token gaps, pooled; None: not known
    service_class  "rt" or "be"
    failed       requests that were not served
    histograms   by metric, of measurements without single requests
    stated       (metric, statistic) -> seconds, tokens or tokens a second, if the file states
                 nothing else
    torn         tokens or ends are missing, so throughput is not known
    """

    name: str
    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    latencies: dict[str, np.ndarray]
    service_class: np.ndarray
    gaps_s: np.ndarray | None = None
    gap_counts: np.ndarray | None = None
    failed: int = 0
    histograms: dict[str, Histogram] | None = None
    stated: dict[tuple[str, str], float] | None = None
    torn: bool = False

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, rows: np.ndarray) -> Served:
        """Of these requests: bool[n]. Gaps are of all requests, so there are none."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            latencies={name: values[rows] for name, values in self.latencies.items()},
            service_class=self.service_class[rows],
            gaps_s=None,
            gap_counts=None,
            histograms=None,
        )

    def values(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, ascending, and how often each stands for a value; empty if not known."""
        if metric == "itl":
            if self.gaps_s is None:
                return np.zeros(0), np.zeros(0)
            counts = np.ones(len(self.gaps_s)) if self.gap_counts is None else self.gap_counts
            order = np.argsort(self.gaps_s, kind="stable")
            return self.gaps_s[order], counts[order]
        values = self.latencies[metric]
        values = np.sort(values[~np.isnan(values)])
        return values, np.ones(len(values))

    @property
    def duration_s(self) -> float:
        """From the first of these requests to their last end; NaN if not known."""
        ends = self.arrival_s + self.latencies["e2el"]
        known = ends[~np.isnan(ends)]
        return float(known.max() - np.nanmin(self.arrival_s)) if len(known) else float("nan")


def of_run(name: str, result: RunResult, server: bool = False) -> Served:
    """The requests of a run. server: latencies from a request's arrival in the engine on, as
    measurements of a server have them."""
    frame = result.rows.requests
    columns = RequestColumns.of(frame)
    arrival, ttft, e2el = columns.arrival, columns.ttft, columns.e2el
    if server and columns.engine_ttft is not None:
        came = frame[ENGINE_ARRIVAL].to_numpy(np.float64)
        ttft, e2el, arrival = columns.engine_ttft, e2el - (came - arrival), came
    done = columns.finished
    first = np.min(arrival) if len(arrival) else 0.0
    gaps = result.rows.gaps
    return Served(
        name,
        arrival[done] - first,
        columns.prompt[done],
        columns.output[done],
        {
            "ttft": ttft[done],
            "tpot": np.where(columns.output > 1, columns.tpot, np.nan)[done],
            "e2el": e2el[done],
            "queued": columns.queued[done],
        },
        columns.service_class[done].astype(object),
        gaps["gap_s"].to_numpy(np.float64),
        gaps["count"].to_numpy(np.float64),
        int((~done).sum()),
    )


def of_measurement(found: Measurement) -> Served:
    """The requests of a measurement; those without a class are `rt`."""
    served = found.served if len(found) else np.zeros(0, bool)
    classes = np.array(list(found.service_class) or ["rt"] * len(found), object)
    return Served(
        found.path,
        found.arrival_s[served],
        found.prompt_tokens[served],
        found.output_tokens[served],
        {name: getattr(found, f"{name}_s")[served] for name in LATENCIES},
        classes[served],
        found.gaps_s,
        None,
        found.failed,
        dict(found.histograms) or None,
        None if len(found) or found.histograms else _stated(found.stated),
        found.torn if len(found) else False,
    )


def _stated(numbers: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Those of a result of `vllm bench serve` without requests, in our units."""
    found = {
        (metric, statistic): numbers[f"{name}_{metric}_ms"] / MS
        for metric in METRICS
        for statistic, name in (("mean", "mean"), ("p50", "median"), *((p, p) for p in _TAILS))
        if f"{name}_{metric}_ms" in numbers
    }
    for metric, total in (("prompt", "total_input_tokens"), ("output", "total_output_tokens")):
        if numbers.get("completed") and total in numbers:
            found[metric, "mean"] = numbers[total] / numbers["completed"]
    if "output_throughput" in numbers:
        found["throughput", "output tokens/s"] = numbers["output_throughput"]
    return found


def from_server(found: Measurement) -> bool:
    return found.where == SERVER
