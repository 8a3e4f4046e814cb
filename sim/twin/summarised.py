"""A measured server whose file has only means and percentiles, as from `vllm bench serve` without
--save-detailed. The load is made from these numbers, and nothing can be fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.twin.served import OF_REQUESTS
from twinserve.traces.measurement import Measurement

NO_RATE = "{}: all requests are due at once, so there is no rate to change; measure at a rate"
_NEEDED = ("completed", "total_input_tokens", "total_output_tokens")


def check_summary(found: Measurement) -> None:
    """Raise SettingsError if the file states too little to make a load of it."""
    needed = [*_NEEDED, *["request_rate"] * ("max_concurrency" not in found.stated)]
    if lacks := [name for name in needed if not found.stated.get(name, 0.0) > 0]:
        raise SettingsError(
            f"check {found.path}: has no single requests, and as a summary it lacks "
            f"{', '.join(lacks)}: run vllm bench serve with --save-detailed"
        )


def stated_load(found: Measurement, factor: float = 1.0) -> str:
    """Return the name of a load with the stated number of requests, their mean lengths, the stated
    rate and limit of requests at once. factor: on the rate; on the limit if all are due at once.
    Raises SettingsError if there is nothing that the factor can change."""
    stated = found.stated
    rate, limit = stated.get("request_rate", math.inf), stated.get("max_concurrency")
    count = stated["completed"]
    if math.isinf(rate) and limit is None and factor != 1:
        raise SettingsError(f"--at {factor:g}x: {NO_RATE.format(found.path)}")
    options = {"num_prompts": stated.get("num_prompts", count), "request_rate": factor * rate}
    if limit is not None:
        at_once = limit * (factor if math.isinf(rate) else 1.0)
        options["max_concurrency"] = max(round(at_once), 1)
    options["burstiness"] = stated.get("burstiness", 1.0)
    options["random_input_len"] = max(round(stated["total_input_tokens"] / count), 1)
    options["random_output_len"] = max(round(stated["total_output_tokens"] / count), 1)
    return "vllm:" + ",".join(f"{name}={value:.15g}" for name, value in options.items())


def stated_inputs(
    found: Measurement, settings: Mapping, config: Path | None, factor: float
) -> Sequence[Inputs]:
    """Return the stated load on the profile as it is, at the measured rate and `factor` times it.
    settings, config: as of `server_fit.fit_server`. Raises SettingsError."""
    given = {**(from_file(config, dict(settings)) if config else {}), **settings}
    given = {name: value for name, value in given.items() if name not in OF_REQUESTS}
    loads = [stated_load(found, at) for at in (1.0, factor)]
    return [resolve(SimulationConfig(**given | {"trace": load, "slo": "none"})) for load in loads]


def summary_notices(found: Measurement) -> list[str]:
    """Return what cannot be said from such a file."""
    return [
        *(f"{found.path}: {notice}" for notice in found.notices),
        f"{found.path}: simulated with requests of its mean lengths, `{stated_load(found)}`; "
        "step times were not fitted. What lengths, arrivals and step times each add is not known, "
        "nor whether the server's queue grew",
    ]
