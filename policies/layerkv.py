"""LayerKV: prompts begin before there is room for all of their KV; the layers without room wait on the host.

Source: Xiong et al., "LayerKV: Optimizing Large Language Model Serving with Layer-wise KV Cache Management". A plug-in for
vLLM 0.5.5, and so one for policy `vllm-v0` here: without its parts, or while memory and objectives do not bind, it decides
as that does. docs/layerkv.md says what was decided where the paper is open.

- Algorithm 1: prompts are begun as long as those that decode can still meet their TPOT objective on average (`slo_aware`).
- Sec. 3.1.1: of a prompt at least the x layers stay on the device whose KV could not leave while it is computed, and more
  where memory is free; the others go to the host beside the computation (`layer_wise`).
- eq. 5: where the forecast of free blocks falls below a threshold, layers that were kept leave too (`proactive`).
- Requests with layers on the host decode if these can be fetched beside the step, or get them back (`layerkv_layers`).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from .base import EngineLimits, SystemView
from .errors import PolicyError
from .kv.base import KvLedger
from .layerkv_cost import LayerCost, RecentSteps, layerkv_estimator
from .layerkv_forecast import allowed_prefill_seconds
from .layerkv_layers import LayerMoves
from .layerkv_lengths import HistoryPredictor, LengthPredictor, LengthRange, TrueClass, TrueLength
from .layerkv_link import beside_allreduce
from .plan import Hold, KvMove, StepOutcome, StepPlan
from .predictors import ORACLE, OracleByShortName
from .requests import RequestTable
from .runs import LONGEST_RUN, decodes_only
from .vllm_v0 import VllmV0Options, VllmV0Policy


class LayerKvOptions(VllmV0Options):
    """Those of `vllm-v0`, and the parts of the paper, each of which can be switched off.

    slo_aware     Algorithm 1; off: prompts begin as soon as there is memory
    savable_only  requests that are expected to miss their objective even without another prompt (a negative allowance) do
                  not count; off, as printed: while there is one, no prompt begins
    layer_wise    off: a request's layers are all on the device
    x             layers that stay on the device at least; None: by eqs. 3-4
    retain        max: as many layers stay as the forecast has room for; min: x
    proactive     layers leave when the forecast says so; off: when a step finds no memory
    promote       layers come back while the forecast allows; off: they are fetched for every step
    interleaved   every other layer leaves first; off: the first ones
    threshold     fraction of blocks; the paper's preset threshold of eq. 5
    horizon       stages of `block_tokens` steps that eq. 5 looks ahead
    predictor     of output lengths. history: learns from requests that ended; perfect: is told the class, an ablation;
                  oracle-length, or oracle: is told the length, a bound
    length_classes  classes of `history`
    accuracy      of `perfect`: the share of requests whose class it says; of the others it says one beside it
    current_tpot  of eq. 1. step: seconds of a decode step; request: of a step, times requests running, over those that
                  decoded in it, which is how long a request waits for a token where not all have their layers at hand
    tpot_window   decode steps that it is the mean of
    allreduce_share  of the link's time that eqs. 3-4 reckon with for all-reduce; 0 with NVLink or on one GPU (Sec. 3.1.3)
    allreduce_check  a transfer looks whether the link is in use before it sends each sub-unit; off: it shares the link
    allreduce_wait, allreduce_unit  how long it waits before it looks at a busy link again, and how long a sub-unit of it takes,
                  in lengths of an all-reduce
    """

    slo_aware: bool = True
    savable_only: bool = False
    layer_wise: bool = True
    x: int | None = Field(None, ge=0)
    retain: Literal["max", "min"] = "max"
    proactive: bool = True
    promote: bool = True
    interleaved: bool = True
    threshold: float = Field(0.05, ge=0.0, lt=1.0)
    horizon: int = Field(4, ge=0, le=10_000)
    predictor: Annotated[Literal["history", "perfect", "oracle-length"], OracleByShortName] = "history"
    length_classes: int = Field(4, ge=1, le=512)
    accuracy: float = Field(1.0, ge=0.0, le=1.0)
    current_tpot: Literal["step", "request"] = "step"
    tpot_window: int = Field(32, ge=1)
    allreduce_share: float = Field(0.0, ge=0.0, le=0.99)
    allreduce_check: bool = True
    allreduce_wait: float = Field(0.5, ge=0.01, le=1000.0)
    allreduce_unit: float = Field(0.25, ge=0.01, le=1000.0)


class LayerKvPolicy(LayerMoves, VllmV0Policy):
    """`predictor` can be replaced by another LengthPredictor before the first request."""

    name = "layerkv"
    Options = LayerKvOptions
    default_kv = "layerwise"
    uses_estimator = True
    fit_estimator = staticmethod(layerkv_estimator)  # the forms of its own paper

    @classmethod
    def estimates(cls, options: LayerKvOptions) -> bool:
        return options.slo_aware or options.layer_wise

    def __init__(self, limits: EngineLimits, options: LayerKvOptions | None = None, estimator=None) -> None:
        super().__init__(limits, options, estimator)
        given = self.options
        self._link_share = 1.0 / (1.0 + given.allreduce_share)
        if given.allreduce_check:
            self.link_sharing = partial(beside_allreduce, wait=given.allreduce_wait, unit=given.allreduce_unit)
            self._link_share, _ = self.link_sharing(given.allreduce_share)
        if not self._link_share:
            raise PolicyError(
                f"policy 'layerkv': with allreduce_share={given.allreduce_share:g} and "
                f"allreduce_wait={given.allreduce_wait:g} no KV transfer ever finds the link free; lower one of them"
            )
        self.predictor = self._predictor()
        self.recent = RecentSteps(self.options.tpot_window)
        self.cost: LayerCost | None = None
        self._ledger: KvLedger | None = None
        self._layered = False  # the ledger knows layers, and they are used
        self._ranges: dict[int, LengthRange] = {}  # of running requests
        self._lower = np.zeros(1024)  # row -> lower bound of its range
        self._computing: set[int] = set()  # rows whose prompt is in a step that has not been reported; only asked
        self._held_up = ""  # why the head of the queue was not admitted: slo, memory, or nothing of both
        self._demand = 0  # cells that it needs
        self._stuck = False  # the forecast is below the threshold, and nothing can leave
        self._requests: RequestTable | None = None

    def _predictor(self) -> LengthPredictor:
        options = self.options
        if options.predictor == ORACLE:
            return TrueLength()
        return TrueClass(options.accuracy) if options.predictor == "perfect" else HistoryPredictor(options.length_classes)

    # -- events ------------------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        super().on_arrival(row, requests)

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._ranges.pop(row, None)
        requests = self._requests
        self.predictor.observe(int(requests.prompt_tokens[row]), int(requests.output_tokens[row]))

    def on_outcome(self, outcome: StepOutcome) -> None:
        if not len(outcome.emitted):
            return
        if int(outcome.emitted[0]) in self._computing:
            self._computing.difference_update(outcome.emitted.tolist())
            return
        seconds = outcome.seconds
        if self.options.current_tpot == "request":
            seconds *= (len(self.running) + len(outcome.finished)) / len(outcome.emitted)
        self.recent.add(seconds)

    # -- the step ----------------------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        if ledger is not self._ledger:
            self._meet(ledger)
        ledger.begin_step()
        plan, requests = StepPlan(), view.requests
        self._held_up, self._demand, self._stuck = "", 0, False
        if not len(self.swapped):
            self._begin_prompts(plan, view, ledger)
        if plan:
            if self._layered and self.options.proactive:
                self._make_room_ahead(requests, ledger, self._prompt_seconds(plan))
        elif self._layered:
            self._decode_layers(plan, requests, ledger)
        else:
            self._decode(plan, requests, ledger)
        if not plan.admitted and not plan.preempted:
            self._swap_in(plan, requests, ledger)
        plan.moves = self._moves(plan, ledger)
        if decodes_only(plan, requests):
            plan.valid_for = self._stands(plan, requests, ledger)
        return plan

    def _meet(self, ledger: KvLedger) -> None:
        """The first plan: learn how many layers there are."""
        options, layers = self.options, getattr(ledger, "layers", 1)
        self._ledger = ledger
        self._layered = options.layer_wise and hasattr(ledger, "admit_layers")
        if self._layered or options.slo_aware:
            self.cost = LayerCost(self.estimator, layers, self.limits, self._link_share)
        if self._layered:
            ledger.interleave(options.interleaved)

    def _moves(self, plan: StepPlan, ledger: KvLedger) -> list[KvMove]:
        """Whole requests are swapped as vLLM swaps them: the step waits."""
        whole = {*(row for row, _ in plan.preempted), *plan.swapped_in}
        moves = ledger.take_moves()
        if not whole:
            return moves
        return [replace(move, hold=Hold.BEFORE_STEP) if move.row in whole else move for move in moves]

    # -- Algorithm 1 -------------------------------------------------------------------------------------------
    def allowed_seconds(self, now: float, requests: RequestTable) -> float:
        """Eq. 1's minimum over the requests that decode; inf if there are none."""
        rows = np.array(self.running, np.int64)
        past = requests.output_tokens[rows]
        rows = rows[past > 0]
        if not len(rows):
            return np.inf
        first = requests.first_token_s[rows]
        past_s = np.where(np.isnan(first), 0.0, now - first)
        allowed = allowed_prefill_seconds(
            requests.slo_tpot_s[rows], past_s, requests.output_tokens[rows], self._lower[rows], self.recent.tpot
        )
        if self.options.savable_only:
            allowed = allowed[allowed >= 0.0]
        return float(allowed.min(initial=np.inf))

    def _begin_prompts(self, plan: StepPlan, view: SystemView, ledger: KvLedger) -> None:
        """Prefills, from the head of the queue, while eq. 2 holds, and tokens, seats and memory last."""
        requests, budget, spent = view.requests, self.token_budget, 0.0
        allowed = np.inf
        if self.waiting and self.options.slo_aware:
            allowed = self.allowed_seconds(view.now, requests)
        admitted, tokens = [], []
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            row = self.waiting[0]
            known = int(requests.known_tokens(row))
            hit = ledger.hit_tokens(row)
            if allowed < np.inf:
                spent += self.cost.prefill_seconds(known - hit)
                if not spent < allowed:
                    self._held_up = "slo"
                    break
            if known > budget:
                break
            if not self._admit(row, known, hit, requests, ledger):
                self._held_up = "memory"
                break
            del self.waiting[0]
            insort(self.running, row)
            self._expect(row, requests)
            plan.admitted.append((row, hit))
            admitted.append(row)
            tokens.append(known - hit)
            budget -= known
        if admitted:
            self._rows = None
            self._computing.update(admitted)
            plan.rows, plan.tokens = np.array(admitted, np.int64), np.array(tokens, np.int64)

    def _expect(self, row: int, requests: RequestTable) -> None:
        """How long its output will be, said once and not again after a preemption."""
        if row in self._ranges:
            return
        expected = self.predictor.predict(row, requests)
        self._ranges[row] = expected
        if row >= len(self._lower):
            self._lower = np.concatenate([self._lower, np.zeros(row + 1)])
        self._lower[row] = expected.lower

    def _admit(self, row: int, known: int, hit: int, requests: RequestTable, ledger: KvLedger) -> bool:
        keep_free = self._keep_free(ledger)
        if not self._layered:
            return ledger.admit(row, known, hit, keep_free)
        return self._admit_layers(row, known, keep_free, requests, ledger)

    # -- runs --------------------------------------------------------------------------------------------------
    def _stands(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> int:
        """For how many further steps everybody decodes on: until the forecast, or for a queue that Algorithm 1 holds up the
        time that passed, may say something else."""
        if self._held_up == "slo" or len(plan.rows) < len(self.running):
            return 0
        steps = self._further_decodes(ledger)
        if not steps or not self._layered or not self.options.proactive or self._stuck:
            return steps
        # At each step of the run eq. 5 is at least: free cells, less a block a stage for each row.
        ahead = self.options.horizon * len(plan.rows)
        spare = (ledger.free_cells - self._demand) // ledger.layers - ahead - self._threshold(ledger)
        if spare < 0:
            return 0
        taken = np.cumsum(ledger.block_growth(plan.rows, min(steps, LONGEST_RUN)))
        return min(steps, int(np.searchsorted(taken, spare, side="right")))
