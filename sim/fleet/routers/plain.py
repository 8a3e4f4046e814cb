"""Routers that know nothing of load: each replica in its turn, or one drawn."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, Shedding
from twinserve.sim.fleet.view import FleetView


class RoundRobin(PerRequest[Shedding]):
    """The next replica that is up, by index, after the one that was chosen last."""

    name = "round-robin"
    Options = Shedding

    def setup(self) -> None:
        self._last = -1

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        later = (i for i in view.up if i > self._last)
        self._last = next(later, view.up[0])
        return self._last


class RandomOptions(Shedding):
    seed: int = Field(0, ge=0)


class Random(PerRequest[RandomOptions]):
    """Each replica that is up with equal chance."""

    name = "random"
    Options = RandomOptions

    def setup(self) -> None:
        self._rng = np.random.default_rng(self.options.seed)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return view.up[int(self._rng.integers(len(view.up)))]
