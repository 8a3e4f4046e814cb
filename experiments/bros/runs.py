"""Single runs of the BROS study: settings in, one row of metrics out.

Lengths are those of the paper's Table II (`traces.generators.synth`), arrivals are Poisson,
best-effort requests come in closed-loop batches, objectives are 0.4 s and 0.2 s (Sec. VII-A).
Step times are those of derived profiles, nothing is measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.run import simulate

SLO = "ttft=0.4,tpot=0.2"
QWEN = ("qwen2.5-14b@a100-40g:tp2", "qwen2.5-32b@a100-40g:tp4")  # of the IEEE version
OPT = ("opt-13b@a100-40g:tp2", "opt-30b@a100-40g:tp4")  # of the ACM version, with the next one
LLAMA = "llama-3-70b@a100-80g:tp8"
MODELS = (*QWEN, *OPT, LLAMA)
RATES = (5.0, 10.0, 15.0)
POOL = 128

# the first: vLLM of the paper's time
POLICIES = ("vllm-v0", "round-robin", "bros")
# Fig. 11. The paper's clients ask for as many tokens as they get; one number stands for all here:
# the policy's default, and one near the mean answer.
TGI = ("tgi", "tgi:max_new_tokens=256")
PURE = "bros:best_effort=false,kv=paged"
NO_BI_CACHE = "bros:kv=paged,swap=false"
PAGED_SWAP = "bros:kv=paged"


def serve(
    profile: str,
    lengths: str,
    rate: float,
    policy: str,
    seed: int,
    duration: float | None = None,
    requests: int | None = None,
    pool: int = 0,
    slow: float = 1.0,
    memory: float = 1.0,
    estimator: str = "paper",
) -> dict[str, Any]:
    """One run of one policy.

    lengths   name of a shape of `traces.generators.synth`
    rate      real-time requests a second; as many as arrive in `duration` seconds, or the first
              `requests`
    pool      best-effort requests in a batch; 0: none
    slow      factor on every step time
    memory    factor on the number of KV blocks
    estimator what the policy believes about step times: the paper's form, or the simulator's own
    """
    settings = dict(
        trace=lengths,
        rate=rate,
        seed=seed,
        duration=duration,
        requests=requests,
        pool=pool,
        estimator=estimator,
    )
    return metrics(_run(profile, policy, settings, slow, memory))


def overhead(
    profile: str, lengths: str, rate: float, policy: str, seed: int, duration: float, pool: int
) -> dict[str, Any]:
    """Wall-clock seconds of our own planning beside simulated step times; every step is planned by
    itself. Not reproducible."""
    found = _run(
        profile,
        policy,
        dict(trace=lengths, rate=rate, seed=seed, duration=duration, pool=pool, exact=True),
    )
    step = found.summary["scheduler"]["mean_step_ms"]
    decision = found.timing["decision_mean_s"] * 1e3
    return {"step_ms": step, "decision_ms": decision, "share": decision / (decision + step)}


def _run(
    profile: str, policy: str, settings: dict, slow: float = 1.0, memory: float = 1.0
) -> RunResult:
    if profile in OPT:
        settings = {**settings, "cap_length": 2048}  # these models' context
    with tempfile.TemporaryDirectory() as folder:
        name = profile
        if (slow, memory) != (1.0, 1.0):
            file = Path(folder) / "scaled.json"
            save_profile(load_profile(profile).scaled(step=slow, kv=memory), file)
            name = str(file)
        return simulate(
            SimulationConfig(policy=(policy,), profile=name, slo=SLO, **PAPERS_ENGINE, **settings)
        )[policy]


def metrics(run: RunResult) -> dict[str, Any]:
    """What the paper's figures show of a run, and what explains it. Attainments and proportions are
    shares; `be_rps` counts best-effort requests that ended while real-time ones arrived.

    saturated, unclear  1 where the queue of real-time requests grows for as long as they arrive,
                        or where that is unclear (`sim.results.saturation`), else 0
    growth_rps          by how many requests a second that queue grows; nan where it is unclear
    """
    summary = run.summary
    rt, be = summary["classes"]["rt"], summary["classes"].get("be")
    growth = rt["saturation"]["growth_per_s"]
    return {
        "normalized_ms": rt["normalized_latency_ms"],
        "queueing": rt["queueing_proportion"],
        "ttft_attainment": rt["ttft_attainment"],
        "tpot_attainment": rt["tpot_attainment"],
        "every_gap_attainment": rt["every_gap_attainment"],
        "token_attainment": rt["tpot_token_attainment"],
        "slo_attainment": rt["slo_attainment"],
        "ttft_s": rt["mean_ttft_ms"] / 1e3,
        "ttft_p99_s": rt["p99_ttft_ms"] / 1e3,
        "tpot_s": rt["mean_tpot_ms"] / 1e3,
        "rt_rps": rt["request_throughput"],
        "be_rps": be["window_request_throughput"] if be else 0.0,
        "be_ttft_s": be["mean_ttft_ms"] / 1e3 if be else float("nan"),
        "saturated": float(rt["saturation"]["verdict"] == "saturated"),
        "unclear": float(rt["saturation"]["verdict"] == "unclear"),
        "growth_rps": float("nan") if growth is None else growth,
        "recomputes": summary["kv"]["preemptions"]["recompute"],
        "swaps": summary["kv"]["preemptions"]["swap"],
        "step_ms": summary["scheduler"]["mean_step_ms"],
        "batch": summary["scheduler"]["mean_batch"],
        "kv_peak": summary["kv"]["peak_use"],
    }
