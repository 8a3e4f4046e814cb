"""What Justitia and Echo are made for, within the limits of the tiny model: task graphs of several
stages, and questions on shared documents beside online requests."""

from dataclasses import replace

import numpy as np

from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestClass
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.traces.apps.classes import Sample
from twinserve.traces.apps.generate import applications
from twinserve.traces.generators.longdoc import DocumentShape, longdoc
from twinserve.traces.generators.synth import LengthShape
from twinserve.traces.transform import merge
from twinserve.traces.workload import Workload

BLOCK = 32
LONGEST = 180  # tokens of a request
# Of requests that come faster than the tiny model serves them.
CROWDED = {
    "async_scheduling": False, "host_time": "none", "trace": "poisson", "rate": 300.0,
    "requests": 24, "cap_length": LONGEST, "block_tokens": BLOCK, "max_num_seqs": 12,
    "max_num_batched_tokens": 192,
}  # fmt: skip

GRAPHS = ("KBQAV", "CC", "EV", "FV", "EV")  # two to five stages each
# Four documents of two or three blocks, and one to five questions on each.
QUESTIONS = DocumentShape(12, 4, LengthShape(110, 15, 90, 125), 0.8, LengthShape(20, 10, 6, 30))


def _small(sample: Sample) -> Sample:
    """Prompts a seventh, outputs a quarter as long, and at most three requests a stage."""
    stages = [
        [(max(8, prompt // 7), max(4, output // 4)) for prompt, output in stage[:3]]
        for stage in sample.stages
    ]
    return replace(sample, stages=tuple(map(tuple, stages)))


def graphs() -> Workload:
    """Five applications, a few steps after each other. The requests of the second one are
    best-effort."""
    workload = applications(0.01 * np.arange(len(GRAPHS)), 3, GRAPHS, _small)
    service_class = np.where(workload.group == 1, RequestClass.BEST_EFFORT, RequestClass.REAL_TIME)
    return _with_objectives(replace(workload, service_class=service_class.astype(np.int8)))


def documents() -> Workload:
    """Questions, offline, all there from the start, and online requests that come in between."""
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(10, 90, 8), rng.integers(20, 70, 8)
    online = Workload.build(
        np.sort(rng.uniform(0.005, 0.1, 8)), prompt, output, ids=[f"online-{i}" for i in range(8)]
    )
    return _with_objectives(merge(longdoc(QUESTIONS, block_tokens=BLOCK, seed=1), online))


def _with_objectives(workload: Workload) -> Workload:
    objective = np.where(workload.service_class == RequestClass.REAL_TIME, 0.02, np.nan)
    return replace(workload, slo_ttft_s=objective, slo_tpot_s=objective)


def in_turn_inputs(policy: str, every: int, **settings) -> Inputs:
    """Of CROWDED and `settings`; the last request of every `every` is best-effort."""
    inputs = resolve(SimulationConfig(**{**CROWDED, "policy": (policy,), **settings}))
    last = np.arange(len(inputs.workload)) % every == every - 1
    classes = np.where(last, RequestClass.BEST_EFFORT, RequestClass.REAL_TIME)
    service_class = classes.astype(inputs.workload.service_class.dtype)
    return replace(inputs, workload=replace(inputs.workload, service_class=service_class))


WORKLOADS = {"graphs": graphs, "documents": documents}


def inputs_of(name: str, policy: str) -> Inputs:
    """The workload of that name under `policy`: memory for three or four requests, a prefix cache
    for documents."""
    workload = WORKLOADS[name]()
    assert workload.longest <= LONGEST
    config = SimulationConfig(
        policy=(policy,),
        num_blocks=14,
        block_tokens=BLOCK,
        host_blocks=200,
        max_num_seqs=12,
        max_num_batched_tokens=192,
        prefix_caching=name == "documents",
        exact=True,
        async_scheduling=False,
        host_time="none",
    )
    return Inputs(config, workload, resolve_hardware(config), (parse_policy(policy),), ())
