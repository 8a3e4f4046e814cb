"""Plans of Echo that are plain to see: most of those beside a pool that does not end.

Online requests all decode, offline ones do but for one prompt in pieces, and there is time and
memory for all of them: then the plan is the decodes and as much of that prompt as the bound allows,
unless a queued prompt could end in this iteration. `plainly` asks just that, in the terms of the
search over plans (`OnlineRequests.serve`, `Rank.serve`), and leaves everything else to it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Of the prompt in pieces; lost: needed tokens that its memory pushes out (eq. 2)."""

    row: int
    new: int
    resident: int
    lost: int = 0


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
        """None where it is not plain: then nothing has changed but that decodes may have memory
        for the token that any plan gives them."""
        online, offline = self.online, self.offline
        mine = offline.running.rows
        if self.rank is None or view.ready_s or not len(mine) or len(online.waiting):
            return None
        rows, requests = online.running.rows, view.requests
        resident, decode = online.phases(rows, requests)
        if not len(rows) or np.count_nonzero(decode) < len(rows):
            return None
        theirs, decode = offline.phases(mine, requests)
        if np.count_nonzero(decode) != len(mine) - 1:
            return None
        at = int(decode.argmin())  # the prompt
        chunk = _Chunk(mine.item(at), 0, theirs.item(at))
        left = int(requests.known_tokens(chunk.row)) - chunk.resident
        room = min(self.seats, self.tokens) - len(rows) - len(mine) + 1  # beside the decodes
        if left <= 1 or room <= 0:
            return None
        ready = OfflineDecodes(mine[decode], requests.computed_tokens, ledger)
        bound, decodes = self._bound(view, rows, resident, ready)
        if decodes is None:
            return None
        together = np.concatenate([rows, ready.rows])
        if np.count_nonzero(ledger.missing_tokens(together)) or not ledger.grow_all(
            together, np.concatenate([resident, ready.resident]) + 1
        ):
            return None
        tokens = self.tokens - len(together)
        offline.pool.keep()
        if self._one_ends(view, ledger, chunk.row, (), decodes, tokens, bound):
            return None
        if not self._begin_chunk(ledger, chunk, left, decodes, tokens, bound):
            return None
        offline.computed(requests, ledger, chunk.row, chunk.resident, chunk.resident + chunk.new)
        tokens -= chunk.new
        beside = ((chunk.new, chunk.resident),)
        if chunk.new == left or (
            room > 1
            and tokens
            and self._one_ends(view, ledger, chunk.row, beside, decodes, tokens, bound)
        ):
            under_way = [] if chunk.new == left else [chunk.row]
            return self._go_on(view, ledger, rows, resident, ready, chunk, bound, under_way)
        plan = StepPlan(np.append(together, chunk.row), np.ones(len(together) + 1, np.int64))
        plan.tokens[-1] = chunk.new
        plan.moves = ledger.take_moves()
        return plan

    def _bound(
        self, view: SystemView, rows: np.ndarray, resident: np.ndarray, ready: OfflineDecodes
    ) -> tuple[float, tuple[int, int, int] | None]:
        """Seconds that the iteration may take, and its decodes, of online `rows` with so many
        `resident` tokens and all that are `ready`; None where these are too many."""
        lengths = resident.tolist()
        n, total, longest = len(lengths), sum(lengths), max(lengths)
        bound = np.inf
        if self.options.slo_aware:
            seconds = self.cost.seconds((), n, total, longest)
            bound = self.online.bound(rows, view.requests, view.now, seconds)
        if len(ready):
            others = ready.resident.tolist()
            n, total, longest = n + len(others), total + sum(others), max(longest, max(others))
            if bound != np.inf and self.cost.seconds((), n, total, longest) > bound:
                return bound, None
        return bound, (n, total, longest)

    def _one_ends(
        self,
        view: SystemView,
        ledger: KvLedger,
        under_way: int,
        prefills: Sequence[tuple[int, int]],
        decodes: tuple[int, int, int],
        tokens: int,
        bound: float,
    ) -> bool:
        """Whether a queued prompt may end in the iteration, beside these: only then may it overtake
        the one under way."""
        assert self.rank is not None
        requests = view.requests
        for row, hit in self.rank.queued(requests, ledger, [under_way]):
            left = int(requests.known_tokens(row)) - hit
            if left <= tokens and (
                bound == np.inf or self.cost.seconds([*prefills, (left, hit)], *decodes) <= bound
            ):
                return True
        return False

    def _begin_chunk(
        self,
        ledger: KvLedger,
        chunk: _Chunk,
        left: int,
        decodes: tuple[int, int, int],
        tokens: int,
        bound: float,
    ) -> bool:
        """Its size, and memory for it; False where there is no room."""
        limit = min(left, tokens)
        chunk.new = limit
        if bound != np.inf:
            chunk.new = self.cost.longest_chunk((), decodes, chunk.resident, limit, bound)
        end, held = chunk.resident + chunk.new, ledger.held_blocks(chunk.row)
        if chunk.new <= 0 or not held:
            return False
        chunk.lost = ledger.lost_tokens(end - held * ledger.block_tokens)
        return chunk.new > chunk.lost and ledger.grow(chunk.row, end)

    def _go_on(
        self,
        view: SystemView,
        ledger: KvLedger,
        rows: np.ndarray,
        resident: np.ndarray,
        ready: OfflineDecodes,
        chunk: _Chunk,
        bound: float,
        under_way: list[int],
    ) -> StepPlan:
        """The search takes over behind the chunk; `under_way` are prompts in pieces."""
        assert self.rank is not None
        step = StepInProgress(
            view, ledger, self.cost, self.seats, self.tokens, self.options.b_decode
        )
        step.grant_decodes(rows, resident)
        step.bound, step.online = bound, rows
        if self.options.benefit == "offline":
            step.forget_benefit()
        step.grant_decodes(ready.rows, ready.resident)
        step.grant_prompt(chunk.row, chunk.new, chunk.resident)
        leads = self.offline.pool.leads(chunk.row)
        step.record(
            AddedPrompt(
                chunk.row,
                chunk.new,
                chunk.resident,
                0,
                chunk.lost,
                False,
                leads,
                (chunk.row,),
                0,
                False,
            )
        )
        self.rank.add_prompts(step, ready, under_way, [])
        return step.finish()
