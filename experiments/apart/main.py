"""When prefill apart from decode pays on equal GPUs: docs/kv_transfer.md.

    twinserve study apart --out docs/results/apart

The same requests are served by four GPUs that do both, and by one to three of them that compute
prompts while the others decode. What is compared is the share of requests that keep an objective.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table, Text
from twinserve.profiles.composition import StepComposition
from twinserve.sim.report.over import with_digits as shown
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import prompt_seconds, service_seconds
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import Workload

# Single runs of the experiment on prefill apart from decode: prompt lengths, a fleet, a load, a
# seed -> a row.
# Requests are drawn for each prompt length and seed, the same for every fleet and load: loads
# stretch their arrivals. So fleets are compared on the same requests.
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


GRID = Grid(
    {
        "prompt": (1024, 4096, 16384),
        "load": (0.3, 0.6, 0.9),
        "fleet": (AGGREGATED, "1P3D", "2P2D", "3P1D"),
    },
    few={"prompt": (4096,), "load": (0.6,)},
)
PAYS, LOSES, SAME = WORDS = ("pays", "loses", "not significant")
# A row for each prompt length, load, objective and split. together, apart: shares of requests that
# keep the objective, of four GPUs that do both and of the split
TABLE = Table(
    ("prompt", "load", "fleet", "objective"),
    ("apart",),
    {"together": ("apart", "baseline"), "gain": ("apart", "difference")},
    base={"fleet": AGGREGATED},
    pair=("prompt", "load", "objective"),
    own=False,
    verdicts={"verdict": ("gain", 0.0, WORDS)},
)


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """`TABLE` of runs that have a column for each objective."""
    long = [rows.assign(objective=name, apart=rows[f"{name}_kept"]) for name in OBJECTIVES]
    return TABLE(pd.concat(long).sort_index(kind="stable").reset_index(drop=True))


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Of each prompt length, load and objective, the split that keeps most; the first of equals."""
    order = found.groupby(["prompt", "load", "objective"], sort=False)["apart"].idxmax()
    return found.loc[order]


def _cell(row: pd.Series) -> str:
    shares = f"{100 * row.together:.0f}, {row.fleet} {100 * row.apart:.0f}"
    return f"{shares} ({shown(100 * row.gain, 100 * row.gain_ci)}): {row.verdict}"


TEXT = Text(
    "Means over {seeds} seeds. Each cell: four GPUs that do both, the split that keeps most, and "
    "in brackets the difference, paired by seed, ± half of its 95 % interval.",
    {"prompt tokens": "prompt"},
    {"": _cell},
    over="load",
    over_heading="load {:g}",
    each="objective",
    heading="**{}**: per cent of requests that keep it",
)
STUDY = Study(
    "apart",
    "",
    [
        Figure(
            "loads",
            "prefill apart, by load",
            GRID,
            run_point,
            gains,
            text=lambda found: TEXT(best(found)),
        )
    ],
    least_seeds=2,
)
