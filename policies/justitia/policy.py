"""Justitia: applications one after another, in the order in which they would end if all were served
fairly (Yang et al., "Justitia: Fair and Efficient Scheduling for LLM Applications").

- *Cost* (Sec. IV-A, eq. 1): KV token-time, p*d + d(d+1)/2 for a request, the sum for an application
  (`cost=compute`: p + 2d, the paper's Justitia/C).
- *Demand* (Sec. IV-B): predicted once, when an application arrives (parts/predictors.py).
- *Order* (Sec. IV-C, eqs. 2-3): the smallest virtual finish time F = V(a) + C first; V grows by
  M / N an iteration, M being the KV tokens of the device and N the applications that are active in
  the fluid system (clock.py). F never changes.
- *Engine* (footnote 3): no request is preempted for the sake of order. Where memory runs out the
  largest F gives way, and comes back before anything that waits (parts/queue_policy.py).

Ours, where the paper is open: time is counted in iterations of this engine, so V stands still while
it idles; if it has nothing left to do the fluid system has not either, and is emptied (it may hold
demand that was predicted too high). With `cost=compute` an iteration has no fixed capacity: the
fluid system is given what the engine served, or, with `M`, that much an iteration (eq. 2 with
another C_j, as far as the paper says). Ties: the application that came first, then the request that
did.

Two options of ours that the paper does not have: `preempt` (preempting.py) and `correct`
(corrections.py).
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from twinserve.policies.base import SystemView, Traits
from twinserve.policies.errors import PolicyError
from twinserve.policies.justitia import preempting
from twinserve.policies.justitia.clock import VirtualClock
from twinserve.policies.justitia.corrections import Corrections
from twinserve.policies.justitia.demand import DemandPolicy, DemandQueueOptions
from twinserve.policies.justitia.order import JustitiaOrder
from twinserve.policies.justitia.queues import OwnersQueue, RankedQueue
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.predictors import COSTS, Cost, make_predictor
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import Application, RequestTable


class JustitiaOptions(DemandQueueOptions):
    """cost  what applications are charged for: KV token-time, or tokens computed
    M     what the fluid system shares out in an iteration, in the unit of `cost`; none: all KV
          tokens of the device, or with cost=compute what the engine served
    preempt  ours, not the paper's: the next in order swaps out those behind it
    correct  ours, not the paper's: demands that prove wrong are corrected
    """

    cost: Literal["memory", "compute"] = "memory"
    M: int | None = Field(None, ge=1)
    preempt: bool = False
    correct: bool = False


class JustitiaPolicy(DemandPolicy[JustitiaOptions]):
    name = "justitia"
    Options = JustitiaOptions
    traits = Traits(
        orders_applications=True,
        no_drafts=(
            "counts virtual time in iterations of one token a request, and what an application "
            "costs in tokens times iterations; with several tokens a step the two no longer agree"
        ),
    )

    waiting: RankedQueue | OwnersQueue[int]

    def setup(self) -> None:
        super().setup()
        self.corrections: Corrections | None = None
        self.waiting = RankedQueue()
        if self.options.correct:  # ranks of what waits may change
            self.corrections = Corrections()
            self.waiting = OwnersQueue(lambda number: self.F[number])
        self._left: set[int] = set()  # the fluid system, before they ended here; only asked
        # with `correct`: F, and what it becomes (None: it leaves), of what the last steps ended.
        # The fluid system hears of it after `on_outcome`, which says how many steps they were.
        self._late: list[tuple[float, float | None]] = []
        self.clock = VirtualClock()
        self.F: dict[int, float] = {}  # of applications by number, until they have ended
        self._arrived: dict[int, int] = {}  # their number in order of arrival
        self._arrivals = 0
        self._last_end_s = -math.inf
        self._unit = 0  # capacity of an iteration, token-iterations
        self._served = 0  # since V was last set: iterations, or their cost

    @property
    def cost(self) -> Cost:
        return COSTS[self.options.cost]

    # -- an order of the whole fleet ---------------------------------------------------------------
    def fleet_order(self) -> JustitiaOrder:
        options = self.options
        if options.correct:
            raise PolicyError(
                "justitia with correct=true has no order for a whole fleet, which sets the place "
                "of an application once; drop it there"
            )
        if not self._by_iteration:
            raise PolicyError(
                "justitia with cost=compute has no order for a whole fleet, since what an "
                "iteration is worth is not known beforehand; set M, or use cost=memory"
            )
        predictor = make_predictor(options)
        predictor.truth = self.predictor.truth
        return JustitiaOrder(predictor, options.cost, options.M)

    def on_application(self, application: Application) -> None:
        if math.isnan(application.order):
            super().on_application(application)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        """A request with a stamp is, here, an application by itself with that F: all requests of
        its application have the same, and no other does."""
        stamp = float(requests.order[row])
        if math.isnan(stamp):
            super().on_arrival(row, requests)
            return
        self._requests = requests
        number = self.application_of(row)
        self.here.comes(number)
        self._enters(number, stamp)
        self.enqueue(row, number)

    # -- applications ------------------------------------------------------------------------------
    def begins(self, number: int, demand: int, arrival_s: float) -> None:
        self._serve()
        if not self.here and arrival_s > self._last_end_s:
            self.clock.drain()
        if self.corrections is not None:
            self.corrections.begins(number, self.clock.V, demand)
        self._enters(number, self.clock.arrive(demand))

    def _enters(self, number: int, F: float) -> None:
        self.F[number] = F
        self._arrived[number] = self._arrivals
        self._arrivals += 1

    def _serve(self) -> None:
        """Bring the fluid system up to now."""
        self.clock.advance(self._served * self._unit)
        self._served = 0
        for before, now in self._late:
            if now is None:
                self.clock.leave(before)
            else:
                self.clock.move(before, now)
        self._late.clear()

    def enqueue(self, row: int, number: int) -> None:
        if isinstance(self.waiting, RankedQueue):
            self.waiting.add(row, (self.F[number], self._arrived[number]))
        else:
            self.waiting.add(row, number)
        if self.corrections is not None and number >= 0:
            requests, kind = self._requests, self._kinds[number]
            output = self.predictor.output_tokens(row, requests, kind)
            expected = self.cost(int(requests.prompt_tokens[row]), output)
            self.corrections.comes(row, number, int(requests.stage[row]), expected)

    def ends(self, row: int, number: int, cost: int) -> None:
        if self.corrections is not None:
            self.corrections.ends(row, number, cost)
            if number not in self._left and self._refinish(number, before := self.F[number]):
                self._late.append((before, self.F[number]))

    def _total_over_part(self, number: int, stage: int) -> float | None:
        return self.predictor.total_over_part(self._kinds[number], stage, self.cost)

    def _corrected(self, number: int) -> None:
        """Its demand may be another one."""
        before = self.F[number]
        if self._refinish(number, before) and number not in self._left:
            self._serve()
            self.clock.move(before, self.F[number])

    def _refinish(self, number: int, before: float) -> bool:
        """Set the application's F anew. Return whether it changed."""
        assert self.corrections is not None and isinstance(self.waiting, OwnersQueue)
        self.F[number] = now = self.corrections.finish(number)
        if now == before:
            return False
        self.waiting.shrunk(number)
        self.reorder()
        return True

    def forget(self, number: int) -> None:
        if self.corrections is not None:
            if number not in self._left:
                self._late.append((self.F[number], None))
            self.corrections.forget(number)
            assert isinstance(self.waiting, OwnersQueue)
            self.waiting.forget(number)
        self._left.discard(number)
        super().forget(number)
        del self.F[number], self._arrived[number]

    def leaves(self, row: int, number: int) -> None:
        """With its last request here an application leaves the fluid system as well, so that what
        it will never ask for takes nothing from the others."""
        if self.here.count(number) == 1:
            self._serve()
            self.clock.leave(self.F[number])
            self._left.add(number)
        self.ends(row, number, 0)

    def rank(self, row: int) -> tuple:
        number = self.application_of(row)
        return self.F[number], self._arrived[number], row

    # -- virtual time ------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        if not self._unit:
            memory = self.options.M or ledger.num_blocks * ledger.block_tokens
            self._unit = memory if self._by_iteration else 1
        if self.corrections is not None:
            if self._late:
                self._serve()
            for number in self.corrections.look(self._total_over_part):
                self._corrected(number)
        self._table = view.requests
        return super().plan(view, ledger)

    # -- preemption for the sake of order, with `preempt` ------------------------------------------
    def preempts(self, ledger: KvLedger) -> list[int]:
        if not self.options.preempt:
            return []
        return preempting.victims(self, self._table, ledger, self._keep_free(ledger))

    def _come_back(self, batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> bool:
        if not self.options.preempt:
            return super()._come_back(batch, plan, requests, ledger)
        while self._seat(batch) and (row := preempting.next_of(self)) is not None:
            if self.paused and row == self.paused[0]:
                if not self._resume(row, batch, plan, requests, ledger):
                    break
                del self.paused[0]
            elif self._begin(row, batch, plan, requests, ledger):
                self.waiting.remove(row)
                self.admitted(row, requests)
            else:
                break
        return False  # what waits has been looked at

    def quiet_steps(self, plan: StepPlan, ledger: KvLedger) -> float:
        if self.options.preempt and (row := preempting.next_of(self)) is not None:
            if preempting.behind(self, row):
                return 0  # they may give way in the next step
        return math.inf

    @property
    def _by_iteration(self) -> bool:
        """Whether the fluid system has the same capacity in every iteration."""
        return self.options.cost == "memory" or self.options.M is not None

    def admitted(self, row: int, requests: RequestTable) -> None:
        if not self._by_iteration:
            self._served += int(requests.prompt_tokens[row])

    def on_outcome(self, outcome: StepOutcome) -> None:
        steps = len(outcome.ends_s)
        self._served += steps if self._by_iteration else 2 * steps * len(outcome.emitted)
        self._last_end_s = float(outcome.ends_s[-1])
