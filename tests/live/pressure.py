"""Small workloads that fight for memory, drawn from a seed, and an engine that is as large as each
of them asks for: what is replayed step by step to see whether every plan can be carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.policies.registry import ledger_class, parse_policy, policy_class
from twinserve.sim.results.decisions import DecisionLog, parse_log
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import settings_for
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Workload

BLOCK = 32
LONGEST = 230  # tokens of a request


def workload(seed: int, requests: int) -> Workload:
    """Both classes, bursts, prompts that begin alike, and with some seeds sessions and a pool of
    offline requests."""
    rng = np.random.default_rng([seed, 1])
    prompt, output = rng.integers(3, 150, requests), rng.integers(2, 80, requests)
    real_time = rng.random(requests) < rng.choice([0.3, 0.7, 1.0], p=[0.4, 0.4, 0.2])
    bursts = np.sort(rng.uniform(0, rng.choice([0.02, 0.3]), max(2, requests // 5)))
    arrival = np.sort(rng.choice(bursts, requests))
    group, stage = np.full(requests, -1), np.zeros(requests, np.int64)
    if seed % 3 == 1:  # each of the last three follows one of those before them
        group[-6:], stage[-3:] = np.tile([0, 1, 2], 2), 1
    counts = -(-prompt // BLOCK)
    texts = [10 * rng.integers(3) + np.arange(n) for n in counts.tolist()]
    ids = np.unique(np.concatenate(texts), return_inverse=True)[1].astype(np.int64)
    return Workload.build(
        np.where(stage > 0, np.nan, arrival),
        prompt,
        output,
        ids=[f"s{seed}-{i}" for i in range(requests)],
        service_class=np.where(real_time, 0, 1).astype(np.int8),
        priority=rng.integers(0, 3, requests),
        slo_ttft_s=np.where(real_time, rng.choice([0.01, 0.1, 1.0], requests), np.nan),
        slo_tpot_s=np.where(real_time, rng.choice([0.008, 0.02, 0.2], requests), np.nan),
        group=group,
        stage=stage,
        delay_s=np.where(stage > 0, 0.01, 0.0),
        group_names=["session-0", "session-1", "session-2"],
        prefix=PrefixBlocks(ids, np.concatenate([[0], np.cumsum(counts)]), BLOCK),
        pool=BestEffortPool(2, (8, 120), (4, 60), seed, until_s=0.2) if seed % 3 == 2 else None,
    )


def pressed(seed: int, policy: str, requests: int = 16, asynchronous: bool = False) -> Inputs:
    """Memory for a few of the requests; chunks, seats and host memory drawn as well."""
    rng, spec = np.random.default_rng([seed, 2]), parse_policy(policy)
    ledger = ledger_class(spec.kv or policy_class(spec.name).default_kv)
    config = SimulationConfig(
        policy=(policy,),
        num_blocks=int(rng.integers(9, 24)),
        block_tokens=BLOCK,
        host_blocks=int(rng.choice([4, 12, 60])),
        max_num_seqs=int(rng.integers(4, 13)),
        max_num_batched_tokens=int(rng.choice([32, 64, 192, 256])),
        prefix_caching=ledger.caches_prefixes and seed % 2 == 1,
        async_scheduling=asynchronous,
    )
    load = workload(seed, requests)
    return Inputs(config, load, resolve_hardware(config), (spec,), ())


def logged(inputs: Inputs) -> DecisionLog:
    return parse_log(run_policy(inputs, inputs.policies[0], decisions=True).decisions)


def settings_of(log: DecisionLog) -> LiveSettings:
    """As `twinserve replay` builds the engine for this log."""
    blank = LiveSettings(None, None, 0, 0, 0, 0)
    return settings_for(log.run, log.longest, log.step_tokens, blank, log.blocks)


@dataclass
class Pressure:
    """How often memory was taken away in a log, and prompts cut into chunks."""

    swapped: int
    dropped: int
    chunks: int

    @classmethod
    def of(cls, log: DecisionLog) -> Pressure:
        plans = [plan for step in log.steps for plan in (*step.before, step)]
        kinds = [kind.value for plan in plans for _, kind in plan.preempted]
        grants = [n for step in log.steps for n in step.grants.values() if n > 1]
        return cls(kinds.count("swap"), kinds.count("recompute"), len(grants) - len(log.requests))


@contextlib.contextmanager
def as_large_as(engine: VllmEngine, settings: LiveSettings) -> Iterator[None]:
    """Of `engine`'s blocks and room on the host only as many as `settings` asks for are to be had,
    and nothing is left of what ran on it before."""
    for name in list(engine.scheduler.requests):  # of a test that failed
        engine.abort(name)
    engine.forget_prefixes()
    pool, host = engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.connector.host
    engine.scheduler.connector.build_connector_meta(None)  # frees what was given up last
    rows = host.host_rows.take((engine.settings.swap_blocks - settings.swap_blocks) * BLOCK)
    blocks = pool.get_new_blocks(engine.num_blocks - settings.num_blocks)
    engine.scheduler.keeps_texts = settings.keeps_texts
    try:
        yield
    finally:
        pool.free_blocks(blocks)
        host.host_rows.give(rows)
