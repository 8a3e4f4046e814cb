"""Metrics of autoscaling: what it took, and how often it changed its mind."""

from __future__ import annotations

import numpy as np

from twinserve.sim.results.files import RunRows

GPUS = "gpus"  # column of REPLICAS in runs with an autoscaler


def describe_scaling(rows: RunRows) -> dict:
    """`autoscaling` of summary.json, in runs with an autoscaler. A replica takes its GPUs from when
    it starts up until it is down, or the last request has ended."""
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
