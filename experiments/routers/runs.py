"""Single runs of the comparison of routers: settings in, plain rows out. Engines schedule
asynchronously, as vLLM does by default."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve, with_objectives
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.run import Simulation, run_simulation, simulate
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.shared import with_shared_text
from twinserve.traces.workload import REAL_TIME, Workload

PROFILE = "llama-3.1-8b@h100"
REPLICAS = 8
ENGINE = {"async_scheduling": True, "profile": PROFILE}
DOCUMENTS = "next-qa"  # prompts of 9,900 tokens on average, 88 % of them text of a document
BLOCK_TOKENS = 16


def _row(run: RunResult) -> dict:
    """What is compared: seconds, shares; busiest: prompt tokens of the replica that got most of
    them, over the mean."""
    rt = run.summary["classes"]["rt"]
    rows = run.rows.requests
    sent = rows[rows.replica >= 0].groupby("replica").prompt_tokens.sum()
    most = float(sent.max() * len(run.summary["replicas"]) / sent.sum())
    return {
        "slo_attainment": rt["slo_attainment"],
        "ttft_s": rt["mean_ttft_ms"] / 1e3,
        "ttft_p99_s": rt["p99_ttft_ms"] / 1e3,
        "tpot_s": rt["mean_tpot_ms"] / 1e3,
        "prefix_hit_rate": run.summary["kv"]["prefix_hit_rate"],
        "busiest": most,
        "rejected": rt["rejected"] / rt["submitted"],
        "be_tokens_per_s": run.summary["classes"]
        .get("be", {})
        .get("window_total_token_throughput", float("nan")),
    }


def conversations(
    router: str, policy: str, load: float, begin_s: float, seconds: float, seed: int, pool: int = 0
) -> dict:
    """A window of Mooncake's conversations at `load` times the estimated capacity of the fleet,
    beside it a closed loop of `pool` best-effort requests. The estimate knows no prefix cache."""
    config = SimulationConfig(
        trace="mooncake",
        window=(begin_s, begin_s + seconds),
        load=load,
        pool=pool,
        policy=(policy,),
        prefix_caching=True,
        router=router,
        replicas=REPLICAS,
        seed=seed,
        **ENGINE,
    )
    return _row(simulate(config)[policy])


def questions(router: str, load: float, requests: int, seed: int, policy: str = "vllm") -> dict:
    """Questions on shared documents that arrive at random, at `load` times the estimated capacity
    without a prefix cache."""
    asked = longdoc(DOCUMENTS, requests=requests, block_tokens=BLOCK_TOKENS, seed=seed)
    return _serve(asked, router, policy, REPLICAS, seed, load=load)


def one_text(
    router: str, share: float, texts: int, concurrency: int | None, rate: float, seed: int
) -> dict:
    """400 prompts of 9,800 tokens that begin with one of `texts` texts, `share` of each, and
    answers of 430 tokens, on two replicas: the benchmark of sglang#21199, with other shares, other
    numbers of texts, and our hardware.

    concurrency  most requests that clients have under way; rate: a second, until then
    """
    count, tokens = 400, 9_800
    group = np.arange(count) % texts
    prompts = np.full(count, tokens)
    shared = np.full(count, round(share * tokens))
    workload = Workload.build(
        np.zeros(count),
        prompts,
        np.full(count, 430),
        prefix=with_shared_text(prompts, group, shared, BLOCK_TOKENS),
        concurrency=concurrency,
    )
    return _serve(workload, router, "vllm", 2, seed, rate=rate)


def _serve(
    workload: Workload,
    router: str,
    policy: str,
    replicas: int,
    seed: int,
    load: float | None = None,
    rate: float | None = None,
) -> dict:
    """These requests as real-time ones with Poisson arrivals, at a rate (requests a second) or a
    load."""
    config = SimulationConfig(
        trace="fixed:100,10",  # the settings need one; its requests are replaced
        rate=1.0,
        requests=1,
        policy=(policy,),
        prefix_caching=True,
        router=router,
        replicas=replicas,
        seed=seed,
        **ENGINE,
    )
    inputs = resolve(config)
    if rate is None:
        capacity = replicas * len(workload) / service_seconds(workload, inputs.hardware)
        rate = load * capacity
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x2F,)))
    workload = replace(
        workload,
        arrival_s=np.cumsum(rng.exponential(1 / rate, len(workload))),
        service_class=np.full(len(workload), REAL_TIME, np.int8),
    )
    workload = with_objectives(workload, inputs.hardware, parse_objectives(config.slo))
    inputs = replace(inputs, workload=workload)
    return _row(run_simulation(Simulation(inputs, inputs.policies[0])))
