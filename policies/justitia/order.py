"""Justitia's order over all replicas of a fleet: one fluid system, whose memory is that of the
replicas together (Yang et al., Sec. IV-C has one engine; the sum is ours)."""

from __future__ import annotations

import math

from twinserve.policies.justitia.clock import VirtualClock
from twinserve.policies.order import ApplicationOrder
from twinserve.policies.parts.predictors import COSTS, Predictor
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
