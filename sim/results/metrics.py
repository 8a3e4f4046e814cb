"""Metrics as functions of a run's rows. docs/metrics.md defines each one with its unit.

Names and definitions follow `vllm bench serve`. Metrics that vLLM lacks (classes, objectives,
applications, memory, the scheduler) stand in sections of their own. Latencies are of finished
requests. An undefined number (a mean of nothing, a rate over no time) is None; vLLM prints 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinserve.sim.results.columns import OUTCOMES, STAYS, Columns, known
from twinserve.sim.results.files import POOL_GROUP, RunRows, plain
from twinserve.sim.results.metrics_fleet import (
    describe_apart,
    describe_failures,
    describe_fleet,
    describe_kv,
    describe_scaling,
    describe_scheduler,
)
from twinserve.sim.results.metrics_jobs import (
    describe_jobs,
    describe_pool,
    fair_ratio,
    job_completion,
    summarise_fair_ratio,
)
from twinserve.sim.results.metrics_objectives import (
    GoodputError,
    all_met,
    describe_attainment,
    e2el_bound,
    is_good,
    judge,
    mean,
    parse_goodput,
)
from twinserve.sim.results.metrics_requests import (
    MS,
    RequestColumns,
    after_warmup,
    counted_order,
    describe_counted_ms,
    describe_ms,
    latencies,
    warmup_end_s,
    whole_groups,
    with_always,
)
from twinserve.sim.results.metrics_windows import describe_windows
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.results.saturation import saturation

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
_PLAIN = MetricsOptions()


def summarise(rows: RunRows, options: MetricsOptions = _PLAIN) -> dict:
    """Return summary.json: the whole run, then `classes`, `applications` (of groups), `kv`,
    `scheduler`; of a fleet `replicas`, `pools`, `ttft_parts`, `hand_over`, `failures`,
    `autoscaling`; and `warmup`, `windows`, `percentiles`, `objectives` if `options` ask for them.

    Raises WorkloadError for a warm-up as long as the run, and ResultsError for a warm-up that the
    run was not made with.
    """
    since = None if options.warmup is None else warmup_end_s(options.warmup, rows.request_columns)
    measured = rows if since is None else after_warmup(rows, since)
    requests = RequestColumns.of(measured.request_columns)
    gaps = _Gaps.of(*measured.gap_pools.pooled())
    everything = requests if since is None else RequestColumns.of(rows.request_columns)
    window = _Window.of(requests, since, _last(everything.last))
    grouped = bool(known(measured.request_columns["group"]).any())
    whole = np.ones(len(requests.e2el), bool)
    if since is not None and grouped:
        whole = whole_groups(rows.requests, since)[everything.arrival >= since]

    everyone = np.ones(len(requests.e2el), bool)
    summary = _describe(requests, everyone, gaps.pooled(), window.duration_s, options)
    summary["never_sent"] = rows.never_sent
    summary["goodput_objectives_ms"] = dict(options.goodput) or None
    summary["classes"] = {}
    for service_class in CLASSES:
        mine = requests.service_class == service_class
        if not mine.any():
            continue
        part = _describe(requests, mine, gaps.pooled(service_class), window.duration_s, options)
        part |= _describe_class(requests, mine, e2el_bound(options.objectives, service_class))
        part["saturation"] = _saturation(rows.request_columns, service_class)
        if grouped and (
            found := describe_jobs(measured.requests[mine & whole], options.percentiles)
        ):
            part["applications"] = found
        if service_class == "be":
            part |= window.beside_real_time(requests, mine)
            if grouped and (pool := describe_pool(measured.requests[mine])):
                part["pool"] = pool
        summary["classes"][service_class] = part
    if grouped and (found := describe_jobs(measured.requests[whole], options.percentiles)):
        summary["applications"] = found
    summary["kv"] = describe_kv(measured)
    summary["scheduler"] = describe_scheduler(measured, window.first_s, window.duration_s)
    summary |= describe_fleet(measured, requests, window.duration_s)
    summary |= describe_apart(measured)
    if "draft_tokens" in measured.step_columns:
        from twinserve.sim.results.drafts import describe_drafts

        summary |= describe_drafts(measured.step_columns)
    summary |= describe_failures(measured) | describe_scaling(rows)
    return plain(summary | _asked_for(rows, requests, window, options))


def _asked_for(
    rows: RunRows, measured: RequestColumns, window: _Window, options: MetricsOptions
) -> dict:
    """Return the parts of summary.json that are made on demand."""
    found: dict = {}
    if options.percentiles:
        found["percentiles"] = list(options.percentiles)
    if options.warmup is not None:
        found["warmup"] = {
            "end_s": window.first_s,
            "requests": len(rows.request_columns) - len(measured.e2el),
        }
    if verdicts := judge(measured, options.objectives):
        found |= {"objectives": verdicts, "objectives_met": all_met(verdicts)}
    if options.every_s is not None or options.stages_s:
        table = rows.request_columns
        times = [table[f"{name}_s"] for name in ("arrival", "last_token", "ended")]
        end_s = _last(np.concatenate(times))
        found["windows"] = describe_windows(table, options, window.first_s, end_s)
    return found


@dataclass(frozen=True)
class _Gaps:
    """Inter-token gaps in ascending order; sorted once, since a subset stays sorted."""

    best_effort: np.ndarray
    seconds: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, best_effort: np.ndarray, seconds: np.ndarray, counts: np.ndarray) -> _Gaps:
        order = counted_order(seconds, counts)
        return cls(best_effort[order], seconds[order], counts[order])

    def pooled(self, service_class: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        mine = self.best_effort == (service_class == "be")
        if service_class is None or mine.all():
            return self.seconds, self.counts
        return self.seconds[mine], self.counts[mine]


@dataclass(frozen=True)
class _Window:
    """The span of a run, in seconds on its clock."""

    first_s: float  # first arrival, or the end of the warm-up
    end_s: float  # last token; NaN: none
    last_rt_s: float  # last real-time arrival; NaN: none

    @classmethod
    def of(cls, requests: RequestColumns, since_s: float | None, end_s: float) -> _Window:
        return cls(
            np.min(requests.arrival, initial=np.inf) if since_s is None else since_s,
            end_s,
            _last(requests.arrival[requests.service_class == "rt"]),
        )

    @property
    def duration_s(self) -> float:
        return self.end_s - self.first_s if np.isfinite(self.end_s) else 0.0

    def beside_real_time(self, requests: RequestColumns, mine: np.ndarray) -> dict:
        """Return the window of arriving real-time requests, which no policy can stretch.

        Without real-time requests, or if they all arrive at one instant, the window is the run.
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


def _describe(
    r: RequestColumns, mine: np.ndarray, gaps, duration_s: float, options: MetricsOptions
) -> dict:
    """Return vLLM's metrics for the requests in `mine` (bool[n])."""
    percentiles, goodput = with_always(options.percentiles), options.goodput
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
        **describe_ms("ttft", ttft, percentiles),
        **_engine_ttft(r, done, percentiles),
        **describe_ms("tpot", tpot[r.output[done] > 1], percentiles),
        **describe_counted_ms("itl", *gaps, percentiles),
        **describe_ms("e2el", e2el, percentiles),
    }


def _engine_ttft(r: RequestColumns, done: np.ndarray, percentiles) -> dict:
    """Return with a front end the time from arrival in the engine to the first token there."""
    if r.engine_ttft is None:
        return {}
    return describe_ms("engine_ttft", r.engine_ttft[done], percentiles)


def _describe_ends(r: RequestColumns, mine: np.ndarray) -> dict:
    """Count requests that ended before their last token, and the tokens computed for them."""
    left = mine & r.left
    return {
        **{name: int((mine & who).sum()) for name, who in r.lost.items() if name not in STAYS},
        "wasted_prompt_tokens": int(np.minimum(r.computed, r.prompt)[left].sum()),
        "wasted_output_tokens": int(r.output[left].sum()),
    }


def _describe_class(r: RequestColumns, mine: np.ndarray, e2el_s: float | None) -> dict:
    """Return normalized latency and queueing (BROS, Sec. VII-A and Fig. 2), and attainment."""
    done = mine & r.finished
    waited = done & (r.e2el > 0)
    return {
        "normalized_latency_ms": mean(r.normalized[done], MS),
        "queueing_proportion": mean(r.queued[waited] / r.e2el[waited]),
        **describe_attainment(r, mine, e2el_s),
    }


def _saturation(requests: Columns, service_class: str) -> dict | None:
    """Return the saturation of one class, warm-up included: saturation has a warm-up of its own.
    The pool is left out, because a closed loop sends only what is served. Sessions and applications
    count as one request each, from first to last."""
    group = requests["group"]
    mine = (requests["service_class"] == service_class) & (group != POOL_GROUP)
    group = group[mine]
    columns = {
        name: requests[name][mine].astype(np.float64)
        for name in ("arrival_s", "first_scheduled_s", "ended_s")
    }
    columns["early"] = np.isin(requests["outcome"][mine], OUTCOMES[1:])
    alone, groups = ~known(group), 0
    if not alone.all():
        together = _wholes(columns, group)
        groups = len(together["early"])
        columns = {
            name: np.concatenate([column[alone], together[name]])
            for name, column in columns.items()
        }
    found = saturation(*columns.values())
    return None if found is None else found | {"groups": groups}


def _wholes(columns: dict[str, np.ndarray], group: np.ndarray) -> dict[str, np.ndarray]:
    """Merge each group into one request, in order of first requests."""
    import pandas as pd

    grouped = pd.DataFrame(columns).groupby(group, sort=False)  # those of no group are left out
    ended = grouped["ended_s"]
    return {
        "arrival_s": grouped["arrival_s"].min().to_numpy(),
        "first_scheduled_s": grouped["first_scheduled_s"].min().to_numpy(),
        # of all of them, or it has not ended
        "ended_s": ended.max().where(ended.count() == grouped.size()).to_numpy(),
        "early": grouped["early"].any().to_numpy(bool),
    }


def _last(seconds: np.ndarray) -> float:
    known = seconds[~np.isnan(seconds)]
    return float(known.max()) if len(known) else np.nan


def _rate(amount: float, seconds: float) -> float | None:
    return float(amount / seconds) if seconds > 0 else None
