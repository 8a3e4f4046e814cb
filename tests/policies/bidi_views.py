"""The preemption table of the bidirectional ledger (BROS, Sec. V), read off its state."""

from dataclasses import dataclass

import numpy as np

from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger


@dataclass(frozen=True, slots=True)
class PreemptedBlock:
    """An entry of the preemption table: both owners claim slots [first, end) of a block.

    missing_row     the owner whose data of those slots is on the host only
    missing_slots   half-open range of all its slots here that are; at least the claimed ones
    """

    block: int
    real_time_row: int
    best_effort_row: int
    first: int
    end: int
    missing_row: int
    missing_slots: tuple[int, int]


def preemption_table(ledger: BidirectionalLedger) -> list[PreemptedBlock]:
    """Blocks in which both owners claim some slots, and whose data is not there, by block."""
    state = ledger._state
    n, size = state.num_blocks, state.size
    left, right = state.count[:n], state.count[n:]
    entries = []
    for b in np.flatnonzero(left + right > size).tolist():
        if state.lack[b]:
            missing, slots = b, (int(left[b] - state.lack[b]), int(left[b]))
        else:
            missing, slots = b + n, (int(size - right[b]), int(size - right[b] + state.lack[b + n]))
        rows = int(state.owner[b]), int(state.owner[b + n])
        claimed = int(size - right[b]), int(left[b])
        entries.append(PreemptedBlock(b, *rows, *claimed, int(state.owner[missing]), slots))
    return entries


def held_tokens(ledger: BidirectionalLedger, row: int) -> int:
    """Tokens with a place on the device (their data may be missing); 0 for a swapped row."""
    return int(ledger.counts_of(row).sum())
