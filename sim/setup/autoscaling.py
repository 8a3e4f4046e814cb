"""Autoscaling, from settings: which autoscaler, between which numbers (docs/fleet.md)."""

from __future__ import annotations

from twinserve.sim.fleet.scaling import Bounds, parse_scaler
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware


def check_autoscaling(config: SimulationConfig, hardware: Hardware) -> None:
    """Raises SettingsError or RegistryError for what cannot be scaled."""
    if config.autoscale is None:
        return
    parse_scaler(config.autoscale)
    if config.fleet is not None:
        raise SettingsError("--autoscale starts replicas that are alike; drop --fleet")
    if hardware.profile.dp > 1:
        raise SettingsError(
            "--autoscale: data-parallel ranks that share experts come and go together, which is "
            "not simulated; choose a profile without dp"
        )
    if not config.min_replicas <= config.replicas <= config.max_replicas:
        raise SettingsError(
            f"--replicas {config.replicas}: how many there are in the beginning is not between "
            f"--min-replicas {config.min_replicas} and --max-replicas {config.max_replicas}"
        )


def bounds_of(config: SimulationConfig) -> Bounds:
    return Bounds(config.min_replicas, config.max_replicas, config.start_up, config.grace)
