"""Metrics as functions of the rows of a run. docs/metrics.md defines each one with its unit.

Names and definitions follow `vllm bench serve`; what it lacks (classes, objectives, applications,
memory, the scheduler) stands in sections of its own. Latencies are of finished requests. A number
that does not exist (the mean of nothing, a rate over no time) is None, where vLLM prints 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from twinserve.sim.results.files import POOL_GROUP, RunRows, plain
from twinserve.sim.results.metrics_engine import describe_kv, describe_scheduler
from twinserve.sim.results.metrics_goodput import GoodputError, is_good, parse_goodput
from twinserve.sim.results.metrics_jobs import (
    describe_jobs,
    describe_pool,
    fair_ratio,
    job_completion,
    summarise_fair_ratio,
)
from twinserve.sim.results.metrics_stats import MS, counted_order, describe_counted_ms, describe_ms
from twinserve.sim.results.saturation import judge
from twinserve.sim.results.schemas import ENGINE_ARRIVAL, ENGINE_FIRST_TOKEN, OUTCOMES
from twinserve.sim.results.versions import with_ends

__all__ = [
    "GoodputError",
    "fair_ratio",
    "job_completion",
    "latencies",
    "parse_goodput",
    "summarise",
    "summarise_fair_ratio",
]

CLASSES = ("rt", "be")


def summarise(rows: RunRows, goodput: Mapping[str, float] | None = None) -> dict:
    """summary.json: the whole run, then `classes`, `applications` (of groups), `kv`, `scheduler`.

    goodput  objectives in ms from `parse_goodput`; without them request_goodput is None, as in vLLM
    """
    requests = _Requests.of(rows.requests)
    gaps = _Gaps.of(rows.gaps)
    window = _Window.of(requests)
    goodput = dict(goodput or {})

    everyone = np.ones(len(requests.e2el), bool)
    summary = _describe(requests, everyone, gaps.pooled(), window.duration_s, goodput)
    summary["never_sent"] = rows.never_sent
    summary["goodput_objectives_ms"] = goodput or None
    summary["classes"] = {}
    for service_class in CLASSES:
        mine = requests.service_class == service_class
        if not mine.any():
            continue
        part = _describe(requests, mine, gaps.pooled(service_class), window.duration_s, goodput)
        part |= _describe_class(requests, mine)
        part["saturation"] = _saturation(rows.requests[mine])
        jobs = describe_jobs(rows.requests[mine])
        if jobs:
            part["applications"] = jobs
        if service_class == "be":
            part |= window.beside_real_time(requests, mine)
            pool = describe_pool(rows.requests[mine])
            if pool:
                part["pool"] = pool
        summary["classes"][service_class] = part
    jobs = describe_jobs(rows.requests)
    if jobs:
        summary["applications"] = jobs
    summary["kv"] = describe_kv(rows)
    summary["scheduler"] = describe_scheduler(rows, window.first_s, window.duration_s)
    return plain(summary)


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Seconds: ttft_s, tpot_s, e2el_s and normalized_s (a token), with service_class, by
    `requests`' index.

    NaN where a request has none: no token yet, not finished, or a TPOT of a single token.
    """
    r = _Requests.of(requests)
    columns = {
        "service_class": r.service_class,
        "ttft_s": r.ttft,
        "tpot_s": np.where(r.output > 1, r.tpot, np.nan),
        "e2el_s": r.e2el,
        "normalized_s": r.normalized,
    }
    return pd.DataFrame(columns, index=requests.index)


@dataclass(frozen=True)
class _Requests:
    """The columns that latencies need, as numpy arrays of one length; seconds and tokens."""

    service_class: np.ndarray
    finished: np.ndarray
    lost: dict[str, np.ndarray]  # outcome but "completed" -> bool[n]: who ended like that
    left: np.ndarray  # ended before it had all its tokens, or nobody waited for them
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
    def of(cls, frame: pd.DataFrame) -> _Requests:
        def number(name: str) -> np.ndarray:
            return frame[name].to_numpy(np.float64)

        frame = with_ends(frame)
        lost = {name: (frame["outcome"] == name).to_numpy(bool) for name in OUTCOMES[1:]}
        finished = frame["finished"].to_numpy(bool)
        arrival, output = number("arrival_s"), number("output_tokens")
        last = np.where(output > 0, number("last_token_s"), np.nan)
        ttft = number("first_token_s") - arrival
        engine_ttft, came = None, arrival
        if ENGINE_ARRIVAL in frame:
            came = number(ENGINE_ARRIVAL)
            engine_ttft = number(ENGINE_FIRST_TOKEN) - came
        e2el = np.where(finished, last - arrival, np.nan)
        single = np.where(finished, 0.0, np.nan)
        tpot = np.where(output > 1, (e2el - ttft) / np.maximum(output - 1, 1), single)
        return cls(
            service_class=frame["service_class"].to_numpy(object),
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


@dataclass(frozen=True)
class _Gaps:
    """Inter-token gaps ascending; sorted once, since a subset of a sorted list is sorted."""

    service_class: np.ndarray
    seconds: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, frame: pd.DataFrame) -> _Gaps:
        seconds, counts = frame["gap_s"].to_numpy(np.float64), frame["count"].to_numpy(np.int64)
        order = counted_order(seconds, counts)
        return cls(frame["service_class"].to_numpy(object)[order], seconds[order], counts[order])

    def pooled(self, service_class: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        if service_class is None:
            return self.seconds, self.counts
        mine = self.service_class == service_class
        return self.seconds[mine], self.counts[mine]


@dataclass(frozen=True)
class _Window:
    """The span of a run, seconds on its clock."""

    first_s: float  # first arrival
    end_s: float  # last token; NaN: none
    last_rt_s: float  # last real-time arrival; NaN: none

    @classmethod
    def of(cls, requests: _Requests) -> _Window:
        return cls(
            np.min(requests.arrival, initial=np.inf),
            _last(requests.last),
            _last(requests.arrival[requests.service_class == "rt"]),
        )

    @property
    def duration_s(self) -> float:
        return self.end_s - self.first_s if np.isfinite(self.end_s) else 0.0

    def beside_real_time(self, requests: _Requests, mine: np.ndarray) -> dict:
        """Best-effort work that ended while real-time requests arrived: no policy stretches that.

        Without real-time requests, or when they all arrive at one instant, the window is the run.
        """
        until = self.last_rt_s if self.last_rt_s > self.first_s else self.end_s
        seconds = until - self.first_s if np.isfinite(until) else 0.0
        ended = mine & requests.finished & (requests.last <= until)
        return {
            "window_s": seconds,
            "window_request_throughput": _rate(ended.sum(), seconds),
            "window_output_throughput": _rate(requests.output[ended].sum(), seconds),
            "window_total_token_throughput": _rate(
                (requests.prompt[ended] + requests.output[ended]).sum(), seconds
            ),
        }


def _describe(r: _Requests, mine: np.ndarray, gaps, duration_s: float, goodput: dict) -> dict:
    """What vLLM reports, for the requests in `mine` (bool[n])."""
    done = mine & r.finished
    ttft, tpot, e2el = r.ttft[done], r.tpot[done], r.e2el[done]
    prompt, output = int(r.prompt[done].sum()), int(r.output[done].sum())
    good = is_good({"ttft": ttft, "tpot": tpot, "e2el": e2el}, goodput).sum() if goodput else None
    return {
        "submitted": int(mine.sum()),
        "completed": int(done.sum()),
        "unfinished": int((mine & ~r.finished & ~r.left).sum()),
        **_describe_ends(r, mine),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _rate(done.sum(), duration_s),
        "request_goodput": None if good is None else _rate(good, duration_s),
        "output_throughput": _rate(output, duration_s),
        "total_token_throughput": _rate(prompt + output, duration_s),
        **describe_ms("ttft", ttft),
        **({} if r.engine_ttft is None else describe_ms("engine_ttft", r.engine_ttft[done])),
        **describe_ms("tpot", tpot[r.output[done] > 1]),
        **describe_counted_ms("itl", *gaps),
        **describe_ms("e2el", e2el),
    }


def _describe_ends(r: _Requests, mine: np.ndarray) -> dict:
    """Requests that ended before they had all their tokens, and what was computed for them."""
    left = mine & r.left
    return {
        **{name: int((mine & who).sum()) for name, who in r.lost.items() if name != "moved"},
        "wasted_prompt_tokens": int(np.minimum(r.computed, r.prompt)[left].sum()),
        "wasted_output_tokens": int(r.output[left].sum()),
    }


def _describe_class(r: _Requests, mine: np.ndarray) -> dict:
    """Normalized latency and queueing (BROS, Sec. VII-A and Fig. 2), attainment of objectives."""
    done = mine & r.finished
    waited = done & (r.e2el > 0)
    # Without its first token a request has missed its TTFT, without its end its TPOT: starving it
    # does not pay. (Both are NaN then, and a comparison with NaN is false.)
    ttft_due, tpot_due = mine & ~np.isnan(r.slo_ttft), mine & ~np.isnan(r.slo_tpot)
    ttft_met = r.ttft <= r.slo_ttft
    tpot_met = r.tpot <= r.slo_tpot
    due = ttft_due | tpot_due
    met = (ttft_met | ~ttft_due) & (tpot_met | ~tpot_due) & ~r.left  # nobody waited for it
    later_tokens = np.maximum(r.output[tpot_due] - 1, 0).sum()
    return {
        "normalized_latency_ms": _mean(r.normalized[done], MS),
        "queueing_proportion": _mean(r.queued[waited] / r.e2el[waited]),
        "ttft_attainment": _mean(ttft_met[ttft_due]),
        "tpot_attainment": _mean(tpot_met[tpot_due]),
        "tpot_token_attainment": (
            None if later_tokens == 0 else 1 - r.late[tpot_due].sum() / later_tokens
        ),
        "slo_attainment": _mean(met[due]),
    }


def _saturation(requests: pd.DataFrame) -> dict | None:
    """Of requests of one class; a closed loop sends no more than is served, so it is left out."""
    listed = requests[requests["group"] != POOL_GROUP]
    seconds = (listed[n].to_numpy(float) for n in ("arrival_s", "first_scheduled_s", "ended_s"))
    early = listed["outcome"].isin(OUTCOMES[1:]).to_numpy()
    return judge(*seconds, early)


def _last(seconds: np.ndarray) -> float:
    known = seconds[~np.isnan(seconds)]
    return float(known.max()) if len(known) else np.nan


def _mean(values: np.ndarray, scale: float = 1.0) -> float | None:
    return float(np.mean(values) * scale) if len(values) else None


def _rate(amount: float, seconds: float) -> float | None:
    return float(amount / seconds) if seconds > 0 else None
