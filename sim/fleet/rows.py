"""The rows that a fleet leaves: one for each request, each stay on a replica, and each replica.
Also the parts of times to first token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from twinserve.policies.requests import End, RequestTable
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.recovery import Action
from twinserve.sim.fleet.request import Placement, Request
from twinserve.sim.results.columns import (
    ENGINE_ARRIVAL,
    ENGINE_FIRST_TOKEN,
    HOST_TOKENS,
    OUTCOMES,
    STAYS,
    TTFT_PARTS,
    Columns,
    joined,
)
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_requests import warmup_end_s
from twinserve.sim.results.options import Warmup
from twinserve.sim.results.recorder import request_columns
from twinserve.sim.results.steps import RecordedGaps, RecordedSteps

if TYPE_CHECKING:
    from twinserve.sim.fleet.disaggregated import Disaggregated
    from twinserve.sim.fleet.front_end import Between

# Of a request's placements: work done for it anywhere.
_SUMMED = ("recomputes", "swaps", "swapped_tokens")


def fleet_rows(
    fleet: Fleet,
    group_names: list[str],
    warmup: Warmup | None = None,
    front_end: Between | None = None,
) -> RunRows:
    """All rows of a run. Requests come replica by replica, in the order in which each got them
    first; then those that were never placed.

    warmup     its gaps are kept apart, which takes recorders that are timed; WorkloadError where
               nothing is left after it
    front_end  requests are as their clients saw them (`_seen`)
    """
    tables = [replica.engine.core.requests for replica in fleet.replicas]
    stays = joined([request_columns(table, i, group_names) for i, table in enumerate(tables)])
    starts = np.cumsum([0, *map(len, tables)]).tolist()
    # if each completed where it was sent first, no object is made
    everyone = [] if fleet.requests.all_settled and not fleet.losses else list(fleet.requests)
    where = {
        request.number: [starts[p.replica.index] + p.row for p in request.placements]
        for request in everyone
    }
    unplaced = [r for r in everyone if not r.placements and r.end is not End.NEVER_SENT]
    placed = [request for request in everyone if request.placements]
    placed.sort(key=lambda request: where[request.number][0])
    bare = _bare(unplaced, group_names)
    if any(replica.engine.tier is not None for replica in fleet.replicas):
        stays = stays.assign(**{HOST_TOKENS: np.concatenate([t.host_tokens for t in tables])})
        bare = bare.assign(**{HOST_TOKENS: np.zeros(len(bare), np.int64)})
    # what moved may have ended while the fleet held it
    goes_on = np.isin(stays["outcome"], STAYS).any()
    apart = _with_roles(fleet)
    if apart or goes_on or any(len(p) != 1 for p in where.values()):
        parts = [_merged(stays, placed, [where[r.number] for r in placed])] if placed else []
        requests = joined([*parts, *([bare] if unplaced or not placed else [])])
    else:
        requests = stays
    if apart is not None:
        split = ttft_parts(apart, [*placed, *unplaced])
        requests = requests.assign(**{f"{part}_s": seconds for part, seconds in split.items()})
    never = [r for r in everyone if r.end is End.NEVER_SENT]
    unsent = _bare(never, group_names)
    anew = fleet.recovery.action is Action.RETRY and any(r.discarded_tokens for r in placed)
    if fleet.losses or anew:
        from twinserve.sim.fleet.faults import with_losses  # for those that fail

        requests = with_losses(requests, [*placed, *unplaced])
        unsent = with_losses(unsent, never)
    if front_end is not None:
        requests = _seen(requests, [*placed, *unplaced], front_end)
        unsent = _seen(unsent, never, front_end)
    recorders = [replica.engine.recorder for replica in fleet.replicas]
    since = None if warmup is None else warmup_end_s(warmup, requests)
    return RunRows(
        requests,
        RecordedSteps(recorders),
        RecordedGaps(recorder.gap_pools(since) for recorder in recorders),
        fleet.replicas[0].engine.core.ledger.num_blocks,
        placements=_placements(fleet, stays, everyone, where),
        replicas=Columns.of_rows([replica.row_of_life() for replica in fleet.replicas]),
        unsent=unsent,
    )


def _with_roles(fleet: Fleet) -> Disaggregated | None:
    if not fleet.has_roles:
        return None
    from twinserve.sim.fleet.disaggregated import Disaggregated  # for those that have roles

    return fleet if isinstance(fleet, Disaggregated) else None


def _merged(stays: Columns, requests: list[Request], where: list[list[int]]) -> Columns:
    """One row a request: as its last placement has it, with what all of them did. Of prefill
    replicas no request has tokens."""
    last = [_last_served(request) for request in requests]
    found = stays.take(np.array([places[i] for places, i in zip(where, last, strict=True)]))
    unserved = np.array([request.served is None for request in requests])
    for name in ("first_token_s", "last_token_s"):
        found[name][unserved] = np.nan
    for name in ("output_tokens", "late_tokens"):
        found[name][unserved] = 0
    scheduled = stays["first_scheduled_s"]
    began = [next((i for i in places if not np.isnan(scheduled[i])), places[0]) for places in where]
    further = {
        name: stays[name][began]
        for name in ("first_scheduled_s", "hit_tokens", HOST_TOKENS)
        if name in stays
    }
    lengths = np.array([len(places) for places in where])
    flat = np.concatenate(where)
    for name in _SUMMED:
        further[name] = np.add.reduceat(stays[name][flat], lengths.cumsum() - lengths)
    return found.assign(**further, **_ends(requests))


def _last_served(request: Request) -> int:
    """Of its placements: the last whose tokens were its client's, else the last."""
    stays = request.placements
    served = [i for i, s in enumerate(stays) if i >= request.anew and not s.replica.prefills]
    return served[-1] if served else len(stays) - 1


def _seen(table: Columns, requests: list[Request], front_end: Between) -> Columns:
    """Rows of `requests` by the clocks of their clients, and in columns of their own the engine's
    arrival and first token. An engine may have completed what its client no longer waited for."""
    number = np.array([request.number for request in requests], np.int64)
    pairs = [_first_and_last_replica(request) for request in requests]
    replicas = np.array(pairs, np.int64).reshape(-1, 2).T
    first_s, last_s = (
        front_end.seen_s(table[name], of, number)
        for name, of in zip(("first_token_s", "last_token_s"), replicas, strict=True)
    )
    ends = _ends(requests)
    sent_s = np.array([request.sent_s for request in requests], np.float64)
    if "router_s" in table:  # the parts of a TTFT
        before_s = table["arrival_s"] - sent_s
        table = table.assign(front_end_s=before_s + (first_s - table["first_token_s"]))
    return table.assign(
        arrival_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        **ends | {"ended_s": np.where(ends["finished"], last_s, ends["ended_s"])},
        **{ENGINE_ARRIVAL: table["arrival_s"], ENGINE_FIRST_TOKEN: table["first_token_s"]},
    )


def _first_and_last_replica(request: Request) -> tuple[int, int]:
    """Return the replicas of the client's first and last token; -1: no token."""
    found = [
        stay.replica.index
        for stay in request.placements[request.anew :]
        if not stay.replica.prefills
        and stay.replica.engine.core.requests.output_tokens[stay.row] > stay.before_tokens
    ]
    return (found[0], found[-1]) if found else (-1, -1)


def _ends(requests: list[Request]) -> dict[str, np.ndarray]:
    return {
        "finished": np.array([r.end is End.COMPLETED for r in requests], bool),
        "outcome": np.array([_OUTCOMES[r.end] for r in requests], object),
        "ended_s": np.array([r.ended_s for r in requests], np.float64),
    }


_OUTCOMES = (None, *OUTCOMES)


def _bare(requests: list[Request], group_names: list[str]) -> Columns:
    """Requests that no replica got; replica -1."""
    table = RequestTable(max(len(requests), 1))
    for request in requests:
        table.submit(request.id, **request.columns(request.arrival_s))
    return request_columns(table, -1, group_names).assign(**_ends(requests))


def _placements(
    fleet: Fleet, stays: Columns, everyone: list[Request], where: dict[int, list[int]]
) -> Columns:
    number, ordinal, before = (np.zeros(len(stays), np.int64) for _ in range(3))
    if not everyone:
        replica, row = fleet.requests.places().T
        starts = np.cumsum([0, *(len(r.engine.core.requests) for r in fleet.replicas)])
        number[starts[replica] + row] = np.arange(len(row))
    for request in everyone:
        for n, (i, placement) in enumerate(
            zip(where[request.number], request.placements, strict=True)
        ):
            number[i], ordinal[i], before[i] = request.number, n, placement.before_tokens
    if (apart := _with_roles(fleet)) is not None:
        more = hand_over_columns(apart, len(stays))
        prefills = np.array([replica.prefills for replica in fleet.replicas], bool)
        # what a prefill replica emits is discarded
        before += np.where(prefills[stays["replica"]], stays["output_tokens"] - before, 0)
    else:
        more = {}
    replicas = stays["replica"]
    roles = np.array([replica.role.value for replica in fleet.replicas], object)
    return Columns(
        {
            "request_id": stays["request_id"],
            "request": number,
            "placement": ordinal,
            "replica": replicas,
            "role": roles[replicas],
            "placed_s": np.concatenate([r.engine.core.requests.placed_s for r in fleet.replicas]),
            "first_scheduled_s": stays["first_scheduled_s"],
            "ended_s": stays["ended_s"],
            "outcome": stays["outcome"],
            "output_tokens": stays["output_tokens"] - before,
            **{name: stays[name] for name in ("hit_tokens", "computed_tokens", *_SUMMED)},
            **more,
        }
    )


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
    """Return each part with its end; `until` if it has none."""
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
