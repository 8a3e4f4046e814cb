"""Profiles and beliefs that are off: one part of what is true, or of what policies believe, times a
factor.

The request list, its objectives and arrivals are those of the profile as it is: only what the
engine takes for them changes, and with it what policies believe, since they are fitted to the
profile. `belief` is the other way round: the engine is the profile's, and what policies believe was
fitted to one whose steps are off. A policy that predicts what applications need, and no step times,
predicts that much more. `demand` is of such policies only: half of the applications are believed to
need that much more, and the other half that much less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from twinserve.policies.base import Policy
from twinserve.policies.justitia.demand import DemandPolicy
from twinserve.policies.parts.estimators import BatchEstimator
from twinserve.policies.registry import PolicySpec
from twinserve.profiles.profile import Profile
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import Inputs, make_estimator

PARTS = ("step", "prefill", "decode", "host", "pcie", "kv", "belief")
BELIEFS = ("belief", "demand")


@dataclass(frozen=True)
class BelievingInputs(Inputs):
    """Inputs of runs whose policies know another profile than the engine's: `believed`."""

    believed: Hardware = field(kw_only=True)

    @cached_property
    def estimator(self) -> BatchEstimator:
        return make_estimator(self.config, self.believed)

    def estimator_for(self, policy: type[Policy]):
        return make_estimator(self.config, self.believed, policy)


def hardware_with(hardware: Hardware, profile: Profile) -> Hardware:
    """The same replica with another profile of the same engine; its KV room, also one that was set,
    grows as the profile's."""
    blocks = hardware.num_blocks * profile.num_gpu_blocks // hardware.profile.num_gpu_blocks
    limits = replace(
        hardware.limits,
        max_model_len=min(hardware.limits.max_model_len, blocks * hardware.block_tokens),
    )
    model = profile.model(limits.max_num_seqs)
    return replace(hardware, profile=profile, model=model, limits=limits, num_blocks=blocks)


def misjudging(spec: PolicySpec, part: str, factor: float) -> PolicySpec:
    """The same policy, to which each application seems to need `factor` times what it predicts, or
    with `demand` that of every second one (classes are in random order) and 1 / `factor` of the
    others; who predicts nothing stays as it is."""
    if not issubclass(spec.policy, DemandPolicy):
        return spec

    class Misjudging(spec.policy):
        def begins(self, number: int, demand: int, arrival_s: float) -> None:
            more = part == "belief" or number % 2
            super().begins(
                number, max(1, round(demand * factor if more else demand / factor)), arrival_s
            )

    return replace(spec, own=Misjudging)


def perturbed(inputs: Inputs, part: str, factor: float) -> Inputs:
    """`inputs` with `part` (one of PARTS, or demand) of the profile, or of what is believed,
    multiplied by `factor`."""
    if factor == 1.0:
        return inputs
    profile = inputs.hardware.profile
    if part not in BELIEFS:
        return replace(
            inputs, hardware=hardware_with(inputs.hardware, profile.scaled(**{part: factor}))
        )
    believed = hardware_with(
        inputs.hardware, profile.scaled(step=factor) if part == "belief" else profile
    )
    policies = tuple(misjudging(spec, part, factor) for spec in inputs.policies)
    same = {part.name: getattr(inputs, part.name) for part in fields(Inputs)}
    return BelievingInputs(**{**same, "policies": policies}, believed=believed)
