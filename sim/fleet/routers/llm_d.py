"""llm-d's scorers with the weights of its default (llm-d-inference-scheduler,
pkg/epp/framework/plugins/scheduling): 3 x prefix + 2 x queue + 2 x (1 - KV use).

prefix  share of the prompt's blocks that the replica has (`prefix-cache-scorer`)
queue   (max - waiting) / (max - min) over replicas, 1 where all have as many (`queue-scorer`)
KV use  share of the KV blocks that requests hold (`kv-cache-utilization-scorer`)

The replica with the highest sum gets the request, any of several on a tie (`max-score-picker`).
What replicas measure is 50 ms old. What they have cached is guessed from what they were sent
(`approx-prefix-cache-producer`: block size and room as the replica has them), or exactly known
from KV events (`index=exact`; `precise-prefix-cache-scorer`).
"""

from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Measured, of_events
from twinserve.sim.fleet.routers.prefixes import OfPrefixes, Prefixes
from twinserve.sim.fleet.view import FleetView, Signals


class LlmDOptions(Measured):
    """prefix, queue, kv  weights
    index  approximate or exact
    events_age, events_lost  of KV events: seconds until they come, share that does not
    """

    age: float = Field(0.05, ge=0, le=3600)
    prefix: float = Field(3.0, ge=0)
    queue: float = Field(2.0, ge=0)
    kv: float = Field(2.0, ge=0)
    index: Literal["approximate", "exact"] = "approximate"
    events_age: float = Field(0.0, ge=0, le=3600)
    events_lost: float = Field(0.0, ge=0, lt=1)
    _are_heard = field_validator("events_age", "events_lost")(of_events)

    @property
    def signals(self) -> Signals:
        return Signals(
            self.age, self.interval, self.lost, self.events_age, self.events_lost, self.seed
        )


class LlmD(OfPrefixes[LlmDOptions]):
    name = "llm-d"
    Options = LlmDOptions

    def setup(self) -> None:
        self._prefixes = Prefixes(self.options.index == "exact")
        self._rng = np.random.default_rng(self.options.seed)

    def on_dispatched(self, request: Request, replica: int) -> None:
        self._prefixes.dispatched(request, replica, self.view)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        total = self.scores(request, view)
        best = np.flatnonzero(total == total.max())
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        return view.up[int(chosen)]

    def scores(self, request: Request, view: FleetView) -> np.ndarray:
        """float64[n], of `view.up`."""
        matched = self._prefixes.matched(request, view)
        blocks = [request.prompt_tokens // view.block_tokens[i] for i in view.up]
        cached = [matched[i] / n if n else 0.0 for i, n in zip(view.up, blocks, strict=True)]
        loads = [view.load(i) for i in view.up]
        waiting = np.array([load.waiting for load in loads], np.float64)
        use = np.array([load.used / load.total for load in loads])
        options = self.options
        return (
            options.prefix * np.array(cached)
            + options.queue * queue_scores(waiting)
            + options.kv * (1 - use)
        )


def queue_scores(waiting: np.ndarray) -> np.ndarray:
    """1 for the shortest queue, 0 for the longest; 1 for all where all are equal."""
    most, least = waiting.max(), waiting.min()
    return np.ones(len(waiting)) if most == least else (most - waiting) / (most - least)
