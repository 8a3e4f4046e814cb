"""Single runs of the speculation experiment: an engine, drafts or none, a batch size, a seed -> a
row.

Clients keep as many requests under way as the batch has, each with another one when one ends, until
all are served (`Workload.concurrency`). Prompts and outputs are drawn for each seed and batch, the
same for every engine and kind of drafts; which drafts are right is drawn for each seed, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import Workload

ROUNDS = 4  # requests for each place in the batch
LEAST = 6  # requests of a run


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of outputs, uniform from the least to the most."""

    prompt: tuple[int, int]
    output: tuple[int, int]


# Of the longer ones the KV memory of these engines holds a few dozen.
LENGTHS = {"chat": Lengths((250, 750), (500, 1500)), "documents": Lengths((6000, 9000), (250, 750))}


def requests_of(lengths: Lengths, batch: int, seed: int) -> Workload:
    """All there at 0 s; `batch` of them are under way at once."""
    count = max(ROUNDS * batch, LEAST)
    rng = np.random.default_rng([seed, 27])
    drawn = [
        rng.integers(least, most + 1, count) for least, most in (lengths.prompt, lengths.output)
    ]
    return replace(Workload.build(np.zeros(count), *drawn), concurrency=batch)


def run_point(
    engine: str, drafts: str | None, lengths: str, batch: int, most: int, seed: int
) -> dict:
    """Throughput and steps of one run. drafts: as `--speculate` takes them. most: places that the
    engine has in its batch.

    tokens_per_s   output tokens over the whole run
    tpot_s         mean over requests
    step_s         mean of the steps that compute no prompt
    step_tokens    tokens that such a step gives each request in it
    preemptions    requests that lost their memory
    in_batch       mean requests in such a step
    """
    config = SimulationConfig(
        trace="poisson",
        requests=1,
        offline=True,
        profile=engine,
        step_times="roofline",
        policy=("vllm",),
        slo="none",
        prefix_caching=False,
        max_num_seqs=most,
        speculate=drafts,
        seed=seed,
    )
    inputs = resolve(config)
    inputs = replace(inputs, workload=requests_of(LENGTHS[lengths], batch, seed))
    result = run_simulation(Simulation(inputs, inputs.policies[0]))
    steps, summary = result.rows.steps, result.summary
    decodes = steps[(steps.prefill_requests == 0) & (steps.decode_requests > 0)]
    in_batch = int(decodes.decode_requests.sum())
    given = in_batch if drafts is None else int(decodes.emitted_tokens.sum())
    return {
        "tokens_per_s": summary["output_throughput"],
        "tpot_s": summary["mean_tpot_ms"] / 1000,
        "step_s": float((decodes.end_s - decodes.start_s).mean()),
        "step_tokens": given / in_batch,
        "in_batch": in_batch / len(decodes),
        "preemptions": int(steps.preempted_recompute.sum()),
    }
