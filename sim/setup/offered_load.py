"""A workload's demand as a share of the replicas' capacity, estimated from their step times."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from twinserve.profiles.composition import StepComposition, prefill_seconds
from twinserve.sim.setup.hardware import Hardware
from twinserve.traces.workload import Workload

_GRID_TOKENS = 256  # isolated prefill times are computed on this grid and interpolated

Machines = Sequence[tuple[Hardware, int]]  # of a fleet: hardware, and how many replicas have it


def offered_load_of(workload: Workload, machines: Machines) -> float | None:
    """Return `offered_load` for replicas that may differ."""
    if len(machines) == 1:
        return offered_load(workload, *machines[0])
    span = workload.span_s
    if not len(workload):
        return 0.0 if span > 0 else None
    served = sum(n / service_seconds(workload, hardware) for hardware, n in machines)
    return 1 / (served * span) if span > 0 else None


def offered_load(workload: Workload, hardware: Hardware, replicas: int) -> float | None:
    """Return the share of the estimated capacity of so many replicas that the listed requests need
    while they arrive (without the pool); None if all arrive at once."""
    span = workload.span_s
    return service_seconds(workload, hardware) / (replicas * span) if span > 0 else None


def service_seconds(workload: Workload, hardware: Hardware) -> float:
    """Return the seconds that one saturated replica needs for the workload, by the step-time model.

    Prompts are computed in chunks of the token budget, with nothing cached. An output token costs
    its share of a decode step with the most requests that memory and seats allow at the mean
    context. Pipeline stages are full: chunks follow each other, and decodes form one batch a stage.
    """
    if not len(workload):
        return 0.0
    prefill = prompt_seconds(workload.prompt_tokens, hardware, hardware.model.interval_seconds)
    context = workload.prompt_tokens + workload.output_tokens / 2
    mean_context = float(np.average(context, weights=workload.output_tokens))
    batch = max(1, min(hardware.limits.max_num_seqs, int(hardware.kv_tokens / mean_context)))
    model = hardware.model
    batches = min(model.under_way, batch)
    batch //= batches
    work = StepComposition(batch, int(batch * mean_context), int(mean_context))
    # a request that decodes in one batch waits until it has left the last stage
    step = max(model.interval_seconds(work), model.step_seconds(work) / batches)
    return float(prefill.sum() + workload.output_tokens.sum() * step / batch)


def request_seconds(workload: Workload, hardware: Hardware) -> np.ndarray:
    """Return float64[n]: each request's share of `service_seconds`."""
    if not len(workload):
        return np.zeros(0)
    prefill = prompt_seconds(workload.prompt_tokens, hardware, hardware.model.interval_seconds)
    outputs = service_seconds(workload, hardware) - prefill.sum()
    return prefill + workload.output_tokens * (outputs / workload.output_tokens.sum())


def prompt_seconds(
    prompts: np.ndarray, hardware: Hardware, of_chunk: Callable[[StepComposition], float]
) -> np.ndarray:
    """Return float64[n]: seconds of prompts' chunks, interpolated between multiples of 256
    tokens."""
    longest = int(prompts.max())
    grid = np.arange(0, _GRID_TOKENS * (math.ceil(longest / _GRID_TOKENS) + 1), _GRID_TOKENS)
    grid[0] = 1
    used = {*(prompts // _GRID_TOKENS).tolist()}
    grid = grid[sorted(i for i in used | {i + 1 for i in used} if i < len(grid))]
    budget = hardware.limits.max_num_batched_tokens
    seconds, whole, whole_s = [], 0, 0.0
    for tokens in grid.tolist():
        begin, whole = whole, tokens - tokens % budget  # whole chunks are those of longer prompts
        whole_s = prefill_seconds(of_chunk, whole, budget, begin, whole_s)
        seconds.append(prefill_seconds(of_chunk, tokens, budget, whole, whole_s))
    return np.interp(prompts, grid, seconds)
