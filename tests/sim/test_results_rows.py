"""Rows for the tests of results: a toy first-come engine, and a check that it keeps its books."""

from collections import deque
from functools import lru_cache

import numpy as np
import pandas as pd

from twinserve.sim.results.columns import GAPS, REQUESTS, STEPS
from twinserve.sim.results.files import RunRows

BLOCK = 16


def toy_rows(*args, **how) -> RunRows:
    """Rows of `_served`, which serves the same requests once; a test may change them."""
    frames, blocks = _served(*args, **how)
    return RunRows(*(frame.copy() for frame in frames), blocks)


@lru_cache(64)
def _served(
    n: int = 60,
    seed: int = 0,
    prefer_rt: bool = False,
    blocks: int = 600,
    be_share: float = 0.4,
    rate: float = 8.0,
    group_size: int = 0,
    slo: tuple[float, float] = (0.4, 0.05),
) -> tuple[tuple[pd.DataFrame, ...], int]:
    """Requests, steps and gaps, and how many blocks there are. Served in order of arrival,
    real-time ones first if asked; a prompt takes one step."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    prompt, output = rng.integers(20, 900, n), rng.integers(1, 60, n)
    service_class = np.where(rng.random(n) < be_share, "be", "rt")
    scheduled, first, last = (np.full(n, np.nan) for _ in range(3))
    emitted, late = np.zeros(n, int), np.zeros(n, int)
    waiting: deque[int] = deque()
    running: list[int] = []
    steps, gaps = [], []
    now, arrived = 0.0, 0
    while arrived < n or waiting or running:
        if not (waiting or running):
            now = max(now, arrival[arrived])
        while arrived < n and arrival[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        if prefer_rt:
            waiting = deque(sorted(waiting, key=lambda i: (service_class[i] == "be", i)))
        held = {i: int(-(-(prompt[i] + output[i]) // BLOCK)) for i in running}
        admitted = []
        while waiting and len(admitted) < 4:
            need = int(-(-(prompt[waiting[0]] + output[waiting[0]]) // BLOCK))
            if sum(held.values()) + need > blocks:
                break
            row = waiting.popleft()
            held[row] = need
            admitted.append(row)
        scheduled[admitted] = now
        batch = running + admitted
        tokens = int(prompt[admitted].sum())
        end = now + 0.012 + 0.0004 * len(running) + 6e-5 * tokens
        by_class = {
            k: sum(b for i, b in held.items() if service_class[i] == k) for k in ("rt", "be")
        }
        used = sum(held.values())
        work = (len(admitted), tokens, len(running), len(batch), len(waiting))
        kv = (used, by_class["rt"], by_class["be"], min(40, blocks - used))
        steps.append((0, now, end, *work, *kv, 0, 0, 0, 0, 0))
        for i in batch:
            if emitted[i]:
                gaps.append((service_class[i], end - last[i], 1))
                late[i] += end - last[i] > slo[1]
            else:
                first[i] = end
            emitted[i] += 1
            last[i] = end
        running = [i for i in batch if emitted[i] < output[i]]
        now = end
    requests = pd.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(n)],
            "service_class": service_class,
            "group": [f"app{i // group_size}" if group_size else None for i in range(n)],
            "stage": [i % group_size if group_size else 0 for i in range(n)],
            "priority": 0,
            "replica": 0,
            "arrival_s": arrival,
            "first_scheduled_s": scheduled,
            "first_token_s": first,
            "last_token_s": last,
            "prompt_tokens": prompt,
            "output_tokens": emitted,
            "hit_tokens": 0,
            "recomputes": 0,
            "swaps": 0,
            "swapped_tokens": 0,
            "late_tokens": late,
            "slo_ttft_s": np.where(service_class == "rt", slo[0], np.nan),
            "slo_tpot_s": np.where(service_class == "rt", slo[1], np.nan),
            "finished": True,
            "outcome": "completed",
            "ended_s": last,
            "computed_tokens": prompt + emitted - 1,
        }
    )
    others = pd.DataFrame(steps, columns=list(STEPS)), pd.DataFrame(gaps, columns=list(GAPS))
    return (requests[list(REQUESTS)], *others), blocks


def empty_rows() -> RunRows:
    """A run in which nothing was submitted."""
    frames = (pd.DataFrame({name: [] for name in schema}) for schema in (REQUESTS, STEPS, GAPS))
    return RunRows(*frames, kv_total_blocks=0)


def test_toy_rows_keep_the_books():
    rows = toy_rows()
    assert rows.requests["output_tokens"].sum() == len(rows.requests) + rows.gaps["count"].sum()
    assert (rows.steps["end_s"] > rows.steps["start_s"]).all()
    assert rows.steps["kv_used_blocks"].max() <= rows.kv_total_blocks
