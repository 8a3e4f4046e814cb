"""Single runs of the LayerKV study: settings in, one row of metrics out.

The testbed of Sec. 5.1: L20 GPUs without NVLink, two of which share a PCIe link, and 2,048 GB of
host memory for eight of them. KV memory is what is left after a step of the longest configured
input (Sec. 2.2), so it shrinks as that grows. Step times are those of derived profiles, nothing is
measured.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.experiments.study.runs import column
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.profile import Profile, derive_profile, save_profile
from twinserve.profiles.ranks import rank_weight_bytes
from twinserve.profiles.specs import GpuSpec, ModelSpec
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation

TTFT_S, TPOT_S = 3.0, 0.2  # Sec. 5.2.4
OUTPUT = 512
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
HOST_BYTES_PER_GPU = 2048e9 / 8
LONGEST_SHAREGPT = 2300  # prompt and output together
MODELS = {"llama-2-7b": 1, "yi-34b-200k": 2, "llama-3.1-70b": 4}  # degree of tensor parallelism

COLUMNS = {
    "ttft_s": "classes.rt.mean_ttft_ms / 1000",
    "ttft_p99_s": "classes.rt.p99_ttft_ms / 1000",
    "tpot_s": "classes.rt.mean_tpot_ms / 1000",
    "tokens_per_s": "classes.rt.output_throughput",
    "recomputes": "kv.preemptions.recompute",
}
KEPT = {what: f"classes.rt.{what or 'slo_'}attainment" for what in ("", "ttft_", "tpot_")}
VLLM = "vllm-v0"  # 0.5.5
SAVABLE = "layerkv:savable_only=true"
UNBOUND = "layerkv:max_parked=none"  # nothing but Algorithm 1 and the host's memory
BOTH = f"{SAVABLE},max_parked=none"
# Late requests counted in Algorithm 1's sum or left out, times at most 64 parked or any number
CELLS = ("layerkv", SAVABLE, UNBOUND, BOTH)
NO_SLO = "layerkv:slo_aware=false"
HISTORY = "layerkv:predictor=history"
KNOWN = "layerkv:predictor=oracle-length"


def _blocks_left(llm: ModelSpec, gpu: GpuSpec, tp: int, tokens: int, requests: int = 256) -> int:
    """KV blocks of 16 tokens that a step of so many tokens leaves (Sec. 2.2): hidden states and the
    widest point of the MLP, logits twice in fp32, and 0.7 GB for what is not torch. vLLM 0.5 had
    other terms than the releases that `kv_memory` knows."""
    width = 3 * llm.hidden + 3 * llm.intermediate / tp
    beside = tokens * width * llm.dtype_bytes + 2 * requests * llm.vocab * 4 + 0.7e9
    left = gpu.memory_bytes * 0.9 - rank_weight_bytes(llm, tp) - beside
    return int(left // (16 * llm.rank_kv_bytes_per_token(tp)))


def testbed(model: str, tp: int, longest: int) -> Profile:
    """A profile of `tp` L20s for inputs of up to `longest` tokens. From two on, they share links
    to the host."""
    gpu = find_gpu("l20")
    budget = max(longest, 2048)
    profile = derive_profile(
        model,
        gpu,
        tp,
        max_model_len=longest,
        max_num_batched_tokens=budget,
        num_gpu_blocks=_blocks_left(find_model(model), gpu, tp, budget),
        num_gpu_blocks_source="derived",
    )
    return profile.scaled(pcie=1.0 if tp == 1 else 0.5)


def serve(
    model: str,
    tp: int,
    lengths: str,
    longest: int,
    rate: float,
    requests: int,
    policy: str,
    seed: int,
    contention: bool = True,
) -> dict[str, Any]:
    """One run of one policy over `requests` Poisson arrivals at `rate` a second.

    lengths  name of a shape of `traces.generators.synth`, cut to `LONGEST_SHAREGPT`, or
             fixed:PROMPT,OUTPUT
    longest  tokens of the longest input that the engine is configured for
    contention  all-reduces go over the link of the KV transfers
    """
    profile = testbed(model, tp, longest)
    settings = {"trace": lengths, "rate": rate, "requests": requests, "seed": seed}
    settings |= {"slo": f"ttft={TTFT_S:g},tpot={TPOT_S:g}", "pcie_contention": contention}
    if not lengths.startswith("fixed:"):
        settings["cap_length"] = LONGEST_SHAREGPT
    host = int(HOST_BYTES_PER_GPU * tp // (profile.kv_bytes_per_token * profile.block_tokens))
    settings |= {"policy": (policy,), "host_blocks": host, **PAPERS_ENGINE}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "testbed.json"
        save_profile(profile, file)
        inputs = resolve(SimulationConfig(profile=str(file), **settings))
    simulation = Simulation(inputs, inputs.policies[0])
    watch = Watch(simulation)
    run = run_simulation(simulation)
    rows = run.rows.requests
    found = {name: column(run, text) for name, text in COLUMNS.items()}
    queued = (rows.first_scheduled_s - rows.arrival_s).mean()
    return {
        **found,
        "queueing_s": queued,
        "prefill_s": found["ttft_s"] - queued,
        **{f"{what}violations": 1.0 - column(run, of) for what, of in KEPT.items()},
        "kv_blocks": profile.num_gpu_blocks,
        **watch.found(),
    }


class Watch:
    """Look at the plans of a run that has not begun. Count parked requests, which run and do not
    decode because layers are on the host. Of the negative allowances of eq. 1, count those of
    requests with layers on the host."""

    def __init__(self, simulation: Simulation) -> None:
        policy = simulation.engines[0].core.policy
        self._parked: list[int] = []
        self._late = self._late_on_host = 0
        self._plan, self._allowances = policy.plan, getattr(policy, "allowances", None)
        self._ledger = simulation.engines[0].core.ledger
        if isinstance(self._ledger, LayerwiseLedger) and self._allowances is not None:
            self._queues = policy.queues
            policy.plan, policy.allowances = self.plan, self.allowances

    def plan(self, view, ledger):
        made = self._plan(view, ledger)
        rows = self._queues.rows
        parked = rows[ledger.host_layers(rows) > 0]
        self._parked.append(len(parked) - int(np.isin(parked, made.rows).sum()))
        return made

    def allowances(self, now, requests):
        rows, allowed = self._allowances(now, requests)
        late = rows[allowed < 0.0]
        self._late += len(late)
        self._late_on_host += int(np.count_nonzero(self._ledger.host_layers(late)))
        return rows, allowed

    def found(self) -> dict[str, float]:
        """parked_most; parked, mean over plans; late, negative allowances; late_on_host, those of
        requests with layers on the host."""
        return {
            "parked_most": max(self._parked, default=0),
            "parked": float(np.mean(self._parked)) if self._parked else 0.0,
            "late": self._late,
            "late_on_host": self._late_on_host,
        }
