"""The work that the requests of a run bring over time: what autoscalers may know in advance."""

import numpy as np

from twinserve.sim.fleet.scaling import Bounds, Demand, parse_scaler
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.offered_load import request_seconds
from twinserve.traces.workload import Workload


def check_autoscaling(config: SimulationConfig, hardware: Hardware) -> None:
    """Raise SettingsError or RegistryError for a fleet that cannot be autoscaled."""
    if config.autoscale is None:
        return
    parse_scaler(config.autoscale)
    if config.fleet is not None:
        raise SettingsError("--autoscale starts replicas that are alike; drop --fleet")
    if hardware.profile.dp > 1:
        raise SettingsError(
            "--autoscale: adding and removing data-parallel ranks that share experts is not "
            "simulated; choose a profile without dp"
        )
    if not config.min_replicas <= config.replicas <= config.max_replicas:
        raise SettingsError(
            f"--replicas {config.replicas}: the first number of replicas must lie between "
            f"--min-replicas {config.min_replicas} and --max-replicas {config.max_replicas}"
        )


def bounds_of(config: SimulationConfig) -> Bounds:
    return Bounds(config.min_replicas, config.max_replicas, config.start_up, config.grace)


def demand_of(inputs: Inputs) -> Demand:
    """Return the listed requests' demand. Later turns and stages count from their first."""
    workload = inputs.workload
    arrival_s = _known(workload)
    order = np.argsort(arrival_s, kind="stable")
    times = arrival_s[order]
    work = np.concatenate([[0.0], np.cumsum(request_seconds(workload, inputs.hardware)[order])])
    prompts = np.concatenate([[0], np.cumsum(workload.prompt_tokens[order])])

    def between(begin_s: float, end_s: float) -> tuple[int, int]:
        first, last = times.searchsorted([begin_s, end_s]).tolist()
        return first, last

    def seconds(begin_s: float, end_s: float) -> float:
        first, last = between(begin_s, end_s)
        return float(work[last] - work[first])

    def mean_prompt(begin_s: float, end_s: float) -> float:
        first, last = between(begin_s, end_s)
        return float(prompts[last] - prompts[first]) / (last - first) if last > first else 0.0

    return Demand(seconds, mean_prompt)


def _known(workload: Workload) -> np.ndarray:
    """Return float64[n], arrivals (s); a later turn or stage has its group's first arrival."""
    arrival_s = workload.arrival_s.copy()
    later = np.isnan(arrival_s)
    if later.any():
        first = np.full(int(workload.group.max()) + 1, np.inf)
        known = ~later & (workload.group >= 0)
        np.minimum.at(first, workload.group[known], arrival_s[known])
        arrival_s[later] = first[workload.group[later]]
    return arrival_s
