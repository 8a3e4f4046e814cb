"""What a time to first token consists of where prefill is apart from decode, and what was handed
over."""

from __future__ import annotations

import math

import numpy as np

from twinserve.sim.fleet.disaggregated import Disaggregated
from twinserve.sim.fleet.request import Placement, Request
from twinserve.sim.results.schemas import TTFT_PARTS


def ttft_parts(fleet: Disaggregated, requests: list[Request]) -> dict[str, np.ndarray]:
    """Part -> float64[n], seconds of each request from its arrival in the fleet to its first token;
    together they are that time, and nothing is in two of them. NaN: it has no token.

    router        on no replica: held, or between two of them; and stays before it began anew
    queue         on the replica that computes its prompt, until it is first scheduled there
    prefill       from then until the prompt's last token, preemptions included
    transfer      of its KV, until it has landed or failed; the wait for ports is part of it
    decode_queue  on the replica that decodes it: for memory before the transfer, for a step after
    first_step    the step that gives the token; after a failed load all steps of the prompt
    """
    found = np.full((len(requests), len(TTFT_PARTS)), np.nan)
    for i, request in enumerate(requests):
        if request.emitted_tokens:
            found[i] = _parts(fleet, request)
    return dict(zip(TTFT_PARTS, found.T, strict=True))


def _parts(fleet: Disaggregated, request: Request) -> list[float]:
    parts = dict.fromkeys(TTFT_PARTS, 0.0)
    now = request.arrival_s
    for number, stay in enumerate(request.placements):
        table = stay.replica.engine.core.requests
        if number < request.anew:
            parts["router"] += float(table.ended_s[stay.row]) - now
            now = float(table.ended_s[stay.row])
            continue
        parts["router"] += float(table.placed_s[stay.row]) - now
        now = float(table.placed_s[stay.row])
        first_s = math.nan if stay.replica.prefills else float(table.first_token_s[stay.row])
        until = float(table.ended_s[stay.row]) if math.isnan(first_s) else first_s
        for part, end in _marks(fleet, stay, until):
            end = min(max(end, now), until)
            parts[part] += end - now
            now = end
        if not math.isnan(first_s):
            break
    return list(parts.values())


def _marks(fleet: Disaggregated, stay: Placement, until: float) -> list[tuple[str, float]]:
    """Part, and when it ended, one after another; `until` where it did not."""
    table = stay.replica.engine.core.requests
    scheduled_s = float(table.first_scheduled_s[stay.row])
    if math.isnan(scheduled_s):
        scheduled_s = until
    here = stay.replica.index, stay.row
    if here not in fleet.came_for_kv:
        return [("queue", scheduled_s), ("prefill", until)]
    load = fleet.loads.get(here)
    if load is None:
        return [("decode_queue", until)]
    landed_s = until if math.isnan(load.end_s) else load.end_s
    return [
        ("decode_queue", load.begin_s),
        ("transfer", landed_s),
        ("decode_queue", scheduled_s),
        ("first_step", until),
    ]


def hand_over_columns(fleet: Disaggregated, rows: int) -> dict[str, np.ndarray]:
    """Further columns of PLACEMENTS, by stay: replicas one after another, each in the order of its
    rows.

    Of a decode replica: when it began to fetch a prompt's KV, and when that had come or was known
    to have failed (seconds); tokens of the blocks asked for; whether it failed. Of a prefill
    replica: when it gave the memory back, and whether because the lease had run out.
    """
    starts = np.cumsum([0, *(len(r.engine.core.requests) for r in fleet.replicas)])
    begin, end, released = (np.full(rows, np.nan) for _ in range(3))
    tokens = np.zeros(rows, np.int64)
    failed, expired = np.zeros(rows, bool), np.zeros(rows, bool)
    for (replica, row), load in fleet.loads.items():
        at = starts[replica] + row
        begin[at], end[at], tokens[at] = load.begin_s, load.end_s, load.tokens
        failed[at] = not load.whole
    for (replica, row), kept in fleet.kept.items():
        at = starts[replica] + row
        released[at], expired[at] = kept.released_s, kept.expired
    return {
        "load_begin_s": begin,
        "load_end_s": end,
        "load_tokens": tokens,
        "load_failed": failed,
        "released_s": released,
        "lease_expired": expired,
    }
