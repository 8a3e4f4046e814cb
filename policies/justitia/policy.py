"""Justitia: applications one after another, in the order in which they would end under fair
sharing. Yang et al., "Justitia: Fair and Efficient Scheduling for LLM Applications".

- *Cost* (Sec. IV-A, eq. 1): KV token-time, p*d + d(d+1)/2 for a request, the sum for an application
  (`cost=compute`: p + 2d, the paper's Justitia/C).
- *Demand* (Sec. IV-B): predicted once, when an application arrives (parts/predictors.py).
- *Order* (Sec. IV-C, eqs. 2-3): the smallest virtual finish time F = V(a) + C first; V grows by
  M / N an iteration, M being the KV tokens of the device and N the applications that are active in
  the fluid system (clock.py). F never changes.
- *Engine* (footnote 3): no request is preempted for the sake of order. If memory runs out the
  largest F gives way, and comes back before anything that waits (parts/queue_policy.py).

Our choices for open points: time is counted in iterations of this engine, so V stands still while
it idles. If it has nothing left to do, the fluid system is emptied (it may hold demand that was
predicted too high). With `cost=compute` an iteration has no fixed capacity: the fluid system is
given what the engine served, or, with `M`, that much an iteration (eq. 2 with another C_j, as far
as the paper says). Ties: the application that came first, then the request that did.

Two options of ours that the paper does not have: `preempt` (`victims`) and `correct`.

*Preempting* (ours: footnote 3 denies it): the next request in order swaps out running ones of later
applications, the last first, if that makes enough room. A victim comes back in its turn. F does not
change by being preempted, so no two applications take turns.

*Corrections* (ours; Justitia sets F once and for all): F is V(arrival) plus a demand that moves
when

- its requests that have ended took more: the demand becomes twice that;
- a stage comes, of known prompts. The demand is compared with the cost so far, of the stage, and of
  earlier applications of the class after such a stage. If they differ by more than a factor of two,
  the demand moves up to that factor;
- it ends: what it did not ask for is no longer owed by the fluid system.
"""

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from twinserve.policies.base import SystemView, Traits
from twinserve.policies.errors import PolicyError
from twinserve.policies.justitia.clock import VirtualClock
from twinserve.policies.justitia.demand import DemandPolicy, DemandQueueOptions
from twinserve.policies.justitia.queues import OwnersQueue, RankedQueue
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.order import ApplicationOrder
from twinserve.policies.parts.predictors import COSTS, Cost, Predictor, make_predictor
from twinserve.policies.parts.queue_policy import QueuePolicy
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import Application, RequestTable


class JustitiaOrder(ApplicationOrder):
    """Stamps are virtual finish times F; of two that are equal the later one gets the next larger
    number.

    predictor  of its own: it hears of every request of the fleet
    cost       what applications are charged for (JustitiaOptions)
    M          what an iteration of each replica is worth; None: the tokens of its KV memory
    """

    def __init__(self, predictor: Predictor, cost: str = "memory", M: int | None = None) -> None:
        self.clock = VirtualClock()
        self._predictor = predictor
        self._cost = COSTS[cost]
        self._M = M
        self._F: dict[float, float] = {}  # by stamp

    def capacity(self, kv_tokens: int) -> int:
        return self._M or kv_tokens

    def serve(self, service: float) -> None:
        self.clock.advance(service)

    def application(self, application: Application) -> float | None:
        if application.kind is None:
            return None
        demand = self._predictor.application(application, self._cost)
        return None if demand is None else self._begins(demand)

    def request(self, row: int, requests: RequestTable) -> float:
        output = self._predictor.output_tokens(row, requests)
        return self._begins(self._cost(int(requests.prompt_tokens[row]), output))

    def _begins(self, demand: int) -> float:
        stamp = F = self.clock.arrive(demand)
        while stamp in self._F:
            stamp = math.nextafter(stamp, math.inf)
        self._F[stamp] = F
        return stamp

    def ended(self, output_tokens: int, kind: str | None) -> None:
        self._predictor.ended(output_tokens, kind)

    def leaves(self, stamp: float) -> None:
        F = self._F.pop(stamp, None)
        if F is not None:
            self.clock.leave(F)

    def idles(self) -> None:
        self.clock.drain()


def next_of(policy: QueuePolicy) -> int | None:
    """The first in order of the rows that wait or were preempted; None: there are none."""
    paused = policy.paused[0] if policy.paused else None
    if not policy.waiting:
        return paused
    head = policy.waiting.peek()
    return head if paused is None or policy.rank(head) < policy.rank(paused) else paused


def behind(policy: QueuePolicy, row: int) -> list[int]:
    """Running rows of applications behind that of `row`, the last first. (The last part of a rank
    is the row itself.)"""
    place = policy.rank(row)[:-1]
    found = [other for other in policy.running if policy.rank(other)[:-1] > place]
    return sorted(found, key=policy.rank, reverse=True)


def victims(policy: QueuePolicy, requests: RequestTable, ledger: KvLedger, kept: int) -> list[int]:
    """Return running rows that give way to the next in order; none if it fits without, or not even
    with all behind it. kept: blocks that an admission leaves free."""
    row = next_of(policy)
    if row is None:
        return []
    needed = -(-int(requests.known_tokens(row)) // ledger.block_tokens) + kept
    needed += row in policy.paused  # which come back with a block to spare
    room, seats = ledger.free_blocks, policy.limits.max_num_seqs - len(policy.running)
    if room >= needed and seats > 0:
        return []
    found: list[int] = []
    needed += len(policy.running)  # these may grow by a block each before it is admitted
    for other in behind(policy, row):
        found.append(other)
        room += ledger.held_blocks(other) + 1  # it does not grow
        seats += 1
        if room >= needed and seats > 0:
            return found
    return []


AGAIN = 2.0  # times what was taken: after so many doublings no demand is too low
TRUSTED = 2.0  # a demand this near to what a stage shows is left as it is


class Corrections:
    """Of applications by number, demands and costs in token-iterations."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}  # V at arrival
        self.believed: dict[int, float] = {}
        self._spent: dict[int, int] = {}  # by its requests that have ended
        self._expected: dict[int, int] = {}  # row that is here -> its cost, as predicted
        self._here: dict[int, int] = {}  # application -> of its rows here, the sum of that
        self._stages: dict[int, int] = {}  # that have come since the last plan

    def begins(self, number: int, V: float, demand: float) -> None:
        self._begun[number], self.believed[number] = V, demand
        self._spent[number] = self._here[number] = 0

    def comes(self, row: int, number: int, stage: int, expected: int) -> None:
        """A request of a stage; expected: its cost, as predicted."""
        self._expected[row] = expected
        self._here[number] += expected
        self._stages[number] = stage

    def ends(self, row: int, number: int, cost: int) -> None:
        self._here[number] -= self._expected.pop(row, 0)
        self._spent[number] += cost
        if self._spent[number] > self.believed[number]:
            self.believed[number] = AGAIN * self._spent[number]

    def look(self, total: Callable[[int, int], float | None]) -> list[int]:
        """Before a plan: applications of which a stage has come.

        total  (number, stage) -> the cost of a whole application of its class over that up to the
               stage; None: nothing is known
        """
        seen = list(self._stages)
        for number, stage in self._stages.items():
            times = total(number, stage)
            if times is not None:
                shown = times * (self._spent[number] + self._here[number])
                least = max(shown / TRUSTED, self._spent[number])
                self.believed[number] = min(max(self.believed[number], least), shown * TRUSTED)
        self._stages.clear()
        return seen

    def finish(self, number: int) -> float:
        """Its virtual finish time, as is believed now."""
        return self._begun[number] + self.believed[number]

    def forget(self, number: int) -> None:
        for kept in (self._begun, self.believed, self._spent, self._here):
            del kept[number]
        self._stages.pop(number, None)


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
                "justitia with correct=true cannot order a fleet, because applications are "
                "placed once; drop correct=true"
            )
        if not self._by_iteration:
            raise PolicyError(
                "justitia with cost=compute needs M to order a fleet; set M, or use cost=memory"
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
        return victims(self, self._table, ledger, self._keep_free(ledger))

    def _come_back(self, batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> bool:
        if not self.options.preempt:
            return super()._come_back(batch, plan, requests, ledger)
        while self._seat(batch) and (row := next_of(self)) is not None:
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
        if self.options.preempt and (row := next_of(self)) is not None:
            if behind(self, row):
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
