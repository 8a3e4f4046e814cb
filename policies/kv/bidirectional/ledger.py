"""The bidirectional ledger of BROS (IEEE version, Sec. V and Fig. 8; Alg. 1 lines 8 and 19).

A block has at most one real-time owner, filling its slots from the left, and one best-effort owner,
filling them from the right. If both claim the same slots, the one that ran last has its data there;
the other's is on the host (lazy checkpoint). The rules and open points are in docs/live_memory.md.
"""

import numpy as np

from twinserve.policies.kv.base import Chunks, KvLedger, KvUsage, LedgerError
from twinserve.policies.kv.bidirectional.audit import audit, render
from twinserve.policies.kv.bidirectional.moves import Relocation, StepMoves
from twinserve.policies.kv.bidirectional.place import Placement
from twinserve.policies.kv.bidirectional.plain import (
    grow_all,
    grow_plainly,
    last_blocks,
    steps_before_conflict,
)
from twinserve.policies.kv.bidirectional.relief import (
    relief_of_best_effort,
    relief_of_real_time,
    without_place,
)
from twinserve.policies.kv.bidirectional.state import SlotState
from twinserve.policies.plan import KvMove
from twinserve.policies.requests import RequestClass, RequestTable


# Growth of many real-time rows at once in the bidirectional ledger, over slots of best-effort
# rows that do not run. If memory is full, most rows of a step grow so.
def grow_together(place: Placement, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Grow real-time rows within their last blocks, or from a full one into one more. Returns how
    many rows from the front of `rows` grew: those that need nothing else, and for which the host
    has room without giving anything up. They get the slots that `Placement.grow` would give them
    one by one: none of them touches another one's, and blocks are taken in their order."""
    state = place.state
    before, cells = state.tokens[rows], state.last[rows]
    need, mine, peers = np.maximum(tokens - before, 0), state.count[cells], state.peer[cells]
    after = mine + need
    over = after + state.count[peers] - state.size
    over[need == 0] = 0
    plain = state.real_time[cells] & (state.held[rows] > 0) & (state.missing_tokens[rows] == 0)
    enter = (plain & (mine == state.size) & (0 < need) & (need <= state.size)).nonzero()[0]
    plain &= (after <= state.size) & ((over <= 0) | ~state.is_pinned(state.owner[peers]))
    lost = np.maximum(over - state.lack[peers], 0)
    victims = enter[:0]
    if len(enter):
        empty = min(len(enter), state.num_empty)
        if empty < len(enter):
            victims = place.emptiest(place.preemptable(), len(enter) - empty)
        enter = enter[: empty + len(victims)]
        plain[enter], lost[enter] = True, 0
        covered = need[enter[empty:]] + state.count[victims] - state.size - state.lack[victims]
        lost[enter[empty:]] = np.maximum(covered, 0)
    plain &= lost.cumsum() <= state.on_host.free
    n = len(rows) if plain.all() else int(plain.argmin())
    if not n:
        return 0
    enter = enter[: int(np.searchsorted(enter, n))]
    stay = np.ones(n, bool)
    stay[enter] = False
    state.put("count", cells[:n][stay], after[:n][stay])
    state.put("tokens", rows[:n][stay], (before[:n] + need[:n])[stay])
    state.put("pinned", rows[:n], state.step)
    written = cells[:n][stay & (over[:n] > 0)]
    if len(enter):
        empties = state.take_empty(min(len(enter), empty))
        entered = victims[: len(enter) - len(empties)] - state.num_blocks
        entered = np.concatenate([empties, entered])
        state.claim_one_each(rows[enter], entered, need[enter])
        written = np.concatenate([written, entered[len(empties) :]])
    place.overwrite(written)
    return n


class BidirectionalLedger(KvLedger):
    """KV memory shared slot by slot between the two classes.

    host_blocks  room on the host, counted in tokens (host_blocks * block_tokens): swapped rows and
                 lazy checkpoints alike. Copies of slots that are resident again are kept, so that
                 they need not be copied twice, until the room is needed.

    A row that is granted memory (`admit`, `grow`, `swap_in`) is pinned. It runs in the planned
    step, so all its slots are resident and not overwritten before `begin_step`. By then its granted
    slots must be written; a grant taken back while still planning is given to `withdraw`.
    """

    name = "bidirectional"
    overwrites = True

    def __init__(
        self, table: RequestTable, num_blocks: int, block_tokens: int, host_blocks: int = 0
    ) -> None:
        super().__init__(table, num_blocks, block_tokens, host_blocks)
        self._state = SlotState(num_blocks, block_tokens, host_blocks)
        self.host = self._state.on_host
        self._moves_of_step = StepMoves(self._state)
        self._place = Placement(self._state, self._moves_of_step, table)

    @classmethod
    def whole_blocks(cls, num_blocks: int, host_blocks: int) -> int:
        """A block has two owners at most."""
        return 2 * num_blocks

    # -- questions -------------------------------------------------------------------------------
    @property
    def free_blocks(self) -> int:
        """Blocks without any owner; an admission may also share or preempt others."""
        return self._state.num_empty

    def obtainable_blocks(self, row: int) -> int:
        """Empty blocks and, for a real-time row, those it could enter; a best-effort row may find
        slots in any block."""
        if self.table.service_class[row] == RequestClass.REAL_TIME:
            return self.free_blocks + self.preemptable_blocks()
        return self.num_blocks

    def room_tokens(self, row: int) -> int:
        return self._place.room(row)

    def gained_blocks(self, row: int, victim: int) -> int:
        """None for a real-time row from a best-effort one: it may enter that one's own blocks
        anyway, and the others have a real-time owner already."""
        real_time = RequestClass.REAL_TIME
        if (
            self.table.service_class[row] == real_time
            and self.table.service_class[victim] != real_time
        ):
            return 0
        return self.held_blocks(victim)

    def relief(self, row: int, tokens: int, victims: np.ndarray) -> tuple[int, np.ndarray]:
        self._fit()
        classes, real_time = self.table.service_class, RequestClass.REAL_TIME
        if classes[row] == real_time:
            return relief_of_real_time(
                self._place, row, tokens, victims, classes[victims] == real_time
            )
        return relief_of_best_effort(self._place, row, tokens, victims)

    def cannot_return(self, rows: np.ndarray) -> np.ndarray:
        """As the base says; of best-effort rows."""
        self._fit()
        return without_place(self._place, rows)

    def held_blocks(self, row: int) -> int:
        self._fit()
        return int(self._state.held[row])

    def blocks_of(self, row: int) -> np.ndarray:
        """int64[held]: the row's blocks in order of its text; filled from its class's end."""
        return self._state.cells_of(row) % self.num_blocks

    def counts_of(self, row: int) -> np.ndarray:
        """int64[held]: tokens of the row in each of `blocks_of(row)`."""
        return self._state.count[self._state.cells_of(row)]

    def places_of(self, row: int) -> np.ndarray:
        """int64[n]: the slot of each of the row's tokens on the device, in order of its text, as
        block * block_tokens + slot; where tokens are missing, another row's data lies there.
        """
        return self._state.places(row)

    def host_copies(self) -> dict[int, np.ndarray]:
        """Row -> bool[its tokens or fewer]: which of them have a copy on the host. Not to be
        written to; a row's array is replaced, never changed, when its copies change.
        """
        return dict(self._state.host)

    def missing_tokens(self, row):
        """Tokens of the row (int, or int64[n] for an index array) that only the host has: M^cpu in
        slots.
        """
        self._fit()
        missing = self._state.missing_tokens[row]
        return missing if np.ndim(row) else int(missing)

    def missing_blocks(self, row):
        """Blocks of the row (int or index array) with missing slots: M^cpu of Table I."""
        self._fit()
        missing = self._state.missing_blocks[row]
        return missing if np.ndim(row) else int(missing)

    def preemptable_blocks(self) -> int:
        """Blocks that a real-time row could enter by FindPreemptBlock: best-effort only, owner not
        in this step.
        """
        return len(self._place.preemptable())

    def slack_tokens(self, rows: np.ndarray) -> np.ndarray:
        self._fit()
        state = self._state
        if state.kernel is not None:
            return state.kernel.slack(state, rows, self.table.computed_tokens)
        *_, room = last_blocks(state, rows)
        slack = state.tokens[rows] - self.table.computed_tokens[rows] + room
        missing, held = state.missing_tokens[rows], state.held[rows]
        if np.count_nonzero(missing) or np.count_nonzero(held) < len(rows):
            slack[(missing > 0) | (held == 0)] = 0
        return slack

    def relocations(self) -> tuple[Relocation, ...]:
        """Copies within the device that this step starts with, in order; they cost no PCIe
        transfer.
        """
        return self._moves_of_step.relocations

    def usage(self) -> KvUsage:
        state = self._state
        return KvUsage(
            total=self.num_blocks,
            free=state.num_empty,
            real_time=state.rt_blocks,
            best_effort=self.num_blocks - state.num_empty - state.rt_blocks,
            cached=0,
            host_tokens=self.host.used,
        )

    # -- changes ---------------------------------------------------------------------------------
    def begin_step(self) -> None:
        if self._state.journal.open:
            raise LedgerError("a step begins while a try is open")
        self._state.put("step", None, self._state.step + 1)
        self._moves_of_step.clear()

    def admit(
        self,
        row: int,
        tokens: int,
        hit_tokens: int = 0,
        keep_free: int = 0,
        reserve_tokens: int = 0,
    ) -> bool:
        """As the base says; an admission that shares or preempts blocks also needs `keep_free`
        blocks free.

        Raises LedgerError for a row that has KV, for no tokens, and for prefix hits (there are none
        here).
        """
        self._fit()
        if self._state.tokens[row]:
            raise LedgerError(f"row {row} is admitted though it has KV")
        if tokens < 1 or hit_tokens:
            raise LedgerError(f"row {row} is admitted with {tokens} tokens, {hit_tokens} cached")
        if keep_free > self.free_blocks or not self._place.could_fit(
            row, max(tokens, reserve_tokens), keep_free
        ):
            return False
        blocks = -(-tokens // self.block_tokens)
        if blocks <= self.free_blocks - keep_free:  # cannot fail: nothing to undo
            self._state.put("pinned", row, self._state.step)
            self._state.claim_empty(row, int(self.table.service_class[row]), tokens, blocks)
            return True
        return self._try(row, lambda: self._place.expand(row, tokens, keep_free))

    def grow(self, row: int, tokens: int) -> bool:
        """Bring back what is missing, then room up to `tokens`; the row is pinned.

        Where it meets a pinned owner in a full block, one of the two parts moves to another block;
        False and nothing changed if there is none. Raises LedgerError for a row without blocks.
        """
        state = self._state
        self._fit()
        if state.held[row] == 0:
            raise LedgerError(f"row {row} grows though it has no blocks")
        place = self._place
        if not state.missing_tokens[row]:
            if grow_plainly(state, row, int(self.table.service_class[row]), tokens):
                return True
            return self._try(row, lambda: place.grow(row, tokens))
        parts = place.returning(row)
        if parts is None:  # nothing is tried, nothing to undo
            return False
        return self._try(row, lambda: place.restore(row, *parts) and place.grow(row, tokens))

    def grow_each(self, rows: np.ndarray, tokens: np.ndarray) -> int:
        self._fit()
        done = 0
        while done < len(rows):
            done += grow_together(self._place, rows[done:], tokens[done:])
            if done < len(rows):
                if not self.grow(int(rows[done]), int(tokens[done])):
                    break
                done += 1
        return done

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        self._fit()
        state = self._state
        if state.kernel is not None:
            done = state.kernel.grow_all(state, rows, tokens)
            if done is not None:
                return done
        return grow_all(state, rows, tokens)

    def decode_steps(self, rows: np.ndarray, limit: int) -> int:
        """As the base says, but only steps in which no block is shared anew and no slot is
        overwritten or moved.
        """
        self._fit()
        kernel = self._state.kernel
        if kernel is not None and kernel.alone(self._state, rows):
            return super().decode_steps(rows, limit)
        if np.count_nonzero(self._state.missing_tokens[rows]):
            return 0
        limit = steps_before_conflict(self._state, rows, self.table.computed_tokens[rows], limit)
        return super().decode_steps(rows, limit) if limit else 0

    def extend(self, rows: np.ndarray, steps: int) -> None:
        if not self.grow_all(rows, self.table.computed_tokens[rows] + steps):
            raise LedgerError(
                f"{steps} steps of {len(rows)} rows do not fit into {self.free_blocks} free blocks"
            )

    @property
    def runs_of_chunks(self) -> bool:
        return True

    def chunk_steps(self, decodes: np.ndarray, chunks: Chunks, limit: int) -> int:
        """As the base says, but none while any row's last block is shared."""
        self._fit()
        rows = np.append(decodes, [row for row, _, _ in chunks]).astype(np.int64)
        _, _, other, _ = last_blocks(self._state, rows)
        if np.count_nonzero(other) or np.count_nonzero(self._state.missing_tokens[rows]):
            return 0
        return super().chunk_steps(decodes, chunks, limit)

    def extend_chunks(self, rows: np.ndarray, tokens: np.ndarray, steps: int) -> None:
        if not self.grow_all(rows, self.table.computed_tokens[rows] + tokens * steps):
            raise LedgerError(
                f"{steps} steps of {len(rows)} rows do not fit into {self.free_blocks} free blocks"
            )

    def withdraw(self, row: int) -> None:
        """The row does not run in this step after all: it gives back the slots granted beyond
        computed_tokens.

        It stays pinned if the step moves its data, which must not be overwritten before it has
        landed.
        """
        self._fit()
        state = self._state
        computed = int(self.table.computed_tokens[row])
        if not state.is_pinned(row):
            return
        if computed == 0:
            self.free(row)
            return
        if computed < state.tokens[row]:
            state.truncate(row, computed)
        if not self._moves_of_step.landing(row):
            state.put("pinned", row, -1)

    def free(self, row: int) -> None:
        self._fit()
        state = self._state
        state.drop_copies(row, keep_missing=False)
        if state.held[row]:
            self._give_back(row)
        for name in ("tokens", "missing_tokens", "missing_blocks"):
            state.put(name, row, 0)
        state.put("pinned", row, -1)
        self._moves_of_step.forget(row)

    def swap_out(self, row: int) -> bool:
        """As the base says; also False for a row that runs in this step. Copies only what the host
        lacks.
        """
        self._fit()
        state = self._state
        if state.held[row] == 0:
            raise LedgerError(f"row {row} is swapped out though it has no blocks")
        return not state.is_pinned(row) and self._atomic(lambda: self._drop_to_host(row))

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        """All KV comes back into blocks found as for an admission; the row is pinned."""
        self._fit()
        state = self._state
        if state.held[row] or not state.tokens[row]:
            raise LedgerError(f"row {row} is swapped in though it is not swapped out")
        if keep_free > self.free_blocks or not self._place.could_fit(
            row, int(state.tokens[row]), keep_free
        ):
            return False
        return self._try(row, lambda: self._bring_back(row, keep_free))

    def take_moves(self) -> list[KvMove]:
        """One KvMove per row and target, the host first; Hold.STEP, with blocks and slots."""
        return self._moves_of_step.take()

    # -- parts of changes ------------------------------------------------------------------------
    def _fit(self) -> None:
        if len(self.table) > len(self._state.tokens):
            self._state.fit_rows(len(self.table))

    def _try(self, row: int, change) -> bool:
        """`change` with the row pinned, undone if it fails."""

        def pinned_change() -> bool:
            self._state.put("pinned", row, self._state.step)
            return change()

        return self._atomic(pinned_change)

    def _atomic(self, change) -> bool:
        mark = self.mark()
        done = change()
        if done:
            self.commit(mark)
        else:
            self.rollback(mark)
        return done

    def _give_back(self, row: int) -> None:
        state = self._state
        state.vacate(state.cells_of(row))
        state.journal.remove(state, "tables", row)
        state.put("held", row, 0)
        state.put("last", row, 0)

    def _drop_to_host(self, row: int) -> bool:
        state = self._state
        tokens = np.arange(state.tokens[row])
        fresh = tokens[~state.copied(row, tokens)]
        self._moves_of_step.to_host(row, fresh)
        self._give_back(row)
        state.put("missing_tokens", row, len(tokens))
        state.put("missing_blocks", row, -(-len(tokens) // self.block_tokens))
        if not self._place.host_has_room({row: len(fresh)}):
            return False
        state.add_copies(row, fresh)
        return True

    def _bring_back(self, row: int, keep_free: int) -> bool:
        state = self._state
        tokens = int(state.tokens[row])
        for name in ("tokens", "missing_tokens", "missing_blocks"):
            state.put(name, row, 0)
        if not self._place.expand(row, tokens, keep_free):
            return False
        self._moves_of_step.to_device(row, np.arange(tokens))
        return True

    # -- trying ----------------------------------------------------------------------------------
    def mark(self) -> int:
        return self._state.journal.mark()

    def rollback(self, mark: int) -> None:
        self._state.journal.rollback(mark)
        self._state.version += 1

    def commit(self, mark: int) -> None:
        self._state.journal.commit(mark)

    # -- its own auditor -------------------------------------------------------------------------
    def check(self) -> None:
        audit(self)

    def render(self, blocks=None, names=None) -> str:
        """Slot-by-slot drawing of these blocks (all if None), one line each; see
        `audit.render`.
        """
        return render(self._state, self.table, blocks, names)
