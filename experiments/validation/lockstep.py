"""The backends of a measured run of data-parallel ranks that share experts."""

from __future__ import annotations

from twinserve.backends.links import PcieLink
from twinserve.backends.lockstep import LockstepBackend, RankGroup, SharedExperts
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.base import KvLedger
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import BackendOf


def lockstep() -> BackendOf:
    """Makes the backends of one simulation whose replicas are expert-parallel ranks, whatever their
    profile says: its tables are of one of two."""
    group = RankGroup("the measured ranks")

    def backend(inputs: Inputs, spec, policy, ledger: KvLedger) -> SimulatedBackend:
        hardware = inputs.hardware
        rank = LockstepBackend(
            ledger.table,
            SharedExperts(hardware.model, whole=True),
            PcieLink(hardware.profile.pcie_bytes_per_s),
            hardware.limits,
            layers=hardware.profile.llm.layers,
            fast=False,
        )
        rank.join(group)
        return rank

    return backend
