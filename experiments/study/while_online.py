"""A run that lasts as long as its online requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import State
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import REAL_TIME


class WhileOnline(Simulation):
    """Ends when the online requests have: what offline work is left then is not waited for.

    slice_s  it is looked after every so many seconds whether they have
    first_s  when it is looked first, seconds of the run; by default after one slice
    watch    called with the run after each slice
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        slice_s: float = 5.0,
        first_s: float | None = None,
        watch: Callable[[Simulation], None] = lambda run: None,
    ) -> None:
        super().__init__(inputs, spec)
        self._slice_s, self._first_s = slice_s, slice_s if first_s is None else first_s
        self._watch = watch
        self._online = int((inputs.workload.service_class == REAL_TIME).sum())

    def _advance(self) -> None:
        until = self._first_s
        while self._online_left():
            if self.clock.peek() == np.inf:
                self.clock.run()  # nothing more will happen: says which process waits for what
                return
            self.clock.run(until)
            self._watch(self)
            until += self._slice_s

    def _online_left(self) -> bool:
        ended = 0
        for engine in self.engines:
            requests = engine.core.requests
            finished = requests.state == int(State.FINISHED)
            ended += int(np.count_nonzero(finished & (requests.service_class == REAL_TIME)))
        return ended < self._online
