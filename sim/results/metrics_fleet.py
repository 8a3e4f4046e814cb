"""Metrics of the parts of a fleet: of each replica, and of each pool of a fleet file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_engine import busy_seconds
from twinserve.sim.results.metrics_requests import RequestColumns

_MS = 1000.0


def describe_fleet(rows: RunRows, requests: RequestColumns, duration_s: float) -> dict:
    """`replicas` of summary.json, where there are several, and `pools`, where a fleet file named
    some. A request counts for the replica that had it last. requests: columns of rows.requests."""
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
    """Rows in order of their replica, so that those of one are a slice."""

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
        self.seconds, self.used = busy_seconds(steps), steps.used
        if (replica[1:] < replica[:-1]).any():  # a run's own are in this order; there are millions
            order = np.argsort(replica.repeat(steps.lengths), kind="stable")
            self.seconds, self.used = self.seconds[order], self.used[order]
        by_replica = np.bincount(replica, steps.lengths, len(indices)).astype(np.int64)
        ends = by_replica.cumsum()
        self.of_steps = [slice(end - n, end) for end, n in zip(ends, by_replica, strict=True)]
        self.blocks = lives["num_blocks"].astype(np.float64)

    def describe(self, replicas: Sequence[int]) -> dict:
        """Of these replicas together. Latencies: of requests that completed."""
        mine = np.concatenate([np.r_[self.of_requests[i]] for i in replicas])
        r = self.requests.take(mine)
        done = r.finished
        ttft, tpot = r.ttft[done], r.tpot[done & (r.output > 1)]
        prompt = r.prompt[self.admitted[mine]].sum()
        steps = [self.of_steps[i] for i in replicas]
        busy = sum(self.seconds[s].sum() for s in steps)
        peaks = [
            float(self.used[s].max(initial=0)) / self.blocks[i]
            for i, s in zip(replicas, steps, strict=True)
            if self.blocks[i]
        ]
        together = self.duration_s * len(replicas)
        return {
            "requests": len(mine),
            "completed": int(done.sum()),
            "output_tokens": int(r.output.sum()),
            "prefix_hit_rate": self.hits[mine].sum() / prompt if prompt else None,
            "mean_ttft_ms": ttft.mean() * _MS if len(ttft) else None,
            "p99_ttft_ms": np.percentile(ttft, 99) * _MS if len(ttft) else None,
            "mean_tpot_ms": tpot.mean() * _MS if len(tpot) else None,
            "steps": sum(s.stop - s.start for s in steps),
            "busy": busy / together if together > 0 else None,
            "peak_use": max(peaks) if peaks else None,
        }


def _slices(replica: np.ndarray, indices: np.ndarray) -> list[slice]:
    """Where each replica's rows stand in an ascending column."""
    ends = np.searchsorted(replica, [*indices, len(indices)]).tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
