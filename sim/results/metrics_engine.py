"""Metrics of the engine: KV memory and the scheduler's steps."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_stats import sum_of_products
from twinserve.sim.results.schemas import HOST_TOKENS


def describe_kv(rows: RunRows) -> dict:
    """`kv` of summary.json: blocks of one replica, preemptions and bytes of all replicas.

    Mean use is weighted by step time, over the time in which a step ran. Where replicas have
    different memory there is no one total, and use is that of each step's own replica.
    """
    steps, requests = rows.steps, rows.requests
    total = rows.kv_total_blocks or None
    used = steps["kv_used_blocks"].to_numpy()
    seconds = steps["end_s"].to_numpy() - steps["start_s"].to_numpy()
    peak = int(used.max()) if len(used) else None
    mean = _weighted_mean(used, seconds)
    peak_use = None if peak is None or total is None else peak / total
    mean_use = None if mean is None or total is None else mean / total
    if rows.replicas is not None and rows.replicas["num_blocks"].nunique() > 1:
        blocks = rows.replicas.set_index("replica")["num_blocks"]
        share = used / blocks.reindex(steps["replica"]).to_numpy()
        total, peak_use = None, float(share.max()) if len(share) else None
        mean_use = _weighted_mean(share, seconds)
    admitted = requests["first_scheduled_s"].notna().to_numpy()
    prompt = int(requests["prompt_tokens"].to_numpy()[admitted].sum())
    hits = int(requests["hit_tokens"].to_numpy()[admitted].sum())
    return {
        "total_blocks": total,
        "peak_used_blocks": peak,
        "peak_use": peak_use,
        "mean_used_blocks": mean,
        "mean_use": mean_use,
        "peak_rt_blocks": int(steps["kv_rt_blocks"].max()) if len(used) else None,
        "peak_be_blocks": int(steps["kv_be_blocks"].max()) if len(used) else None,
        "preemptions": {
            "recompute": int(steps["preempted_recompute"].sum()),
            "swap": int(steps["preempted_swap"].sum()),
        },
        "swapped_bytes": {
            "to_host": int(steps["to_host_bytes"].sum()),
            "to_device": int(steps["to_device_bytes"].sum()),
        },
        "prefix_hit_rate": hits / prompt if prompt else None,
        **({"host_hit_rate": _host_hit_rate(rows, prompt)} if HOST_TOKENS in requests else {}),
    }


def _host_hit_rate(rows: RunRows, prompt_tokens: int) -> float | None:
    """Of the prompt tokens of requests that were admitted, those found on the host."""
    return int(rows.requests[HOST_TOKENS].sum()) / prompt_tokens if prompt_tokens else None


def describe_scheduler(rows: RunRows, first_s: float, duration_s: float) -> dict:
    """`scheduler` of summary.json. Batch and tokens: means a step; waiting: weighted by time. The
    run is measured from `first_s`, for `duration_s` seconds."""
    steps = rows.steps
    prefill, decode = (steps[f"{kind}_requests"].to_numpy() for kind in ("prefill", "decode"))
    tokens = steps["prefill_tokens"].to_numpy() + decode
    if "draft_tokens" in steps:
        tokens = tokens + steps["draft_tokens"].to_numpy()
    waiting = steps["waiting"].to_numpy()
    seconds = steps["end_s"].to_numpy() - steps["start_s"].to_numpy()
    batch = prefill + decode
    replicas = steps["replica"].nunique()
    some = len(steps) > 0
    up_s = _up_seconds(rows.replicas, first_s, duration_s)
    if up_s is None:
        up_s = replicas * duration_s
    return {
        "replicas": int(replicas),
        "steps": len(steps),
        "steps_by_kind": {
            "prefill": int(((prefill > 0) & (decode == 0)).sum()),
            "decode": int(((prefill == 0) & (decode > 0)).sum()),
            "mixed": int(((prefill > 0) & (decode > 0)).sum()),
        },
        "mean_step_ms": float(seconds.mean() * 1000) if some else None,
        "mean_batch": float(batch.mean()) if some else None,
        "max_batch": int(batch.max()) if some else None,
        "mean_step_tokens": float(tokens.mean()) if some else None,
        "mean_waiting": _weighted_mean(waiting, seconds),
        "max_waiting": int(waiting.max()) if some else None,
        "busy": float(busy_seconds(steps).sum()) / up_s if some and up_s > 0 else None,
    }


def busy_seconds(steps: pd.DataFrame) -> np.ndarray:
    """float64[n]: of each step the seconds in which no earlier step of its replica ran. Where
    pipeline stages have several under way, time counts once."""
    of, starts, ends = (steps[name].to_numpy() for name in ("replica", "start_s", "end_s"))
    follows = of[1:] == of[:-1]
    if ((starts[1:] < ends[:-1]) & follows).any():
        starts = starts.copy()  # ends never go back
        starts[1:] = np.where(follows, np.maximum(starts[1:], ends[:-1]), starts[1:])
    return ends - starts


def _up_seconds(replicas: pd.DataFrame | None, first_s: float, duration_s: float) -> float | None:
    """Of all replicas together, those that drain included; None: all were up all the time."""
    if replicas is None or not ((replicas["up_s"] > first_s) | replicas["down_s"].notna()).any():
        return None
    end_s = first_s + duration_s
    down = replicas["down_s"].fillna(end_s).clip(upper=end_s)
    return float((down - replicas["up_s"].clip(lower=first_s)).clip(lower=0.0).sum())


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float | None:
    total = weights.sum()
    return sum_of_products(values, weights) / total if total > 0 else None
