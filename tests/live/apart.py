"""Small workloads for a prefill and a decode engine whose memory is short, drawn from a seed, and
the runs that live engines follow."""

import numpy as np

from tests.sim.apart import VLLM, hand_over
from twinserve.sim.fleet.replica import Role
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.twin.apart import Recorded
from twinserve.traces.workload import PrefixBlocks, Workload

BLOCK = 32
SLOW = (2e9, 1e-3)  # bytes/s, seconds: a prompt takes several steps


def workload(seed: int, requests: int) -> Workload:
    """Bursts; half of the prompts begin alike."""
    rng = np.random.default_rng([seed, 25])
    prompt, output = rng.integers(20, 200, requests), rng.integers(2, 60, requests)
    arrival = np.sort(rng.choice(rng.uniform(0, requests / 16, requests // 3), requests))
    counts = prompt // BLOCK
    texts = [
        (1000 * (i + 1) if rng.random() < 0.5 else 0) + np.arange(n)
        for i, n in enumerate(counts.tolist())
    ]
    ids = np.unique(np.concatenate(texts), return_inverse=True)[1].astype(np.int64)
    return Workload.build(
        arrival,
        prompt,
        output,
        ids=[f"s{seed}-{i}" for i in range(requests)],
        prefix=PrefixBlocks(ids, np.concatenate([[0], np.cumsum(counts)]), BLOCK),
    )


def recorded(
    seed: int = 0,
    requests: int = 48,
    lease_s: float = 30.0,
    recompute: bool = True,
    network: tuple[float, float] = SLOW,
    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE),
    client_timeout: float | None = None,
    **settings,
) -> Recorded:
    """Of replicas with these roles; settings: of the run."""
    own = {
        "num_blocks": 24, "block_tokens": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 128,
        "prefix_caching": True, "async_scheduling": False, "client_timeout": client_timeout,
    }  # fmt: skip
    config = SimulationConfig(policy=("vllm",), **own | settings)
    hardware = resolve_hardware(config)
    transfer = hand_over(lease_s=lease_s, recompute=recompute)
    inputs = Inputs(config, workload(seed, requests), hardware, (VLLM,), (), hand_over=transfer)
    kinds = {role: Description(hardware, VLLM, role, network=network) for role in roles}
    return Recorded(inputs, made_of=[kinds[role] for role in roles])
