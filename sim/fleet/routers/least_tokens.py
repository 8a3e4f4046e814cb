"""The replica with the fewest prompt tokens in flight.

A request counts with its whole prompt from its dispatch to its end, as in llm-d's in-flight load
(`token-load-scorer`): how long its answer will be is not known, and what is cached neither.
"""

from __future__ import annotations

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, Shedding
from twinserve.sim.fleet.view import FleetView


class LeastTokens(PerRequest[Shedding]):
    """On a tie the one with the fewest requests, then the first."""

    name = "least-tokens"
    Options = Shedding

    def setup(self) -> None:
        self._tokens: dict[int, int] = {}  # replica -> prompt tokens in flight

    def on_came(self, replica: int) -> None:
        self._tokens[replica] = 0

    def on_dispatched(self, request: Request, replica: int) -> None:
        self._tokens[replica] += request.prompt_tokens

    def on_ended(self, request: Request, replica: int) -> None:
        self._tokens[replica] -= request.prompt_tokens

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return min(view.up, key=lambda i: (self._tokens[i], view.in_flight[i]))
