"""Routers without engines: a scene in which a test says what replicas measure and which requests
come and go."""

import math

import numpy as np

from tests.sim.harness import Affine
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.fleet.view import FleetView
from twinserve.sim.results.recorder import Load

NAN = math.nan


def prompt(*blocks: int, tokens: int | None = None, block: int = 16, **more) -> Request:
    """A request whose prompt begins with these blocks of `block` tokens; tokens: in all."""
    named = np.array(blocks, np.int64)
    values = {
        "prompt_tokens": len(blocks) * block if tokens is None else tokens,
        "service_class": more.pop("service_class", 0),
        "slo_ttft_s": more.pop("slo_ttft_s", NAN),
        "slo_tpot_s": more.pop("slo_tpot_s", NAN),
    }
    return Request("r", 10, 0.0, values, lambda size: named, **more)


class Scene:
    """router  as on the command line, or an object

    loads: by index, (running, waiting, used blocks) as a replica measures them now; `history` puts
    others at a time.
    """

    def __init__(self, router: str | Router, replicas=3, blocks=100, block=16, models=None):
        self.router = parse_router(router).build() if isinstance(router, str) else router
        self.loads = [(0, 0, 0)] * replicas
        self.history: list[tuple[float, list]] = []
        self.asked: list[float] = []
        self.blocks = blocks
        self.view = FleetView(
            0.0, list(range(replicas)), [True] * replicas, [0] * replicas, self.router.signals,
            self._load, [blocks] * replicas, [block] * replicas, models or [Affine()] * replicas,
        )  # fmt: skip
        self.router.view = self.view
        for replica in range(replicas):
            self.router.on_came(replica)

    def _load(self, replica: int, at_s: float) -> Load:
        self.asked.append(at_s)
        past = [loads for when, loads in self.history if when <= at_s]
        running, waiting, used = (past[-1] if past else self.loads)[replica]
        return Load(at_s, running, waiting, used, self.blocks)

    def choose(self, request: Request, stage: Role = Role.SERVE) -> int | Verdict:
        """What the router says; nothing is sent."""
        if self.router.sheds(request, self.view):
            return Verdict.REJECT
        return self.router.place(request, stage, self.view)

    def send(self, request: Request | None = None, stage: Role = Role.SERVE) -> int | Verdict:
        """It says where, and the request goes there."""
        request = request or prompt()
        choice = self.choose(request, stage)
        if not isinstance(choice, Verdict):
            self.view.in_flight[choice] += 1
            self.router.on_dispatched(request, choice)
        return choice

    def first_token(self, request: Request, replica: int) -> None:
        self.router.on_first_token(request, replica)

    def end(self, request: Request, replica: int) -> None:
        self.view.in_flight[replica] -= 1
        self.router.on_ended(request, replica)

    def down(self, replica: int) -> None:
        self.view.up.remove(replica)
        self.view.takes[replica] = False
        self.router.on_failed(replica)

    def stored(self, replica: int, *contents: int) -> None:
        self.router.on_stored(replica, np.array(contents, np.int64))
