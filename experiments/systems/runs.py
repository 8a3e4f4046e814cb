"""Single runs of the comparison of the systems: settings in, plain rows out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinserve.sim.plan.capacity import WhileOnline
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import PAPERS_ENGINE, PRESETS, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_simulation, simulate
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge, set_priority

PROFILE = "llama-3.1-8b@h100"
FOUR_GPUS = "llama-3.1-70b@h100:tp4"
TIGHT = "ttft=0.4,tpot=0.05,k=5"  # TTFT as by default, TPOT 50 ms in place of 200
APPLICATIONS_PROFILE = "llama-7b@a100-pcie-40g"
# prompts of 9,900 tokens on average, 88 % of them text of a document, 8 on each
DOCUMENTS = "next-qa"
QUESTIONS = 4_000  # so many that some are left when the online requests have ended
BLOCK_TOKENS = 512  # that a prefix block covers, as in Mooncake's trace


def _row(run: RunResult) -> dict:
    """What is compared. Seconds, tokens a second, shares; nan where a class had no requests."""
    rt, be = (run.summary["classes"].get(name, {}) for name in ("rt", "be"))
    kv, nan = run.summary["kv"], float("nan")
    preempted = kv["preemptions"]
    return {
        "slo_attainment": rt.get("slo_attainment", nan),
        "ttft_attainment": rt.get("ttft_attainment", nan),
        "tpot_attainment": rt.get("tpot_attainment", nan),
        "ttft_s": rt.get("mean_ttft_ms", nan) / 1e3,
        "ttft_p99_s": rt.get("p99_ttft_ms", nan) / 1e3,
        "tpot_s": rt.get("mean_tpot_ms", nan) / 1e3,
        "be_tokens_per_s": be.get("total_token_throughput", nan),
        "preempted": preempted["recompute"] + preempted["swap"],
        "prefix_hit_rate": kv["prefix_hit_rate"],
        "kv_peak": kv["peak_use"],
        "window_s": float(
            np.ptp(run.rows.requests.arrival_s[run.rows.requests.service_class == "rt"])
        ),
    }


def _window(
    trace: str,
    policy: str,
    load: float,
    begin_s: float,
    seconds: float,
    seed: int,
    caching: bool | None,
    profile: str = PROFILE,
    slo: str | None = None,
) -> dict:
    """Settings of a window of a recorded trace at `load` times the estimated capacity."""
    setting = {
        "profile": profile,
        "slo": slo,
        "trace": trace,
        "load": load,
        "window": (begin_s, begin_s + seconds),
        "seed": seed,
        **PAPERS_ENGINE,
    }
    return setting | {"policy": (policy,), "prefix_caching": caching}


def recorded(
    trace: str,
    policy: str,
    load: float,
    begin_s: float,
    seconds: float,
    seed: int,
    pool: int,
    caching: bool | None = None,
    profile: str = PROFILE,
    slo: str | None = None,
) -> dict:
    """A window of a recorded trace, beside it a closed loop of `pool` best-effort requests, each
    with a text of its own.

    caching  of prefixes; None: as the policy's own system does
    slo      objectives as in `SimulationConfig`, which policies read too; None: TPOT 200 ms
    """
    settings = _window(trace, policy, load, begin_s, seconds, seed, caching, profile, slo)
    return _row(simulate(SimulationConfig(pool=pool, **settings))[policy])


def beside_documents(
    trace: str,
    policy: str,
    load: float,
    begin_s: float,
    seconds: float,
    seed: int,
    questions: int = QUESTIONS,
    caching: bool | None = None,
) -> dict:
    """A window of a recorded trace, beside it offline questions on shared documents, all submitted
    at its beginning and less urgent by `priority`. The run ends with the online requests;
    best-effort tokens, hits included, are counted while these arrive; `left`: questions that had
    not ended."""
    inputs = resolve(
        SimulationConfig(**_window(trace, policy, load, begin_s, seconds, seed, caching))
    )
    asked = longdoc(DOCUMENTS, requests=questions, block_tokens=BLOCK_TOKENS, seed=seed)
    inputs = replace(inputs, workload=merge(inputs.workload, set_priority(asked, 1)))
    run = run_simulation(WhileOnline(inputs, inputs.policies[0], slice_s=1.0))
    offline = run.summary["classes"].get("be", {})
    requests = run.rows.requests
    left = questions - int(
        (requests.last_token_s[requests.service_class == "be"].notna() & requests.finished).sum()
    )
    return _row(run) | {
        "be_tokens_per_s": offline.get("window_total_token_throughput", 0.0),
        "left": left,
    }


def generated(workload: str, policy: str, seed: int, quick: bool) -> dict:
    """`hybrid`: the setting of the BROS paper, shortened. `applications`: Justitia's, JCT in
    seconds."""
    if workload == "applications":
        config = SimulationConfig(
            policy=(policy,),
            trace="apps:2x",
            seed=seed,
            profile=APPLICATIONS_PROFILE,
            slo="none",
            **PAPERS_ENGINE,
        )
        found = simulate(config)[policy].summary["applications"]
        return {"jct_s": found["mean_jct_s"], "jct_p90_s": found["p90_jct_s"]}
    shortened = PRESETS["bros-hybrid"] | {
        "duration": 10.0 if quick else 60.0,
        "pool": 16 if quick else 128,
    }
    found = _row(simulate(SimulationConfig(policy=(policy,), seed=seed, **shortened))[policy])
    return {name: value for name, value in found.items() if name != "window_s"}
