"""ConServe: offline requests give way to online ones, and incremental checkpoints make that cheap.

Source: Qiao et al., "ConServe: Harvesting GPUs for Low-Latency and High-Throughput Large Language
Model Serving" (2024), as Echo cites it for its preemption. Online requests are those of class
real-time, offline ones those of class best-effort.

- *Order.* Online requests first: decodes, prompts that have begun, new ones, each by arrival; then
  offline ones in the same way. Prompts are split at the token budget.
- *Preemption.* An online request without memory takes that of offline ones, the last to arrive
  first. Only if a running one finds none there, an online one behind it gives way. Offline requests
  begin and come back into free memory; if a running one finds none, the last of them gives way.
- *Checkpoints.* If `checkpoint_blocks` full blocks of offline requests have no copy on the host, so
  many are copied during the step, from the first to be preempted on. Preempting a request moves
  only what has no copy.
- *Swap-in.* A request comes back during the steps and runs when its KV has landed; offline ones
  when no online request waits.

docs/policies.md has our choices for the paper's open points, and what is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.kv.paged.checkpointed import CheckpointedLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.fill import fill, landed
from twinserve.policies.parts.runs import LONGEST_RUN, further_decodes, further_steps
from twinserve.policies.plan import DEVICE, Hold, KvMove, Preemption, StepPlan
from twinserve.policies.requests import RequestClass, RequestTable, State

_WAITING, _RUNNING, _SWAPPED = int(State.WAITING), int(State.RUNNING), int(State.SWAPPED)
_ONLINE = int(RequestClass.REAL_TIME)
_NOBODY = np.zeros(0, np.int64)


class ConserveOptions(Options):
    """checkpoint_blocks  blocks of offline requests that are copied to the host at a time, at most
                          once a step; 0: none.
                       On ledger `checkpointed` only
    preemption_mode    what happens to the KV of a request that gives way; with the host full it is
                       recomputed
    watermark          fraction of the blocks that an offline request leaves free when it comes back
    """

    checkpoint_blocks: int = Field(16, ge=0)
    preemption_mode: Literal["swap", "recompute"] = "swap"
    watermark: float = Field(0.01, ge=0.0, lt=1.0)


class ConservePolicy(Policy[ConserveOptions]):
    name = "conserve"
    Options = ConserveOptions
    default_kv = "checkpointed"
    uses_estimator = False
    traits = Traits(
        no_drafts=(
            "copies blocks to the host as one-token steps fill them, and its ledger has no room "
            "for drafts"
        )
    )

    def setup(self) -> None:
        # unfinished rows in order of arrival: with KV somewhere, and without
        self.online, self.offline = RowSet(), RowSet()
        self._waiting = {True: RowSet(), False: RowSet()}  # online, offline
        self._tokens = self.limits.max_num_batched_tokens
        self._swap = self.options.preemption_mode == "swap"

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._waiting[bool(requests.service_class[row] == _ONLINE)].add(row)

    def on_finish(self, row: int) -> None:
        for rows in (self.online, self.offline, *self._waiting.values()):
            rows.discard(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        requests = view.requests
        reach = self.limits.max_num_seqs + len(view.ready_s)  # no more can be admitted
        online, offline = (
            _Rows(rows.rows, self._waiting[first].first(reach), view)
            for first, rows in ((True, self.online), (False, self.offline))
        )
        preempted, back = self._bring_back_online(online, offline, ledger)
        gone = [row for row, _ in preempted]
        parts = [*online.holding(requests, gone)]
        stuck = len(online.swapped) > len(back)  # online, without memory
        if not stuck:
            parts.append(online.waiting)
        parts += offline.holding(requests, gone)
        if not stuck and not len(offline.swapped) and not gone:
            parts.append(offline.waiting)
        plan = fill(
            view,
            ledger,
            np.concatenate(parts),
            seats=self.limits.max_num_seqs,
            token_budget=self._tokens,
            split=True,
            swap=self._swap,
        )
        plan.preempted[:0] = preempted
        plan.swapped_in += back
        admitted = {row for row, _ in plan.admitted}  # only asked
        if (
            not stuck
            and not plan.preempted
            and len(self._waiting[True]) <= reach
            and all(row in admitted for row in online.waiting.tolist())
        ):
            self._bring_back_offline(online, offline, plan, ledger)
        plan.moves = self._held(plan, ledger.take_moves())
        holders, further = offline.running, 0
        if plan.preempted:
            holders = holders[~np.isin(holders, [row for row, _ in plan.preempted])]
        if len(plan.rows) == len(online.running) + len(offline.running):
            # Memory, seats or budget keep the others out, and still do while nothing ends or comes.
            further = further_decodes(plan, requests, ledger)
        self._checkpoint(holders, plan, ledger)  # goes beside the first step of a run
        if further:
            plan.valid_for = self._before_checkpoint(holders, further, requests, ledger)
        elif self._same_chunk(online, offline, plan, ledger):
            plan.valid_for = further_steps(plan, requests, ledger, shut=True)
        self._move(plan, requests)
        return plan

    def _move(self, plan: StepPlan, requests: RequestTable) -> None:
        """A row that gets KV, or loses all of it, is in another set from now on."""
        lost = [row for row, kind in plan.preempted if kind is Preemption.RECOMPUTE]
        for row in [*(row for row, _ in plan.admitted), *lost]:
            first = bool(requests.service_class[row] == _ONLINE)
            holding, waiting = self.online if first else self.offline, self._waiting[first]
            into, out_of = (waiting, holding) if row in holding else (holding, waiting)
            out_of.discard(row)
            into.add(row)

    def _same_chunk(self, online: _Rows, offline: _Rows, plan: StepPlan, ledger: KvLedger) -> bool:
        """Whether the next plan is this one, as long as the prompt in it has chunks left. The token
        budget ends in that prompt: no row behind it is looked at, and what holds memory there
        pauses. Online requests before it must not wait for memory, of which they may come to need
        less; nor may a copy be due."""
        if plan.admitted or plan.moves or sum(plan.tokens.tolist()) < self._tokens:
            return False
        if len(online.swapped):
            return False
        if int(plan.rows[-1]) in self.online:
            return self._no_copy(offline.running, ledger)
        return not len(online.waiting) and not self._copies(offline.running, ledger)

    def _copies(self, rows: np.ndarray, ledger: KvLedger) -> bool:
        """Whether full blocks of the offline `rows` are copied to the host at all."""
        return bool(
            self.options.checkpoint_blocks
            and len(rows)
            and isinstance(ledger, CheckpointedLedger)
            and ledger.free_host_blocks
        )

    def _no_copy(self, rows: np.ndarray, ledger: KvLedger) -> bool:
        """Whether none is due while the offline `rows` pause."""
        if not self._copies(rows, ledger):
            return True
        assert isinstance(ledger, CheckpointedLedger)
        return int(ledger.pending_blocks(rows).sum()) < self.options.checkpoint_blocks

    # -- coming back -------------------------------------------------------------------------------
    def _bring_back_online(
        self, online: _Rows, offline: _Rows, ledger: KvLedger
    ) -> tuple[list[tuple[int, Preemption]], list[int]]:
        """Online requests that lost their KV take the memory of offline ones. (preempted, rows that
        come back)"""
        preempted: list[tuple[int, Preemption]] = []
        back: list[int] = []
        victims = offline.running.tolist()
        for row in online.swapped.tolist():
            mark = ledger.mark()
            evicted: list[tuple[int, Preemption]] = []
            while not (came := ledger.swap_in(row)) and len(evicted) < len(victims):
                evicted.append(self._evict(victims[-1 - len(evicted)], ledger))
            if not came:
                ledger.rollback(mark)
                break
            ledger.commit(mark)
            del victims[len(victims) - len(evicted) :]
            preempted += evicted
            back.append(row)
        return preempted, back

    def _evict(self, row: int, ledger: KvLedger) -> tuple[int, Preemption]:
        if self._swap and ledger.swap_out(row):
            return row, Preemption.SWAP
        ledger.drop(row)
        return row, Preemption.RECOMPUTE

    def _bring_back_offline(
        self, online: _Rows, offline: _Rows, plan: StepPlan, ledger: KvLedger
    ) -> None:
        holders = online.here + offline.here + len(plan.admitted) + len(plan.swapped_in)
        for row in offline.swapped.tolist():
            keep_free = int(self.options.watermark * ledger.num_blocks) if holders else 0
            if holders >= self.limits.max_num_seqs or not ledger.swap_in(row, keep_free):
                return
            plan.swapped_in.append(row)
            holders += 1

    @staticmethod
    def _held(plan: StepPlan, moves: list[KvMove]) -> list[KvMove]:
        """What waits: the step for memory that a preemption frees, a request that comes back for
        its own KV."""
        victims, back = {row for row, _ in plan.preempted}, set(plan.swapped_in)
        for index, move in enumerate(moves):
            if move.source == DEVICE and move.row in victims:
                moves[index] = replace(move, hold=Hold.BEFORE_STEP)
            elif move.target == DEVICE and move.row in back:
                moves[index] = replace(move, hold=Hold.REQUEST)
        return moves

    # -- checkpoints -------------------------------------------------------------------------------
    def _checkpoint(self, rows: np.ndarray, plan: StepPlan, ledger: KvLedger) -> None:
        most = self.options.checkpoint_blocks
        if not most or not len(rows) or not isinstance(ledger, CheckpointedLedger):
            return
        pending = ledger.pending_blocks(rows)
        if pending.sum() < most or not ledger.free_host_blocks:
            return
        for row in rows[pending > 0][::-1].tolist():
            most -= ledger.checkpoint(row, most)
            if not most:
                break
        plan.moves += ledger.take_moves()

    def _before_checkpoint(
        self, rows: np.ndarray, steps: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        """Of `steps` further decodes of `rows`, those before enough full blocks wait for a copy."""
        if not self._copies(rows, ledger):
            return steps
        assert isinstance(ledger, CheckpointedLedger)
        most = self.options.checkpoint_blocks
        size = ledger.block_tokens
        fills = size - requests.computed_tokens[rows] % size  # steps until the block is full
        full = np.bincount(fills, minlength=LONGEST_RUN + size)[: LONGEST_RUN + size]
        for start in range(size, len(full), size):
            part = full[start : start + size]
            part += full[start - size : start - size + len(part)]
        pending = int(ledger.pending_blocks(rows).sum()) + full.cumsum()  # after so many steps
        return max(0, min(steps, int(np.searchsorted(pending, most)) - 1))


class _Rows:
    """The rows of a class by what they hold, without those in flight over PCIe; of those that wait
    the first. `here`: how many are on the device, those in flight included."""

    def __init__(self, rows: np.ndarray, waiting: np.ndarray, view: SystemView) -> None:
        state = view.requests.state[rows]
        self.here = int(np.count_nonzero(state == _RUNNING))
        self.waiting = landed(waiting, view)
        if view.ready_s:
            rows = landed(rows, view)
            state = view.requests.state[rows]
        if np.count_nonzero(state == _RUNNING) == len(rows):  # the usual case
            self.running, self.swapped = rows, _NOBODY
        else:
            self.running, self.swapped = (rows[state == s] for s in (_RUNNING, _SWAPPED))

    def holding(self, requests: RequestTable, gone: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Running rows but those that have `gone`: decodes, then prompts that have begun."""
        rows = self.running[~np.isin(self.running, gone)] if gone else self.running
        left = requests.known_tokens(rows) - requests.computed_tokens[rows]
        return rows[left == 1], rows[left > 1]
