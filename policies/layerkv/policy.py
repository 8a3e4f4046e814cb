"""LayerKV: prompts begin before there is room for all of their KV; the layers without room wait on
the host.

Source: Xiong et al., "LayerKV: Optimizing Large Language Model Serving with Layer-wise KV Cache
Management". A plug-in for vLLM 0.5.5, and so one for policy `vllm-v0` here. Without its parts, or
while memory and objectives do not bind, it decides as that does. Our choices for the paper's open
points are in docs/layerkv.md.

- Algorithm 1, eqs. 1-3: prompts are begun as long as those that decode can still meet their TPOT
  objective on average (`slo_aware`).
- Sec. 3.1.1, eqs. 3-4: of a prompt at least the x layers stay on the device whose KV could not
  leave while it is computed, and more if memory is free; the others go to the host during the
  computation (`layer_wise`).
- Eq. 5: if the forecast of free blocks falls below a threshold, layers that were kept leave too
  (`proactive`).
- Requests with layers on the host decode if these can be fetched during the step, or get them back
  (`layers.py`).
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import SystemView, Traits
from twinserve.policies.baselines.vllm_v0 import VllmV0Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.layerkv.cost import LayerCost, RecentSteps, layerkv_estimator
from twinserve.policies.layerkv.layers import LayerMoves
from twinserve.policies.layerkv.lengths import (
    HistoryPredictor,
    LengthPredictor,
    LengthRanges,
    TrainedPredictor,
    TrueClass,
    TrueLength,
)
from twinserve.policies.layerkv.options import LayerKvOptions
from twinserve.policies.parts.predictors import ORACLE
from twinserve.policies.parts.runs import LONGEST_RUN, decodes_only
from twinserve.policies.plan import Hold, KvMove, StepOutcome, StepPlan
from twinserve.policies.requests import RequestTable

_LOOKS = 1000  # at a link that is never found free, before that counts as never
_NEGLIGIBLE = 1e-9  # a share of all-reduce that leaves the link to KV transfers
_ROUNDING = 1e-9  # lengths of an all-reduce: what sums of floats are off at most


def beside_allreduce(allreduce_share: float, wait: float, unit: float) -> tuple[float, float]:
    """(share of the link's time that KV transfers get, delay of an all-reduce as a part of its own
    length).

    A sender of a sub-unit looks first whether the link is in use, and if it is, looks again
    after `wait`. A sub-unit that has begun is not broken off, so the next all-reduce may have to
    wait for it. There is always more to send. All-reduces are evenly spread, so that what happens
    between two of them repeats:

    ```
    |all-reduce            | computing                    |all-reduce
    look       look        look                           | due, begins when the last sub-unit has
               been sent
                           |sub-unit|sub-unit|sub-unit|sub-unit|
    ```

    allreduce_share  of a step without any KV transfer, 0 <= share <= 1
    wait, unit       how long, in lengths of an all-reduce; > 0
    """
    if allreduce_share < _NEGLIGIBLE:
        return 1.0, 0.0
    period = 1.0 / allreduce_share  # from one all-reduce to the next
    for looks in range(math.ceil(1.0 / wait - _ROUNDING), _LOOKS):
        waited = looks * wait
        into = waited % period
        if into < 1.0 - _ROUNDING or period - into < _ROUNDING:
            continue  # in the next all-reduce already
        sent = math.ceil((period - into) / unit - _ROUNDING) * unit
        met = math.floor(waited / period) + 1  # all-reduces; only the one after them has to wait
        late = sent - (period - into)
        return sent / (waited + sent), late / met if late > _ROUNDING else 0.0
    return 0.0, 0.0


class LayerKvPolicy(VllmV0Policy):
    """LayerKV: prompts begin before there is room for all of their KV; the layers without room wait
    on the host.

    `predictor` can be replaced by another LengthPredictor before the first request."""

    name = "layerkv"
    Options = LayerKvOptions
    options: LayerKvOptions
    predictor: LengthPredictor
    default_kv = "layerwise"
    uses_estimator = True
    traits = Traits(
        no_drafts=(
            "moves layers of a prompt's KV by forecasts of one token a step, and its ledger has "
            "no room for drafts"
        )
    )
    fit_estimator = staticmethod(layerkv_estimator)  # the forms of its own paper

    @classmethod
    def estimates(cls, options: LayerKvOptions) -> bool:  # type: ignore[override]
        return options.slo_aware or options.layer_wise

    def setup(self) -> None:
        super().setup()
        given = self.options
        self._link_share = 1.0 / (1.0 + given.allreduce_share)
        if given.allreduce_check:
            sharing = partial(
                beside_allreduce, wait=given.allreduce_wait, unit=given.allreduce_unit
            )
            self._link_share, _ = sharing(given.allreduce_share)
            self.traits = replace(self.traits, link_sharing=sharing)
        if not self._link_share:
            raise PolicyError(
                f"policy 'layerkv': with allreduce_share={given.allreduce_share:g} and "
                f"allreduce_wait={given.allreduce_wait:g} no KV transfer ever finds the link "
                "free; lower one of them"
            )
        self.predictor = self._predictor()
        self.recent = RecentSteps(self.options.tpot_window)
        self.cost: LayerCost  # from the first plan on, where options ask for one
        self._ledger: KvLedger | None = None
        self._ranges = LengthRanges()  # of running requests
        # rows whose prompt is in a step that has not been reported; only asked
        self._computing: set[int] = set()
        # why the head of the queue was not admitted: slo, memory, or nothing of both
        self._held_up = ""
        self._requests: RequestTable  # from the first arrival on

    def _predictor(self) -> LengthPredictor:
        options = self.options
        if options.predictor == ORACLE:
            return TrueLength()
        if options.predictor == "perfect":
            return TrueClass(options.accuracy)
        learns = TrainedPredictor if options.predictor == "trained" else HistoryPredictor
        return learns(options.length_classes)

    # -- events ------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        super().on_arrival(row, requests)

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._ranges.forget(row)
        requests = self._requests
        self.predictor.observe(int(requests.prompt_tokens[row]), int(requests.output_tokens[row]))

    def on_withdraw(self, row: int) -> None:
        super().on_withdraw(row)
        self._ranges.forget(row)
        self._computing.discard(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        if not len(outcome.emitted):
            return
        if int(outcome.emitted[0]) in self._computing:
            self._computing.difference_update(outcome.emitted.tolist())
            return
        seconds = outcome.seconds
        if self.options.current_tpot == "request":
            seconds *= (len(self.queues.running) + len(outcome.finished)) / len(outcome.emitted)
        self.recent.add(seconds)

    # -- the step ----------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        if ledger is not self._ledger:
            self._meet(ledger)
        ledger.begin_step()
        plan, requests = StepPlan(), view.requests
        layers = None
        if self.options.layer_wise and isinstance(ledger, LayerwiseLedger):
            layers = LayerMoves(
                self.options,
                self.cost,
                self.queues,
                self._ranges,
                self._computing,
                plan,
                requests,
                ledger,
            )
        self._held_up = ""
        if not len(self.queues.swapped):
            self._begin_prompts(plan, view, ledger, layers)
        if layers is None:
            if not plan:
                self._decode(plan, requests, ledger)
        elif not plan:
            layers.decode()
        elif self.options.proactive:
            layers.make_room_ahead(layers.prompt_seconds())
        if not plan.admitted and not plan.preempted:
            self._swap_in(plan, requests, ledger)
        plan.moves = self._moves(plan, ledger)
        if decodes_only(plan, requests):
            plan.valid_for = self._stands(plan, ledger, layers)
        return plan

    def _meet(self, ledger: KvLedger) -> None:
        """The first plan: learn how many layers there are."""
        options = self.options
        self._ledger = ledger
        if self.estimates(options):
            self.cost = LayerCost(self.estimator, ledger.layers, self.limits, self._link_share)
        if options.layer_wise and isinstance(ledger, LayerwiseLedger):
            ledger.interleave(options.interleaved)

    def _moves(self, plan: StepPlan, ledger: KvLedger) -> list[KvMove]:
        """Whole requests are swapped as vLLM swaps them: the step waits."""
        whole = {*(row for row, _ in plan.preempted), *plan.swapped_in}
        moves = ledger.take_moves()
        if not whole:
            return moves
        return [
            replace(move, hold=Hold.BEFORE_STEP) if move.row in whole else move for move in moves
        ]

    # -- Algorithm 1 -------------------------------------------------------------------------------
    def allowed_seconds(self, now: float, requests: RequestTable) -> float:
        """Eq. 1's minimum over the requests that decode; inf if there are none."""
        _, allowed = self.allowances(now, requests)
        if self.options.savable_only:
            allowed = allowed[allowed >= 0.0]
        return float(allowed.min(initial=np.inf))

    def allowances(self, now: float, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """Eq. 1 of each request that decodes: its row, and seconds of prompts; int64[n],
        float64[n]."""
        rows = self.queues.rows
        rows = rows[requests.output_tokens[rows] > 0]
        first = requests.first_token_s[rows]
        past_s = np.where(np.isnan(first), 0.0, now - first)
        allowed = kernels.allowed_prefill_seconds(
            requests.slo_tpot_s[rows],
            past_s,
            requests.output_tokens[rows],
            self._ranges.lower[rows],
            self.recent.tpot,
        )
        return rows, allowed

    def _begin_prompts(
        self, plan: StepPlan, view: SystemView, ledger: KvLedger, layers: LayerMoves | None
    ) -> None:
        """Prefills, from the head of the queue, while eq. 2 holds, and tokens, seats and memory
        last."""
        requests, budget, spent = view.requests, self.token_budget, 0.0
        allowed, queues = np.inf, self.queues
        if queues.waiting and self.options.slo_aware:
            allowed = self.allowed_seconds(view.now, requests)
        admitted, tokens = [], []
        while queues.waiting and len(queues.running) < self.limits.max_num_seqs:
            row = queues.waiting[0]
            known = int(requests.known_tokens(row))
            hit = ledger.hit_tokens(row)
            if allowed < np.inf:
                spent += self.cost.prefill_seconds(known - hit)
                if not spent < allowed:
                    self._held_up = "slo"
                    break
            if known > budget:
                break
            keep_free = self._keep_free(ledger)
            if not (
                ledger.admit(row, known, hit, keep_free)
                if layers is None
                else layers.admit(row, known, keep_free)
            ):
                self._held_up = "memory"
                break
            queues.begin()
            self._expect(row, requests)
            plan.admitted.append((row, hit))
            admitted.append(row)
            tokens.append(known - hit)
            budget -= known
        if admitted:
            self._computing.update(admitted)
            plan.rows, plan.tokens = np.array(admitted, np.int64), np.array(tokens, np.int64)

    def _expect(self, row: int, requests: RequestTable) -> None:
        """How long its output will be, said once and not again after a preemption."""
        if row not in self._ranges:
            self._ranges.put(row, self.predictor.predict(row, requests))

    # -- runs --------------------------------------------------------------------------------------
    def _stands(self, plan: StepPlan, ledger: KvLedger, layers: LayerMoves | None) -> int:
        """Return for how many further steps all rows decode on: until the forecast changes or, for
        a queue held up by Algorithm 1, the passed time does."""
        if self._held_up == "slo" or len(plan.rows) < len(self.queues.running):
            return 0
        steps = self._further_decodes(ledger)
        if not steps or layers is None or not self.options.proactive or layers.stuck:
            return steps
        # At each step of the run eq. 5 is at least: free cells, less a block a stage for each row.
        spare = layers.spare_blocks() - self.options.horizon * len(plan.rows)
        if spare < 0:
            return 0
        taken = np.cumsum(ledger.block_growth(plan.rows, min(steps, LONGEST_RUN)))
        return min(steps, int(np.searchsorted(taken, spare, side="right")))
