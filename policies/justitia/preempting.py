"""Preemption for the sake of order (ours: Justitia's footnote 3 denies it).

The request that is next in order swaps out running ones of applications behind its own, the last
first, if that makes enough room. A victim then waits with all others and comes back in its turn. F
is what orders, and does not change by being preempted, so no two applications take turns.
"""

from __future__ import annotations

from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queue_policy import QueuePolicy
from twinserve.policies.requests import RequestTable


def next_of(policy: QueuePolicy) -> int | None:
    """The first in order of the rows that wait or were preempted; None: there are none."""
    paused = policy.paused[0] if policy.paused else None
    if not policy.waiting:
        return paused
    head = policy.waiting.peek()
    return head if paused is None or policy.rank(head) < policy.rank(paused) else paused


def behind(policy: QueuePolicy, row: int) -> list[int]:
    """Running rows of applications behind that of `row`, the last first. (The last part of a rank
    is the row itself.)"""
    place = policy.rank(row)[:-1]
    found = [other for other in policy.running if policy.rank(other)[:-1] > place]
    return sorted(found, key=policy.rank, reverse=True)


def victims(policy: QueuePolicy, requests: RequestTable, ledger: KvLedger, kept: int) -> list[int]:
    """Running rows that give way to the next in order; none where it fits without, or not even
    with all that are behind it. kept: blocks that an admission leaves free."""
    row = next_of(policy)
    if row is None:
        return []
    needed = -(-int(requests.known_tokens(row)) // ledger.block_tokens) + kept
    needed += row in policy.paused  # which come back with a block to spare
    room, seats = ledger.free_blocks, policy.limits.max_num_seqs - len(policy.running)
    if room >= needed and seats > 0:
        return []
    found: list[int] = []
    needed += len(policy.running)  # these may grow by a block each before it is admitted
    for other in behind(policy, row):
        found.append(other)
        room += ledger.held_blocks(other) + 1  # it does not grow
        seats += 1
        if room >= needed and seats > 0:
            return found
    return []
