"""Metrics of the engine: KV memory and the scheduler's steps."""

from __future__ import annotations

from functools import partial

import numpy as np

from twinserve.sim.results.columns import Columns
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_requests import Part, largest, summed
from twinserve.sim.results.schemas import HOST_TOKENS
from twinserve.sim.results.steps import Steps


def describe_kv(rows: RunRows) -> dict:
    """`kv` of summary.json: blocks of one replica, preemptions and bytes of all replicas.

    Mean use is weighted by step time, over the time in which a step ran. Where replicas have
    different memory there is no one total, and use is that of each step's own replica.
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
    """Of the prompt tokens of requests that were admitted, those found on the host."""
    return int(rows.request_columns[HOST_TOKENS].sum()) / prompt_tokens if prompt_tokens else None


def describe_scheduler(rows: RunRows, first_s: float, duration_s: float) -> dict:
    """`scheduler` of summary.json. Batch and tokens: means a step; waiting: weighted by time. The
    run is measured from `first_s`, for `duration_s` seconds."""
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
    """Of each step the seconds in which no earlier step of its replica ran. Where pipeline stages
    have several under way, time counts once."""
    of, starts, ends = steps.first("replica"), steps.first("start_s"), steps.ended_s
    early = (starts[1:] < ends[:-1]) & (of[1:] == of[:-1])  # ends never go back
    if not early.any():
        return steps.seconds
    starts = steps.each("start_s").copy()
    starts[steps.lengths.cumsum()[:-1][early]] = ends[:-1][early]
    seconds = steps.each("end_s") - starts
    return lambda begin, end: seconds[begin:end]


def _up_seconds(replicas: Columns | None, first_s: float, duration_s: float) -> float | None:
    """Of all replicas together, those that drain included; None: all were up all the time."""
    if replicas is None:
        return None
    up, down, end_s = replicas["up_s"], replicas["down_s"], first_s + duration_s
    if not (up > first_s).any() and np.isnan(down).all():
        return None
    spans = np.fmin(down, end_s) - np.maximum(up, first_s)
    return float(np.nansum(np.maximum(spans, 0.0)))


def _mean(values: Part, steps: Steps, total_s: float) -> float | None:
    """Weighted by the time of each step; total_s: of all of them."""

    def weighted(begin: int, end: int) -> np.ndarray:
        return values(begin, end) * steps.seconds(begin, end)

    return summed(weighted, 0, len(steps)) / total_s if total_s > 0 else None
