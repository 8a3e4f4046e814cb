"""Single runs of the comparison of routers: settings in, plain rows out. Engines schedule
asynchronously, as vLLM does by default."""

from dataclasses import replace

import numpy as np

from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.runs import column
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve, with_objectives
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.run import run_policy
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.stated import with_shared_text
from twinserve.traces.workload import REAL_TIME, Workload

REPLICAS = 8
COMMON = {"profile": "llama-3.1-8b@h100", "prefix_caching": True}  # asynchronous, as vLLM is
DATA = texts(__file__, "data.yaml")
COLUMNS = DATA.COLUMNS
DOCUMENTS = "next-qa"  # prompts of 9,900 tokens on average, 88 % of them text of a document
BLOCK_TOKENS = 16


def questions(router: str, load: float, requests: int, seed: int, policy: str = "vllm") -> dict:
    """Questions on shared documents that arrive at random, at `load` times the estimated capacity
    without a prefix cache."""
    asked = longdoc(DOCUMENTS, requests=requests, block_tokens=BLOCK_TOKENS, seed=seed)
    return _serve(asked, router, policy, REPLICAS, seed, load=load)


def one_text(
    router: str, share: float, texts: int, concurrency: int | None, rate: float, seed: int
) -> dict:
    """400 prompts of 9,800 tokens that begin with one of `texts` texts, `share` of each, and
    answers of 430 tokens, on two replicas. It is the benchmark of sglang#21199, with other shares,
    other numbers of texts, and our hardware.

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
        router=router,
        replicas=replicas,
        seed=seed,
        **COMMON,
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
    result = run_policy(inputs, inputs.policies[0])
    return {name: column(result, text) for name, text in COLUMNS.items()}
