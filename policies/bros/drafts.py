"""BROS on an engine that speculates. Ours: the paper has no drafts.

A deadline of the paper binds the next token of a request, and a step gives at least one, whatever
was right. So an iteration is bounded as if each request got one token. Then `drafts` decides:

spare   Algorithm 1 chooses as without drafts. Rows that it serves have drafts verified while the
        step stays within the nearest deadline that can still be kept, the token budget, and memory
        that is free: real-time requests first, the most urgent one first, then best-effort ones.
        Nor do drafts take the time that was promised to a real-time request whose place a
        best-effort one has (constraint 6): its next iteration still ends before it is due.
always  each decode that is chosen verifies all its drafts, and is priced with them.

With `draft_pace=given`, after a step of m tokens the next one is due m TPOT objectives later. The m
tokens came together, as a token group of the ACM version. Then a token may come later than one
objective after the one before, and the mean of all stays below it.

Steps are priced with verification, and with what drafting takes (parts/verifying.py). No row swaps,
since engines with drafts do not; no plan stands for further steps.
"""

import math
from dataclasses import replace

import numpy as np

from twinserve.policies.base import EngineLimits, SystemView, Traits
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.bros.packing import Packer
from twinserve.policies.bros.parts import EMPTY, Choice, PlanInProgress, among
from twinserve.policies.bros.policy import BrosPolicy
from twinserve.policies.bros.queues import Queues
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import RequestClass, RequestTable

_REAL_TIME = int(RequestClass.REAL_TIME)


class DraftedQueues(Queues):
    """given: tokens of each row's last step, if several and counted."""

    def __init__(self, limits: EngineLimits, options: BrosOptions) -> None:
        super().__init__(limits, options)
        self.given: dict[int, int] = {}

    def batch(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        batch = super().batch(rows, requests, ledger)
        if self.options.drafts == "spare":
            return batch
        drafts = self.drafts(batch.rows, batch.context, batch.is_prefill, requests)
        return replace(batch, new=batch.new + drafts, context=batch.context + drafts)

    def drafts(
        self, rows: np.ndarray, context: np.ndarray, prompt: np.ndarray, requests: RequestTable
    ) -> np.ndarray:
        """Return int64[n]: drafts that each row can have verified with `context` tokens, resident
        and new ones; none for a prompt. The last token that a request can have is never
        computed."""
        room = self.limits.max_model_len - 1 - context
        return np.where(prompt, 0, np.clip(requests.draft_tokens[rows], 0, np.maximum(room, 0)))

    def due(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        since, slo = super().due(rows, requests)
        if self.given:
            given = np.array([self.given.get(row, 1) for row in rows.tolist()], np.int64)
            # what the step under way gives is not known: at least one token
            group = np.where(requests.in_flight[rows] > 0, 1, given)
            slo = np.where(requests.output_tokens[rows] > 0, slo * group, slo)
        return since, slo


class DraftedPacker(Packer):
    @property
    def slots(self) -> int:
        assert isinstance(self.limits, DraftingLimits)
        return self.limits.drafting.slots

    def within_tokens(self, batch: Batch, behind: Batch | None = None) -> int:
        """A draft model takes `Drafting.slots` of the budget for each row."""
        if self.slots:
            batch = replace(batch, new=batch.new + self.slots)
            behind = behind and replace(behind, new=behind.new + self.slots)
        return super().within_tokens(batch, behind)


class BrosDrafts(BrosPolicy):
    # which rows end with a step is known when it has ended
    traits = Traits(keeps_ending=True)
    limits: DraftingLimits
    queues: DraftedQueues
    _parts = (DraftedQueues, DraftedPacker)

    def setup(self) -> None:
        super().setup()
        if not isinstance(self.limits, DraftingLimits):
            raise PolicyError(f"policy {self.name!r} got no DraftingLimits; pass them")
        if self.options.swap and "swap" in self.options.model_fields_set:
            raise PolicyError(
                f"policy {self.name!r}, option swap=true: engines that speculate do not swap; write"
                " swap=false, or drop it"
            )
        if self.options.draft_pace == "given" and self.options.group_size > 1:
            raise PolicyError(
                f"policy {self.name!r}: draft_pace=given and group_size={self.options.group_size} "
                "are two token groups; drop one of them"
            )
        self.options = self.options.model_copy(update={"swap": False})
        self._slots = self.limits.drafting.slots
        self._real_time: tuple[Batch, np.ndarray]  # of this plan, and their residual times
        self._replaced = EMPTY  # of this plan: rows that gave a place to a best-effort request

    # -- events ------------------------------------------------------------------------------------
    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self.queues.given.pop(row, None)
        # with asynchronous scheduling it may have lost its place while its last token was computed
        self.queues.leaves(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        super().on_outcome(outcome)
        if self.options.draft_pace == "given" and outcome.verified is not None:
            ended = set(outcome.finished)
            for row, tokens in zip(
                outcome.emitted.tolist(), outcome.verified.tokens.tolist(), strict=True
            ):
                if row not in ended:
                    self.queues.given[row] = tokens

    # -- the iteration -----------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ending = self._set_aside(view.requests)
        plan = super().plan(view, ledger)
        for rows, row in ending:
            rows.add(row)
        plan.valid_for, plan.valid_until_s = 0, math.inf
        if self.options.drafts == "spare" and len(plan.rows):
            self._verify_in_spare(plan, view, ledger)
        return plan

    def _set_aside(self, requests: RequestTable) -> list[tuple[RowSet, int]]:
        """Rows whose last token is being computed have nothing left to compute; they keep their
        place."""
        ending = []
        for rows in (self.queues.rt_pending, self.queues.be_pending):
            left = requests.known_tokens(rows.rows) - requests.computed_tokens[rows.rows]
            ending += [(rows, row) for row in rows.rows[left <= 0].tolist()]
        for rows, row in ending:
            rows.discard(row)
        return ending

    def _plainly(
        self, step: PlanInProgress, everyone: Batch, n: int, residual: np.ndarray, size: int
    ) -> bool:
        self._real_time, self._replaced = (everyone[:n], residual), EMPTY
        return not self._slots and super()._plainly(step, everyone, n, residual, size)

    def _place(self, step: PlanInProgress, choice: Choice, size: int) -> None:
        self._replaced = choice.urgent.batch[choice.fits - choice.replaced : choice.fits]
        super()._place(step, choice, size)

    def _computes_chunks(self, step: PlanInProgress, everyone: Batch) -> bool:
        return False

    # -- drafts in the time that is left -----------------------------------------------------------
    def _verify_in_spare(self, plan: StepPlan, view: SystemView, ledger: KvLedger) -> None:
        """Add drafts to the decodes of `plan`, as many as time, budget and memory allow."""
        requests, rows = view.requests, plan.rows
        resident = requests.computed_tokens[rows]
        left = requests.known_tokens(rows) - resident
        prompt = (left > 1) | (requests.output_tokens[rows] == 0)
        context = resident + plan.tokens
        drafts = self.queues.drafts(rows, context, prompt, requests)
        if not np.count_nonzero(drafts):
            return
        due = self._due_in()
        order = self._served_first(rows, requests, due)
        swapped = np.zeros(len(rows), np.int64)
        batch = Batch(rows, prompt, plan.tokens, context, swapped)[order]
        drafts = self._within(batch, drafts[order], self._bound(batch, due, requests))
        drafts = self._with_memory(ledger, batch, drafts)
        tokens = plan.tokens.copy()
        tokens[order] += drafts
        plan.tokens = tokens

    def _due_in(self) -> dict[int, float]:
        """Seconds that each real-time row of this plan has left."""
        everyone, residual = self._real_time
        return dict(zip(everyone.rows.tolist(), residual.tolist(), strict=True))

    def _bound(self, batch: Batch, due: dict[int, float], requests: RequestTable) -> float:
        """Seconds that a step may take so that no row is late for its drafts. batch: rows served,
        without drafts."""
        everyone, residual = self._real_time
        bound = self.packer.by_urgency(
            everyone, residual, requests, self._reach(self.batch_size)
        ).bound
        # That bound leaves out rows that would be late behind all that are more urgent. Where some
        # of these found no memory, the step without them may be in time.
        plain = self.estimator.seconds(batch)
        served = [due[row] for row in batch.rows.tolist() if row in due]
        bound = min([bound, *(left for left in served if left >= plain)])
        left_out = self._replaced[~among(self._replaced.rows, batch.rows)]
        if len(left_out):
            following = max(self.queues.average_iteration_s, self.estimator.seconds(left_out))
            bound = min([bound, *(due[row] - following for row in left_out.rows.tolist())])
        return bound

    def _served_first(
        self, rows: np.ndarray, requests: RequestTable, due: dict[int, float]
    ) -> np.ndarray:
        """Indices of `rows` (int64[n]): real-time ones by residual time, then best-effort ones."""
        urgency = np.array([due.get(row, math.inf) for row in rows.tolist()])
        return np.lexsort((rows, urgency, requests.service_class[rows] != _REAL_TIME))

    def _within(self, batch: Batch, drafts: np.ndarray, bound: float) -> np.ndarray:
        """int64[n]: of `drafts`, those of rows from the front with which the step takes at most
        `bound` seconds and keeps to the token budget."""
        budget = self.limits.max_num_batched_tokens - self._slots * len(batch)
        spare = max(budget - int(batch.new.sum()), 0)
        drafts = np.minimum(drafts, np.maximum(spare - (drafts.cumsum() - drafts), 0))

        def first(n: int) -> np.ndarray:
            return np.where(np.arange(len(batch)) < n, drafts, 0)

        def fits(n: int) -> bool:
            more = first(n)
            longer = replace(batch, new=batch.new + more, context=batch.context + more)
            return self.estimator.seconds(longer) <= bound

        low, high = 0, len(batch) + 1
        if bound == math.inf or fits(len(batch)):
            return drafts
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return first(low)

    def _with_memory(self, ledger: KvLedger, batch: Batch, drafts: np.ndarray) -> np.ndarray:
        """int64[n]: of `drafts`, those of rows from the front that find free memory."""
        some = np.flatnonzero(drafts)
        wanted = batch.context[some] + drafts[some]
        if ledger.grow_all(batch.rows[some], wanted):
            return drafts
        grown = ledger.grow_each(batch.rows[some], wanted)
        drafts = drafts.copy()
        drafts[some[grown:]] = 0
        return drafts
