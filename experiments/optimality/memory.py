"""Algorithm 1 beside the best batch where memory binds: iterations of runs in so few blocks that
those in the system need more than are empty.

Scored is the batch that the iteration came to, after blocks were found, and others dropped for
them; the best one keeps to (8), M_new of the batch within the blocks that are empty, which only
real-time requests may exceed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinserve.experiments.optimality.runs import OPTIONS, SIZES, Pair, config, gap_rows
from twinserve.policies.bros.exact import BrosExactPolicy
from twinserve.policies.bros.policy import BrosPolicy
from twinserve.policies.bros.problem import Instance, enumerate_batches, solution
from twinserve.policies.registry import PolicySpec
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy


class _Placed(BrosPolicy):
    """Algorithm 1. Of each iteration in which memory binds: the problem in each form of it, and
    what was placed."""

    name = "bros-placed"

    def setup(self):
        super().setup()
        self.exact = {
            name: BrosExactPolicy(self.limits, options, self.estimator)
            for name, options in OPTIONS.items()
        }
        self.found: dict[str, list[Pair]] = {name: [] for name in OPTIONS}
        self.planned = self.bound = 0  # iterations of so few requests; of these, memory binds

    def _plainly(self, *_):
        return False  # what is plain to see is what is chosen

    def _stands(self, *_):
        pass  # so that each step is an iteration

    def _place(self, step, choice, size):
        instances = self._instances(step, choice, size)
        super()._place(step, choice, size)
        for name, instance in instances.items():
            placed = np.isin(instance.batch.rows, step.plan.rows)
            best = enumerate_batches(instance, self.estimator)
            if best is not None and placed.any():
                pair = len(instance), solution(instance, self.estimator, placed), best
                self.found[name].append(pair)

    def _instances(self, step, choice, size) -> dict[str, Instance]:
        """Before anything is placed; empty where memory does not bind."""
        if not 2 <= len(choice.urgent.batch) + len(choice.candidates) <= SIZES[1]:
            return {}
        self.planned += 1
        found = {}
        for name, policy in self.exact.items():
            policy.take_average(self.average_iteration_s)
            found[name] = policy.instance(
                choice.urgent, choice.candidates, size, step.view.requests, step.ledger
            )
        if found["own"].new_blocks.sum() <= step.ledger.free_blocks:
            return {}
        self.bound += 1
        return found


def iterations_in_blocks(
    seed: int, seconds: float, rate: float, pool: int, slo: str, blocks: int, kv: str
) -> list[dict[str, Any]]:
    """Rows of `gap_rows` for the iterations of a run of `bros` in `blocks` blocks of ledger `kv`
    in which there are 2 to 10 requests and memory binds; `binding`: the share of these."""
    policies: list[_Placed] = []

    class Watched(_Placed):
        def setup(self):
            super().setup()
            policies.append(self)

    inputs = resolve(config(seed, seconds, rate, pool, slo, ("bros",), blocks))
    run_policy(inputs, PolicySpec("bros-placed", own=Watched, kv=kv))
    (ran,) = policies
    rows = [row for name, pairs in ran.found.items() if pairs for row in gap_rows(name, pairs)]
    return [row | {"binding": ran.bound / max(ran.planned, 1)} for row in rows]
