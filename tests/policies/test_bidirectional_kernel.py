"""The compiled kernel of the bidirectional ledger makes the same changes as its own Python, and
both undo them exactly."""

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.requests import RequestTable

kernel = pytest.importorskip("twinserve.native.slots", reason="the kernels are not compiled here")
BLOCKS, SIZE, HOST, CHANGES = 30, 4, 25, 150
CELLS = ("owner", "count", "lack", "index", "start", "kind")
ROWS = ("tokens", "held", "last", "missing_tokens", "missing_blocks", "pinned")


def held(ledger: BidirectionalLedger) -> dict:
    """All that decides what the ledger does next."""
    state, moves = ledger._state, ledger._moves_of_step
    return {
        "relocations": moves.relocations,
        "leaving": {
            row: [np.concatenate(part).tolist() for part in zip(*pieces, strict=True)]
            for row, pieces in sorted(moves.leaving.items())
        },
        **{name: getattr(state, name).tolist() for name in (*CELLS, *ROWS)},
        "tables": {row: state.cells_of(row).tolist() for row in sorted(state.tables)},
        "host": {row: copies.tolist() for row, copies in sorted(state.host.items())},
        "empty": state.empty.units().tolist(),
        "room": (state.rt_blocks, state.step, state.on_host.free, ledger.usage()),
        "places": ledger._place.places_by_count().tolist(),
        "for_be": [ledger._place._block_for_be(tokens) for tokens in range(1, SIZE + 1)],
        "for_rt": ledger._place._block_for_rt(),
    }


class Both:
    """A ledger with the kernel and one without, told the same."""

    def __init__(self, table: RequestTable, host: int = HOST) -> None:
        self.ledgers = [BidirectionalLedger(table, BLOCKS, SIZE, host) for _ in range(2)]
        self.ledgers[0]._state.kernel, self.ledgers[1]._state.kernel = kernel, None

    def same(self, name: str, *given):
        ours, theirs = (getattr(ledger, name)(*given) for ledger in self.ledgers)
        np.testing.assert_equal(ours, theirs)
        self.compare()
        return ours

    def compare(self) -> dict:
        ours, theirs = (held(ledger) for ledger in self.ledgers)
        assert ours == theirs
        return ours


def change(both: Both, table: RequestTable, rng: np.random.Generator) -> None:
    """One that is drawn, of rows that are drawn."""
    state = both.ledgers[0]._state
    resident = [row for row in range(len(table)) if state.held[row]]
    swapped = [row for row in range(len(table)) if state.tokens[row] and not state.held[row]]
    kind = rng.integers(8)
    if kind < 2:
        prompt = int(rng.integers(1, 20))
        row = table.submit(
            f"r{len(table)}", prompt_tokens=prompt, service_class=int(rng.integers(2))
        )
        both.same("admit", row, prompt, 0, int(rng.integers(3)))
    elif kind < 6 and resident:
        rows = rng.permutation(resident)[: rng.integers(1, 8)]
        tokens = state.tokens[rows] + rng.integers(0, 3 * SIZE if kind == 2 else 2, len(rows))
        both.same("slack_tokens", rows)
        both.same("cannot_return", rows[table.service_class[rows] == 1])
        both.same("decode_steps", rows, 9)
        if kind == 3:
            both.same("grow", int(rows[0]), int(tokens[0]))
        elif kind == 4:
            order = rows[np.argsort(table.service_class[rows], kind="stable")]
            both.same("grow_each", order, state.tokens[order] + 1)
        else:
            both.same("grow_all", rows, tokens)
    elif kind == 6 and resident:
        both.same("swap_out", int(rng.choice(resident)))
    elif swapped and rng.random() < 0.5:
        both.same("swap_in", int(rng.choice(swapped)))
    elif resident:
        both.same("free", int(rng.choice(resident)))


@pytest.mark.parametrize("seed", mostly_nightly(range(25), *range(3)))
def test_each_change_is_that_of_the_ledgers_own_code(seed):
    rng = np.random.default_rng(seed)
    table = RequestTable()
    both = Both(table, HOST * (1 + seed % 3))
    for _ in range(CHANGES):
        if rng.random() < 0.3:
            both.same("begin_step")
        if rng.random() < 0.3:
            before = both.compare()
            marks = both.same("mark")
            for _ in range(rng.integers(1, 5)):
                change(both, table, rng)
            if rng.random() < 0.7:
                both.same("rollback", marks)
                assert {**before, **both_rows(both, before)} == before
            else:
                both.same("commit", marks)
        change(both, table, rng)
        for row in np.flatnonzero(both.ledgers[0]._state.tokens).tolist():
            table.computed_tokens[row] = both.ledgers[0]._state.tokens[row]
        for ledger in both.ledgers:
            ledger.check()


def both_rows(both: Both, before: dict) -> dict:
    """What is held now, of the rows that there were `before`."""
    now = both.compare()
    return {name: now[name][: len(before[name])] if name in ROWS else now[name] for name in now}


def test_cells_that_there_are_not_are_an_error():
    both = Both(RequestTable())
    for cell in (2 * BLOCKS, -1):
        with pytest.raises(IndexError):
            kernel.vacate(both.ledgers[0]._state, np.array([cell]))
