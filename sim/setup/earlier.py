"""Requests like those of a run, but not in the run: predictors are trained on these beforehand."""

from dataclasses import dataclass

import numpy as np

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import READ, Sources
from twinserve.traces.apps.generate import is_apps
from twinserve.traces.generators.in_a_line import is_in_a_line
from twinserve.traces.generators.longdoc import is_longdoc
from twinserve.traces.generators.synth import is_synthetic
from twinserve.traces.load import TIDAL, load_trace
from twinserve.traces.transform import cap_length
from twinserve.traces.workload import Workload

MOST, LEAST = 1000, 64  # requests
_OTHER_SEED = 0xEA411E4  # spawn key: of draws that no run makes


@dataclass(frozen=True)
class Lengths:
    """prompt_tokens, output_tokens  int64[n], of requests that ended before a run"""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray


def _drawn_again(trace: str) -> bool:
    """Return whether another seed alone gives other requests."""
    return is_apps(trace) or is_longdoc(trace) or is_in_a_line(trace) or trace == TIDAL


def earlier_lengths(
    config: SimulationConfig, workload: Workload, longest: int, sources: Sources = READ
) -> Lengths | None:
    """Return up to `MOST` requests of the run's trace that are not in `workload`, or None if fewer
    than `LEAST` are left.

    A generated trace is drawn again with another seed. From a recorded trace, requests are drawn
    that the run leaves out.

    longest  most tokens of a request, as in the run
    """
    seeds = np.random.SeedSequence(config.seed, spawn_key=(_OTHER_SEED,))
    rng, other = np.random.default_rng(seeds), int(seeds.generate_state(1)[0])
    served: frozenset[str] = frozenset()
    if is_synthetic(config.trace):
        earlier = load_trace(config.trace, seed=other, rate=1.0, count=MOST)
    elif _drawn_again(config.trace):
        earlier = sources.trace(config.trace, seed=other, offline=config.offline)
    else:
        served = frozenset(workload.ids)
        earlier = sources.recorded(config)
    earlier = cap_length(earlier, min(longest, config.cap_length or longest))
    rows = np.array([i for i, name in enumerate(earlier.ids) if name not in served], np.int64)
    if len(rows) < LEAST:
        return None
    rows = rng.permutation(rows)[:MOST]
    return Lengths(earlier.prompt_tokens[rows], earlier.output_tokens[rows])
