"""Metrics of fleets: replicas, pools, separate prefill, failures and autoscaling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.columns import FRONT_END_PART, HOST_TOKENS, TTFT_PARTS, Columns
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_requests import MS, Part, RequestColumns, largest, summed
from twinserve.sim.results.steps import Steps

if TYPE_CHECKING:
    import pandas as pd


def describe_kv(rows: RunRows) -> dict:
    """Return `kv` of summary.json: blocks of one replica, preemptions and bytes of all replicas.

    Mean use is weighted by step time. If replicas differ in memory there is no one total, and use
    is relative to each step's own replica.
    """
    steps, requests = rows.step_columns, rows.request_columns
    total = rows.kv_total_blocks or None
    used, total_s = partial(steps.each, "kv_used_blocks"), summed(steps.seconds, 0, len(steps))
    peak = largest(used, 0, len(steps)) if len(steps) else None
    best_effort = largest(partial(steps.each, "kv_be_blocks"), 0, len(steps)) if peak else peak
    real_time = peak
    if best_effort:
        real_time = largest(partial(steps.each, "kv_rt_blocks"), 0, len(steps))
    mean = _mean(used, steps, total_s)
    peak_use = None if peak is None or total is None else peak / total
    mean_use = None if mean is None or total is None else mean / total
    replicas = rows.replica_columns
    if replicas is not None and len(np.unique(replicas["num_blocks"])) > 1:
        blocks = np.zeros(replicas["replica"].max() + 1)
        blocks[replicas["replica"]] = replicas["num_blocks"]

        def share(begin: int, end: int) -> np.ndarray:
            return used(begin, end) / blocks[steps.each("replica", begin, end)]

        total, peak_use = None, largest(share, 0, len(steps)) if len(steps) else None
        mean_use = _mean(share, steps, total_s)
    admitted = ~np.isnan(requests["first_scheduled_s"])
    prompt = int(requests["prompt_tokens"][admitted].sum())
    hits = int(requests["hit_tokens"][admitted].sum())
    return {
        "total_blocks": total,
        "peak_used_blocks": peak,
        "peak_use": peak_use,
        "mean_used_blocks": mean,
        "mean_use": mean_use,
        "peak_rt_blocks": real_time,
        "peak_be_blocks": best_effort,
        "preemptions": {
            "recompute": int(steps.first("preempted_recompute").sum()),
            "swap": int(steps.first("preempted_swap").sum()),
        },
        "swapped_bytes": {
            "to_host": int(steps.first("to_host_bytes").sum()),
            "to_device": int(steps.first("to_device_bytes").sum()),
        },
        "prefix_hit_rate": hits / prompt if prompt else None,
        **({"host_hit_rate": _host_hit_rate(rows, prompt)} if HOST_TOKENS in requests else {}),
    }


def _host_hit_rate(rows: RunRows, prompt_tokens: int) -> float | None:
    """Return the share of admitted prompt tokens found on the host."""
    return int(rows.request_columns[HOST_TOKENS].sum()) / prompt_tokens if prompt_tokens else None


def describe_scheduler(rows: RunRows, first_s: float, duration_s: float) -> dict:
    """Return `scheduler` of summary.json. Batch and tokens: means a step; waiting: weighted by
    time. The run begins at `first_s` and lasts `duration_s` seconds."""
    steps = rows.step_columns
    lengths, total_s = steps.lengths, summed(steps.seconds, 0, len(steps))
    prefill, decode = (steps.first(f"{kind}_requests") for kind in ("prefill", "decode"))
    tokens = steps.first("prefill_tokens") + decode
    if "draft_tokens" in steps:
        tokens = tokens + steps.first("draft_tokens")
    waiting = steps.first("waiting")
    batch = prefill + decode
    replicas = len(np.unique(steps.first("replica")))
    some = len(steps) > 0
    busy = busy_seconds(steps)
    busy_s = total_s if busy == steps.seconds else summed(busy, 0, len(steps))
    up_s = _up_seconds(rows.replica_columns, first_s, duration_s)
    if up_s is None:
        up_s = replicas * duration_s
    return {
        "replicas": int(replicas),
        "steps": len(steps),
        "steps_by_kind": {
            "prefill": int(lengths[(prefill > 0) & (decode == 0)].sum()),
            "decode": int(lengths[(prefill == 0) & (decode > 0)].sum()),
            "mixed": int(lengths[(prefill > 0) & (decode > 0)].sum()),
        },
        "mean_step_ms": total_s / len(steps) * 1000 if some else None,
        "mean_batch": int((batch * lengths).sum()) / len(steps) if some else None,
        "max_batch": int(batch.max()) if some else None,
        "mean_step_tokens": int((tokens * lengths).sum()) / len(steps) if some else None,
        "mean_waiting": _mean(partial(steps.each, "waiting"), steps, total_s),
        "max_waiting": int(waiting.max()) if some else None,
        "busy": busy_s / up_s if some and up_s > 0 else None,
    }


def busy_seconds(steps: Steps) -> Part:
    """Return each step's seconds without an earlier step running on its replica. Overlapping
    pipeline stages so count once."""
    of, starts, ends = steps.first("replica"), steps.first("start_s"), steps.ended_s
    early = (starts[1:] < ends[:-1]) & (of[1:] == of[:-1])  # ends never go back
    if not early.any():
        return steps.seconds
    starts = steps.each("start_s").copy()
    starts[steps.lengths.cumsum()[:-1][early]] = ends[:-1][early]
    seconds = steps.each("end_s") - starts
    return lambda begin, end: seconds[begin:end]


def _up_seconds(replicas: Columns | None, first_s: float, duration_s: float) -> float | None:
    """Return the seconds that all replicas were up, also draining; None: all were always up."""
    if replicas is None:
        return None
    up, down, end_s = replicas["up_s"], replicas["down_s"], first_s + duration_s
    if not (up > first_s).any() and np.isnan(down).all():
        return None
    spans = np.fmin(down, end_s) - np.maximum(up, first_s)
    return float(np.nansum(np.maximum(spans, 0.0)))


def _mean(values: Part, steps: Steps, total_s: float) -> float | None:
    """Return a mean weighted by step time. total_s: of all steps."""

    def weighted(begin: int, end: int) -> np.ndarray:
        return values(begin, end) * steps.seconds(begin, end)

    return summed(weighted, 0, len(steps)) / total_s if total_s > 0 else None


def describe_fleet(rows: RunRows, requests: RequestColumns, duration_s: float) -> dict:
    """Return `replicas` of summary.json for several replicas, and `pools` of a fleet file. A
    request counts for its last replica. requests: columns of rows.requests."""
    lives = rows.replica_columns
    if lives is None or len(lives) < 2 and "pool" not in lives:
        return {}
    parts = _Parts(rows, requests, duration_s)
    count = len(lives)
    found: dict = {}
    if count > 1:
        of_one = [[i] for i in range(count)]
        found["replicas"] = [{"replica": i, **parts.describe(one)} for i, one in enumerate(of_one)]
    if "pool" in lives:
        members: dict[str, list[int]] = {}
        for pool, replica in zip(lives["pool"].tolist(), lives["replica"].tolist(), strict=True):
            if pool is not None:
                members.setdefault(pool, []).append(replica)
        found["pools"] = {
            pool: {"replicas": len(of), **parts.describe(of)} for pool, of in members.items()
        }
    return found


class _Parts:
    """Rows sorted by replica, so that a replica's rows are a slice."""

    def __init__(self, rows: RunRows, requests: RequestColumns, duration_s: float) -> None:
        lives, table = rows.replica_columns, rows.request_columns
        assert lives is not None
        self.duration_s = duration_s
        indices = np.arange(len(lives))
        replica = table["replica"]
        order = np.argsort(replica, kind="stable")
        self.requests = requests.take(order)
        self.hits = table["hit_tokens"][order].astype(np.float64)
        self.admitted = ~np.isnan(table["first_scheduled_s"])[order]
        self.of_requests = _slices(replica[order], indices)
        steps = rows.step_columns
        replica = steps.first("replica")
        self.seconds, self.used = busy_seconds(steps), partial(steps.each, "kv_used_blocks")
        if (replica[1:] < replica[:-1]).any():  # a run's own are in this order; there are millions
            order = np.argsort(replica.repeat(steps.lengths), kind="stable")
            self.seconds, self.used = (
                partial(_between, part(0, len(steps))[order]) for part in (self.seconds, self.used)
            )
        by_replica = np.bincount(replica, steps.lengths, len(indices)).astype(np.int64)
        ends = by_replica.cumsum()
        self.of_steps = [slice(end - n, end) for end, n in zip(ends, by_replica, strict=True)]
        self.blocks = lives["num_blocks"].astype(np.float64)

    def describe(self, replicas: Sequence[int]) -> dict:
        """Describe these replicas together. Latencies: of completed requests."""
        mine = np.concatenate([np.r_[self.of_requests[i]] for i in replicas])
        r = self.requests.take(mine)
        done = r.finished
        ttft, tpot = r.ttft[done], r.tpot[done & (r.output > 1)]
        prompt = r.prompt[self.admitted[mine]].sum()
        steps = [self.of_steps[i] for i in replicas]
        busy = sum(summed(self.seconds, s.start, s.stop) for s in steps)
        peaks = [
            (largest(self.used, s.start, s.stop) if s.start < s.stop else 0) / self.blocks[i]
            for i, s in zip(replicas, steps, strict=True)
            if self.blocks[i]
        ]
        together = self.duration_s * len(replicas)
        return {
            "requests": len(mine),
            "completed": int(done.sum()),
            "output_tokens": int(r.output.sum()),
            "prefix_hit_rate": self.hits[mine].sum() / prompt if prompt else None,
            "mean_ttft_ms": ttft.mean() * MS if len(ttft) else None,
            "p99_ttft_ms": np.percentile(ttft, 99) * MS if len(ttft) else None,
            "mean_tpot_ms": tpot.mean() * MS if len(tpot) else None,
            "steps": sum(s.stop - s.start for s in steps),
            "busy": busy / together if together > 0 else None,
            "peak_use": max(peaks) if peaks else None,
        }


def _between(column: np.ndarray, begin: int, end: int) -> np.ndarray:
    return column[begin:end]


def _slices(replica: np.ndarray, indices: np.ndarray) -> list[slice]:
    """Return each replica's slice of a sorted column."""
    ends = np.searchsorted(replica, [*indices, len(indices)]).tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def describe_apart(rows: RunRows) -> dict:
    """Return `ttft_parts` and `hand_over` of summary.json; empty without separate prefill. Parts:
    of completed requests, as the summary's TTFT."""
    if f"{TTFT_PARTS[0]}_s" not in rows.request_columns:
        return {}
    requests, stays = rows.requests, rows.placements
    if stays is None:
        return {}
    done = requests[requests["finished"]]
    named = (FRONT_END_PART, *TTFT_PARTS) if f"{FRONT_END_PART}_s" in done else TTFT_PARTS
    parts = {part: _in_ms(done[f"{part}_s"].to_numpy(np.float64)) for part in named}
    return {"ttft_parts": parts, "hand_over": _counted(requests, stays)}


def _in_ms(seconds: np.ndarray) -> dict:
    if not len(seconds):
        return {"mean_ms": None, "p50_ms": None, "p99_ms": None}
    p50, p99 = np.percentile(seconds, [50, 99]) * MS
    return {"mean_ms": seconds.mean() * MS, "p50_ms": p50, "p99_ms": p99}


def _counted(requests: pd.DataFrame, stays: pd.DataFrame) -> dict:
    """Return the stays of these requests, without a warm-up's."""
    stays = stays[stays["request_id"].isin(set(requests["request_id"]))]
    decodes = stays["role"] == "decode"
    began, ended = stays["load_begin_s"], stays["load_end_s"]
    loads = began.notna()
    landed = loads & ended.notna() & ~stays["load_failed"]
    seconds = (ended - began)[landed].to_numpy(np.float64)
    return {
        "prefilled_apart": int((stays["outcome"] == "handed_over").sum()),
        "prefilled_locally": int((decodes & (stays["placement"] == 0)).sum()),
        "loads": int(loads.sum()),
        "loaded_tokens": int(stays.loc[landed, "load_tokens"].sum()),
        "failed_loads": int((loads & ended.notna() & stays["load_failed"]).sum()),
        "expired_leases": int(stays["lease_expired"].sum()),
        "load": _in_ms(seconds),
    }


_SUMMED = ("requests", "failed", "retried", "migrated", "left", "lost_kv_tokens")


def describe_failures(rows: RunRows) -> dict:
    """Return `failures` of summary.json, if the run has failures. Counts sum over failures: a
    request that lost two replicas counts twice. late: counts each request once."""
    table = rows.failures
    if table is None:
        return {}
    took = (table["recovered_s"] - table["at_s"]).to_numpy(np.float64)
    known = took[~np.isnan(took)]
    found = {
        "crashes": int((table["kind"] == "crash").sum()),
        "others": int((table["kind"] != "crash").sum()),
        **{name: int(table[name].sum()) for name in _SUMMED},
        "late": _late(rows),
        "discarded_output_tokens": _discarded(rows),
        "mean_recovery_s": float(known.mean()) if len(known) else None,
        "max_recovery_s": float(known.max()) if len(known) else None,
        "not_recovered": len(took) - len(known),
    }
    return {"failures": found}


def _discarded(rows: RunRows) -> int:
    """Return the discarded tokens of requests that restarted or left a drained replica."""
    requests = rows.request_columns
    return int(requests["discarded_tokens"].sum()) if "discarded_tokens" in requests else 0


def _late(rows: RunRows) -> int:
    """Count requests that lost a replica, completed, and missed an objective."""
    requests = rows.request_columns
    if "failures" not in requests:
        return 0
    r = RequestColumns.of(requests)
    hit = requests["failures"] > 0
    missed = (r.ttft > r.slo_ttft) | (r.tpot > r.slo_tpot)
    return int((hit & r.finished & missed).sum())


GPUS = "gpus"  # column of REPLICAS in runs with an autoscaler


def describe_scaling(rows: RunRows) -> dict:
    """Return `autoscaling` of summary.json, with an autoscaler. A replica holds GPUs from its
    start-up until it is down, or until the last request has ended."""
    lives, ended = rows.replica_columns, rows.request_columns["ended_s"]
    if lives is None or GPUS not in lives or not len(ended):
        return {}
    end_s = float(np.fmax.reduce(ended))
    begin, down, drains, gpus = (
        lives[name].astype(np.float64) for name in ("warming_s", "down_s", "draining_s", GPUS)
    )
    until = np.fmin(down, end_s)
    taken = np.maximum(until - begin, 0.0)
    came, went = begin[(begin > 0) & (begin < end_s)], drains[drains < end_s]
    times = np.concatenate([came, went])
    ways = np.repeat([1, -1], [len(came), len(went)])[np.argsort(times, kind="stable")]
    changes = np.concatenate([until, begin])  # a place is taken when it is free
    counts = np.cumsum(np.repeat([-1, 1], len(begin))[np.argsort(changes, kind="stable")])
    return {
        "autoscaling": {
            "gpu_hours": float((taken * gpus).sum()) / 3600,
            "mean_replicas": float(taken.sum()) / end_s if end_s > 0 else None,
            "most_replicas": int(counts.max()),
            "started": len(came),
            "drained": len(went),
            "turns": int((ways[1:] != ways[:-1]).sum()),
        }
    }
