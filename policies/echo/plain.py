"""Plans of Echo that are plain to see: most of those with a pool that does not end.

Online requests all decode, offline ones too except for one prompt in pieces, and there is time and
memory for all. Then the plan is the decodes and as much of that prompt as the bound allows, unless
a queued prompt could end in this iteration. `plainly` asks just that, in the terms of the search
over plans (`OnlineRequests.serve`, `Rank.serve`), and leaves everything else to it.
"""

from dataclasses import dataclass

import numpy as np

from twinserve.policies.base import EngineLimits, SystemView
from twinserve.policies.echo.cost import StepCost
from twinserve.policies.echo.offline import OfflineRequests
from twinserve.policies.echo.online import OnlineRequests
from twinserve.policies.echo.parts import AddedPrompt, OfflineDecodes, StepInProgress
from twinserve.policies.echo.rank import Rank
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepPlan


@dataclass(slots=True)
class _Chunk:
    """Of the prompt in pieces, which lacks `left` tokens; lost: needed tokens that its memory
    pushes out (eq. 2)."""

    row: int
    resident: int
    left: int
    new: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Decodes:
    """Online `rows`, with so many `resident` tokens, int64[n] each. With them the first `fitting`
    of the `ready` offline ones, as many as keep the iteration within `bound` seconds. totals: as a
    cost is asked for them."""

    rows: np.ndarray
    resident: np.ndarray
    ready: OfflineDecodes
    fitting: int
    bound: float
    totals: tuple[int, int, int]

    def everyone(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and resident tokens, int64[n] each."""
        k, ready = self.fitting, self.ready
        if not k:
            return self.rows, self.resident
        return (
            np.concatenate([self.rows, ready.rows[:k]]),
            np.concatenate([self.resident, ready.resident[:k]]),
        )


class PlainPlans:
    """Of one engine, under `offline=rank`."""

    def __init__(
        self, online: OnlineRequests, offline: OfflineRequests, cost: StepCost, limits: EngineLimits
    ) -> None:
        self.online, self.offline, self.options = online, offline, offline.options
        self.cost = cost
        self.seats, self.tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        selection = offline.selection
        # without it every plan is searched for
        self.rank = selection if isinstance(selection, Rank) and self.options.kv_aware else None

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan | None:
        """None if it is not plain: then nothing has changed but that decodes may have memory
        for the token that any plan gives them."""
        rows, mine = self.online.running.rows, self.offline.running.rows
        if self.rank is None or view.ready_s or len(self.online.waiting):
            return None
        if not len(rows) or not len(mine):
            return None
        requests = view.requests
        resident, decode = self.online.phases(rows, requests)
        if np.count_nonzero(decode) < len(rows):
            return None
        theirs, decode = self.offline.phases(mine, requests)
        if np.count_nonzero(decode) != len(mine) - 1:
            return None
        at = int(decode.argmin())
        row, done = mine.item(at), theirs.item(at)
        chunk = _Chunk(row, done, int(requests.known_tokens(row)) - done)
        if chunk.left <= 1 or len(rows) + len(mine) > min(self.seats, self.tokens):
            return None
        ready = OfflineDecodes(mine[decode], requests.computed_tokens, ledger)
        return self._plan(view, ledger, self._fitting(view, rows, resident, ready), chunk)

    def _fitting(
        self, view: SystemView, rows: np.ndarray, resident: np.ndarray, ready: OfflineDecodes
    ) -> _Decodes:
        lengths, others, bound = resident.tolist(), ready.resident.tolist(), np.inf
        n, total, longest = len(lengths), sum(lengths), max(lengths)
        seconds, fitting = self.cost.seconds, len(others)
        if self.options.slo_aware:
            bound = self.online.bound(rows, view.requests, view.now, seconds((), n, total, longest))
        if others:
            whole = n + fitting, total + sum(others), max(longest, max(others))
            if bound == np.inf or seconds((), *whole) <= bound:
                n, total, longest = whole
            else:
                fitting = 0
                for length in others:
                    more = n + 1, total + length, max(longest, length)
                    if seconds((), *more) > bound:
                        break
                    (n, total, longest), fitting = more, fitting + 1
        return _Decodes(rows, resident, ready, fitting, bound, (n, total, longest))

    @staticmethod
    def _grown(ledger: KvLedger, rows: np.ndarray, resident: np.ndarray) -> bool:
        """Whether there is free memory for a token each, which they have then."""
        return not np.count_nonzero(ledger.missing_tokens(rows)) and ledger.grow_all(
            rows, resident + 1
        )

    def _plan(
        self, view: SystemView, ledger: KvLedger, decodes: _Decodes, chunk: _Chunk
    ) -> StepPlan | None:
        rows, resident = decodes.everyone()
        if not self._grown(ledger, rows, resident):
            return None
        n = len(rows)
        moves, tokens = ledger.take_moves(), self.tokens - n
        begin = decodes.fitting == len(decodes.ready)  # while a decode waits no row is begun
        self.offline.pool.keep()
        if begin and self._one_ends(view, ledger, decodes, chunk, tokens):
            return None
        chunk.new = self._longest(decodes, chunk, tokens)
        if chunk.new <= 0 and not begin:
            return StepPlan(rows, np.ones(n, np.int64), moves=moves)
        if not self._has_memory(ledger, chunk):
            return None
        end = chunk.resident + chunk.new
        self.offline.computed(view.requests, ledger, chunk.row, chunk.resident, end)
        tokens -= chunk.new
        room = tokens and n + 1 < self.seats
        if begin and (
            chunk.new == chunk.left
            or (room and self._one_ends(view, ledger, decodes, chunk, tokens))
        ):
            return self._go_on(view, ledger, decodes, chunk)
        all_rows, each = np.empty(n + 1, np.int64), np.ones(n + 1, np.int64)
        all_rows[:n], all_rows[n], each[n] = rows, chunk.row, chunk.new
        return StepPlan(all_rows, each, moves=moves + ledger.take_moves())

    def _one_ends(
        self, view: SystemView, ledger: KvLedger, decodes: _Decodes, chunk: _Chunk, tokens: int
    ) -> bool:
        """Return whether a queued prompt may end in the iteration, with these and, if it has a
        size, the chunk. Only then may it overtake the current prompt."""
        assert self.rank is not None
        requests, seconds, bound = view.requests, self.cost.seconds, decodes.bound
        beside = [(chunk.new, chunk.resident)] if chunk.new else []
        for row, hit in self.rank.queued(requests, ledger, [chunk.row]):
            left = int(requests.known_tokens(row)) - hit
            if left <= tokens and (
                bound == np.inf or seconds([*beside, (left, hit)], *decodes.totals) <= bound
            ):
                return True
        return False

    def _longest(self, decodes: _Decodes, chunk: _Chunk, tokens: int) -> int:
        """Tokens of the prompt that there is time for."""
        limit, bound = min(chunk.left, tokens), decodes.bound
        if limit <= 0 or bound == np.inf:
            return limit
        return self.cost.longest_chunk((), decodes.totals, chunk.resident, limit, bound)

    @staticmethod
    def _has_memory(ledger: KvLedger, chunk: _Chunk) -> bool:
        """Whether the chunk gains more than its memory pushes out, and now has that."""
        end, held = chunk.resident + chunk.new, ledger.held_blocks(chunk.row)
        if chunk.new <= 0 or not held:
            return False
        chunk.lost = ledger.lost_tokens(end - held * ledger.block_tokens)
        return chunk.new > chunk.lost and ledger.grow(chunk.row, end)

    def _go_on(
        self, view: SystemView, ledger: KvLedger, decodes: _Decodes, chunk: _Chunk
    ) -> StepPlan:
        """The search takes over behind the chunk."""
        assert self.rank is not None
        options = self.options
        step = StepInProgress(
            view, ledger, self.cost, self.seats, self.tokens, options.b_decode, options.b_hit
        )
        step.grant_decodes(decodes.rows, decodes.resident)
        step.bound, step.online = decodes.bound, decodes.rows
        if options.benefit == "offline":
            step.forget_benefit()
        step.grant_decodes(decodes.ready.rows, decodes.ready.resident)
        row, new, resident = chunk.row, chunk.new, chunk.resident
        step.grant_prompt(row, new, resident)
        leads = self.offline.pool.leads(row)
        step.record(AddedPrompt(row, new, resident, 0, chunk.lost, False, leads, (row,), 0, False))
        under_way = [row] if new < chunk.left else []
        self.rank.add_prompts(step, decodes.ready, under_way, [])
        return step.finish()
