"""Single runs of the experiment on prefill apart from decode: prompt lengths, a fleet, a load, a
seed -> a row.

Requests are drawn for each prompt length and seed, the same for every fleet and load: loads stretch
their arrivals. So fleets are compared on the same requests.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from twinserve.profiles.composition import StepComposition
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import prompt_seconds, service_seconds
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import Workload

PROFILE = "llama-3.1-8b@h100"
GPUS = 4  # of every fleet
TOKENS = 2**19  # of the prompts of a run
LEAST = 200  # requests of a run
OUTPUTS = (50, 250)  # tokens, uniform
FLOOR_S = 0.2  # of every bound on a TTFT
# Name -> times that a prompt alone takes (beside the floor), and times that a step with one decode
# takes, which a request's TTFT and TPOT may have.
OBJECTIVES = {"soon": (2.0, 5.0), "even": (10.0, 1.5), "relaxed": (10.0, 5.0)}
AGGREGATED = "4"


def requests_of(prompt: int, load: float, seed: int, hardware: Hardware) -> Workload:
    """Prompts of half to one and a half times `prompt` tokens; arrivals of a Poisson process that
    ask for `load` of what `GPUS` replicas that do both can do."""
    rng = np.random.default_rng([seed, prompt, 25])
    count = max(TOKENS // prompt, LEAST)
    prompts = rng.integers(prompt // 2, prompt * 3 // 2 + 1, count)
    outputs = rng.integers(OUTPUTS[0], OUTPUTS[1] + 1, count)
    at_s = rng.exponential(1.0, count).cumsum()
    busy_s = service_seconds(Workload.build(at_s, prompts, outputs), hardware) / GPUS
    return Workload.build(at_s * (busy_s / load / count), prompts, outputs)


def run_point(prompt: int, fleet: str, load: float, seed: int) -> dict:
    """fleet: `4` replicas that do both, or `1P3D` and so on.

    NAME_kept          share of the requests that keep both objectives of that name
    ttft_p90_s, tpot_p90_s
    transfer_s         mean of the KV's way; 0 without one
    """
    apart = {"replicas": GPUS} if fleet == AGGREGATED else {"fleet": fleet}
    config = SimulationConfig(
        trace="poisson",
        requests=1,
        offline=True,
        profile=PROFILE,
        policy=("vllm",),
        slo="none",
        prefix_caching=False,
        seed=seed,
        **apart,
    )
    inputs = resolve(config)
    hardware = inputs.hardware
    inputs = replace(inputs, workload=requests_of(prompt, load, seed, hardware))
    result = run_simulation(Simulation(inputs, inputs.policies[0]))
    requests = result.rows.requests
    ttft = requests["first_token_s"] - requests["arrival_s"]
    tpot = (requests["last_token_s"] - requests["first_token_s"]) / (requests["output_tokens"] - 1)
    return {
        **_kept(requests, ttft, tpot, hardware),
        "ttft_p90_s": float(ttft.quantile(0.9)),
        "tpot_p90_s": float(tpot.quantile(0.9)),
        "transfer_s": float(requests["transfer_s"].mean()) if "transfer_s" in requests else 0.0,
    }


def _kept(
    requests: pd.DataFrame, ttft: pd.Series, tpot: pd.Series, hardware: Hardware
) -> dict[str, float]:
    prompts, model = requests["prompt_tokens"].to_numpy(), hardware.model
    alone = prompt_seconds(prompts, hardware, model.step_seconds)
    step = np.array([model.step_seconds(StepComposition(1, int(n), int(n))) for n in prompts])
    return {
        f"{name}_kept": float(((ttft <= FLOOR_S + first * alone) & (tpot <= later * step)).mean())
        for name, (first, later) in OBJECTIVES.items()
    }
