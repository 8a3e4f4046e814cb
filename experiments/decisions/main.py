"""How long a decision takes: `twinserve study decisions`.

A decision is one `EngineCore.plan`: the policy learns what arrived, plans, and asks the KV ledger
as it does so. Every policy is measured in a steady state with a full batch and a queue of a given
length. Seconds are CPU seconds unless named wall. docs/benchmark.md says more.
"""

from __future__ import annotations

import gc

import numpy as np

from twinserve.experiments.benchmark.main import FEW, MOONCAKE, whole
from twinserve.experiments.benchmark.measure import CpuTimed, alone
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study, titled
from twinserve.experiments.study.tables import MEDIANS, Medians
from twinserve.policies.registry import policy_names
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation

BATCH = 128
# tokens, uniform; about one request ends a step, and the next one begins
PROMPT, OUTPUT = (128, 384), (1, 256)


class SteadyQueue:
    """An engine with a full batch and `queued` requests behind it; for each one that ends another
    one arrives.

    Half of the requests are real-time, with objectives of 0.4 s and 0.2 s. Every step is planned by
    itself.
    """

    def __init__(self, inputs: Inputs, queued: int, seed: int = 0) -> None:
        self.engine = Simulation(inputs, inputs.policies[0]).engines[0]
        self.engine.on_ended = self._replace
        self.decisions = self.engine.core.plan = CpuTimed(self.engine.core.plan)
        self.batches: list[int] = []
        self.waiting: list[int] = []
        self._rng = np.random.default_rng(seed)
        self._arrived = 0
        complete = self.engine.core.complete

        def watched(plan, outcome):
            self.batches.append(len(plan.rows))
            self.waiting.append(self.engine.core.waiting)
            return complete(plan, outcome)

        self.engine.core.complete = watched
        # The queue never ends: each step needs its event, or one call of `step` goes on for ever.
        self.engine.clock.reach = lambda time_s, priority: False
        for _ in range(BATCH + queued):
            self.arrive()

    def _replace(self, rows: list[int]) -> None:
        for _ in rows:
            self.arrive()

    def arrive(self) -> None:
        service_class = self._arrived % 2
        values = {} if service_class else {"slo_ttft_s": 0.4, "slo_tpot_s": 0.2}
        self.engine.submit(
            f"r{self._arrived}",
            int(self._rng.integers(*OUTPUT, endpoint=True)),
            prompt_tokens=int(self._rng.integers(*PROMPT, endpoint=True)),
            arrival_s=self.engine.clock.now,
            service_class=service_class,
            **values,
        )
        self._arrived += 1

    def decide(self, decisions: int) -> np.ndarray:
        """float64[decisions, 2]: CPU and wall seconds of the next ones."""
        cpu, wall = self.decisions.seconds, self.engine.decision_seconds
        first = len(wall)
        while len(wall) < first + decisions:
            self.engine.clock.step()
        return np.column_stack([cpu[first : first + decisions], wall[first : first + decisions]])


def settings(policy: str, **changes) -> SimulationConfig:
    base = {
        "policy": (policy,),
        "trace": "poisson",
        "requests": 1,
        "rate": 1.0,
        "max_num_seqs": BATCH,
        "exact": True,
        **PAPERS_ENGINE,
    }
    return SimulationConfig(**{**base, **changes})


def short_blocks() -> int:
    """KV blocks for about three quarters of a batch."""
    return int(0.75 * BATCH * (sum(PROMPT) / 2 + sum(OUTPUT) / 4) / 16)


@alone
def steady(
    policy: str,
    queued: int,
    seed: int,
    num_blocks: int | None = None,
    warm_up: int = 100,
    decisions: int = 400,
) -> dict[str, float]:
    """One policy and length of the queue. num_blocks: of KV memory; None: the profile's."""
    state = SteadyQueue(resolve(settings(policy, num_blocks=num_blocks)), queued, seed)
    gc.collect()
    state.decide(warm_up)
    steps = len(state.batches)
    seconds, wall = state.decide(decisions).T
    requests = state.engine.core.requests
    return {
        "ms": 1e3 * float(np.median(seconds)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "mean_ms": 1e3 * float(seconds.mean()),
        "wall_ms": 1e3 * float(np.median(wall)),
        "batch": float(np.mean(state.batches[steps:])),
        "waiting": float(np.mean(state.waiting[steps:])),
        "preemptions": int(requests.recomputes.sum() + requests.swaps.sum()),
    }


# -- the figures -----------------------------------------------------------------------------------
POLICIES = policy_names()
FEW_STEPS = {"warm_up": 5, "decisions": 10}
STEPS = {"warm_up": 100, "decisions": 400}
FIRST = {"policy": ("vllm", "echo", "justitia")}


figure = titled(texts(__file__).TITLES)


def _figure(name: str, grid: Grid, work) -> Figure:
    return figure(name, grid, work, Medians(tuple(grid.vary)))


STUDY = Study(
    "decisions",
    "",
    [
        _figure(
            "queued",
            Grid(
                {"policy": POLICIES, "queued": (10, 100, 1_000, 10_000)},
                STEPS,
                few={**FIRST, "queued": 2},
                quick=FEW_STEPS,
            ),
            steady,
        ),
        _figure(
            "short",
            Grid(
                {"policy": POLICIES},
                {**STEPS, "queued": 1_000, "num_blocks": short_blocks()},
                few=FIRST,
                quick={**FEW_STEPS, "queued": 5},
            ),
            steady,
        ),
        _figure(
            "whole",
            Grid({"policy": POLICIES}, {**MOONCAKE, "quiet": True}, few=FIRST, quick=FEW),
            whole,
        ),
    ],
    workers=1,
    intro=MEDIANS,
)
