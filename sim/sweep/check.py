"""Check settings without a run: the names in them must exist."""

from __future__ import annotations

from functools import cache

from twinserve.policies.registry import ledger_class, parse_policy
from twinserve.profiles.profile import load_profile
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.front_end import parse_front_end
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.traces.load import existing, has_name


def _named(trace: str) -> None:
    if not has_name(trace):
        existing(trace)


def check_names(config: SimulationConfig) -> None:
    """Raise RegistryError, ProfileError, WorkloadError or SettingsError for an unknown policy,
    ledger, router, profile, fleet, autoscaler, trace, failure file or option."""
    for text in config.policy:
        _policy(text)
    if config.kv is not None:
        _ledger(config.kv)
    _router(config.router)
    if config.fleet is not None:
        _fleet(config.fleet)
    if config.failures is not None:
        _failures(config.failures)
    if config.autoscale is not None:
        _scaler(config.autoscale)
    _profile(config.profile)
    _trace(config.trace)
    parse_objectives(config.slo)
    parse_front_end(config.front_end)


@cache
def _failures(given: str) -> None:
    from twinserve.sim.setup.failures import read_failures

    read_failures(given)


@cache
def _scaler(text: str) -> None:
    from twinserve.sim.fleet.scaling import parse_scaler

    parse_scaler(text)


@cache
def _fleet(given: str) -> None:
    from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

    read_fleet(given)


# A sweep asks the same names of hundreds of runs; errors are not kept.
_policy, _ledger, _router, _profile, _trace = map(
    cache, (parse_policy, ledger_class, parse_router, load_profile, _named)
)
