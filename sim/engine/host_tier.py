"""Transfers between an engine and its host tier, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinserve.backends.links import HostTransfers
from twinserve.policies.kv.offload.connector import Job, Offloading
from twinserve.policies.plan import StepPlan
from twinserve.sim.engine.clock import BEFORE_STEPS

if TYPE_CHECKING:
    from twinserve.sim.engine.loop import Engine


class HostTier:
    """Transfers of one engine. offload: what its ledger has on the tier; transfers: how long they
    take."""

    def __init__(self, engine: Engine, offload: Offloading, transfers: HostTransfers) -> None:
        self.engine, self.offload, self.transfers = engine, offload, transfers
        # of a tier that is shared: others may write what this engine waits for
        offload.store.listeners.append(self._changed)

    @property
    def busy(self) -> bool:
        """Return whether something on the tier may change without this engine."""
        return self.offload.store.busy

    def begin(self, plan: StepPlan | None) -> float:
        """Queue the stores of the plan before, and those of this plan that its step waits for.
        None: no plan will come. Returns when the step may compute (seconds)."""
        jobs = None if plan is None else plan.offload
        until_s, begun = self.transfers.begin(jobs, self.engine.clock.now)
        for job, landing in begun:
            self.engine.clock.process(self._lands(job, landing))
        return until_s

    def load(self, plan: StepPlan, end: float) -> None:
        """Queue the plan's loads. The step ends at the given time (seconds)."""
        if not plan.offload:
            return
        for job, landing in self.transfers.load(plan.offload, end):
            self.engine.fetching(job.row, landing)
            self.engine.clock.process(self._lands(job, landing))

    def fail(self) -> None:
        """The engine has failed."""
        self.offload.store.listeners.remove(self._changed)
        self.offload.fail()

    def _lands(self, job: Job, landing: float):
        engine = self.engine
        yield engine.clock.at(landing, BEFORE_STEPS)
        if engine.down:
            return
        self.transfers.landed(job)
        if not job.store:
            engine.loaded(job.row, job.upto)
        self.offload.complete(job)
        engine.notify()

    def _changed(self) -> None:
        self.engine.notify()
