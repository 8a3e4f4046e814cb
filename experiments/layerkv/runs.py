"""Single runs of the LayerKV study: settings in, one row of metrics out.

The testbed of Sec. 5.1: L20 GPUs without NVLink, two of which share a PCIe link, and 2,048 GB of
host memory for eight of them. KV memory is what is left after a step of the longest configured
input (Sec. 2.2), so it shrinks as that grows. Step times are those of derived profiles, nothing is
measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from twinserve.profiles.profile import Profile, derive_profile, save_profile
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.run import simulate

TTFT_S, TPOT_S = 3.0, 0.2  # Sec. 5.2.4
OUTPUT = 512
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
HOST_BYTES_PER_GPU = 2048e9 / 8
LONGEST_SHAREGPT = 2300  # prompt and output together
MODELS = {"llama-2-7b": 1, "yi-34b-200k": 2, "llama-3.1-70b": 4}  # degree of tensor parallelism

VLLM = "vllm-v0"  # 0.5.5
SAVABLE = "layerkv:savable_only=true"
NO_SLO = "layerkv:slo_aware=false"


def testbed(
    model: str, tp: int, longest: int, memory: float = 1.0, link: float | None = None
) -> Profile:
    """A profile of `tp` L20s for inputs of up to `longest` tokens. memory: factor on the KV blocks;
    link: on the PCIe rate, by default what sharing a link leaves."""
    profile = derive_profile(
        model, "l20", tp, max_model_len=longest, max_num_batched_tokens=max(longest, 2048)
    )
    shared = (1.0 if tp == 1 else 0.5) if link is None else link
    return profile.scaled(kv=memory, pcie=shared)


def serve(
    model: str,
    tp: int,
    lengths: str,
    longest: int,
    rate: float,
    requests: int,
    policy: str,
    seed: int,
    memory: float = 1.0,
    link: float | None = None,
    tpot_s: float = TPOT_S,
    contention: bool = True,
) -> dict[str, Any]:
    """One run of one policy over `requests` Poisson arrivals at `rate` a second.

    lengths  name of a shape of `traces.generators.synth`, cut to `LONGEST_SHAREGPT`, or
             fixed:PROMPT,OUTPUT
    longest  tokens of the longest input that the engine is configured for
    contention  all-reduces go over the link of the KV transfers
    """
    profile = testbed(model, tp, longest, memory, link)
    settings = dict(
        trace=lengths,
        rate=rate,
        requests=requests,
        seed=seed,
        slo=f"ttft={TTFT_S:g},tpot={tpot_s:g}",
    )
    settings["pcie_contention"] = contention
    if not lengths.startswith("fixed:"):
        settings["cap_length"] = LONGEST_SHAREGPT
    host = int(HOST_BYTES_PER_GPU * tp // (profile.kv_bytes_per_token * profile.block_tokens))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "testbed.json"
        save_profile(profile, file)
        run = simulate(
            SimulationConfig(
                policy=(policy,), profile=str(file), host_blocks=host, **PAPERS_ENGINE, **settings
            )
        )[policy]
    rt, kv = run.summary["classes"]["rt"], run.summary["kv"]
    rows = run.rows.requests
    queued = (rows.first_scheduled_s - rows.arrival_s).mean()
    ttft = rt["mean_ttft_ms"] / 1e3
    return {
        "ttft_s": ttft,
        "ttft_p99_s": rt["p99_ttft_ms"] / 1e3,
        "tpot_s": rt["mean_tpot_ms"] / 1e3,
        "queueing_s": queued,
        "prefill_s": ttft - queued,
        "tokens_per_s": rt["output_throughput"],
        "violations": 1.0 - rt["slo_attainment"],
        "ttft_violations": 1.0 - rt["ttft_attainment"],
        "tpot_violations": 1.0 - rt["tpot_attainment"],
        "recomputes": kv["preemptions"]["recompute"],
        "kv_blocks": profile.num_gpu_blocks,
    }
