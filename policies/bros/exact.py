"""A bound, not a policy to serve with: BROS with each iteration's problem (1)-(8) (Wan et al., IEEE
version, Sec. IV-A) solved exactly in place of Algorithm 1.

All else is `bros`: queues, deadlines, memory, batch size. It shows what the greedy algorithm loses
in an iteration, and that the best iteration is not the best run. The problem does not consider
later iterations (docs/optimality.md).

The work doubles with each request, so an iteration with more than `max_requests` in the system is
left to Algorithm 1, and `counters` says how often that was.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from twinserve.policies.base import SystemView, Traits
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.bros.parts import Choice, PlanInProgress, Urgent, among, least
from twinserve.policies.bros.policy import BrosPolicy
from twinserve.policies.bros.problem import Instance, Solution, enumerate_batches, stays_best
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch, LinearEstimator
from twinserve.policies.parts.runs import LONGEST_RUN
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import RequestTable

_ENUMERATED = 12  # requests: to try all 4,096 batches takes less than any program
# deadlines as far from each other keep their order, whatever time they are seen from
_APART_S = 1e-6


class BrosExactOptions(BrosOptions):
    """The options of `bros`, and these. `bros` decides if there are more requests than
    `max_requests`:

    max_requests  requests in the system, of both classes, up to which an iteration is solved
    solver        milp, enumerate (every batch is tried), or auto: enumerate up to 12 requests
    following     F_i of (6), seconds that a request left out needs after this iteration: own, the
                  larger of T_avg and what it takes alone, as `bros` has it; average: T_avg, as
                  printed
    rt_first      most real-time requests before (1), as Algorithm 1 has it
    objective     throughput: (1); requests: most best-effort requests, then (1)
    """

    max_requests: int = Field(12, ge=1, le=18)
    solver: Literal["auto", "milp", "enumerate"] = "auto"
    following: Literal["own", "average"] = "own"
    rt_first: bool = False
    objective: Literal["throughput", "requests"] = "throughput"

    @field_validator("order")
    @classmethod
    def _solved_as_printed(cls, value: str) -> str:
        if value != "residual":
            raise ValueError("the problem is solved as printed; drop it, or use policy bros")
        return value


class BrosExactPolicy(BrosPolicy):
    name = "bros-exact"
    Options = BrosExactOptions
    options: BrosExactOptions
    counters: dict[str, int]
    traits = Traits(
        no_drafts=(
            "solves an iteration as the paper's problem, in which each request computes one "
            "token; bros plans with drafts"
        )
    )

    def setup(self) -> None:
        super().setup()
        if self.options.solver == "milp" and not isinstance(self.estimator, LinearEstimator | None):
            raise PolicyError(
                "policy 'bros-exact': solver=milp needs step times of the paper's form; drop "
                "--estimator perfect, or choose solver=enumerate"
            )
        # Steps: solved and placed as solved; too many requests; memory did not allow the solution.
        self.counters = {"solved_steps": 0, "fallback_steps": 0, "memory_steps": 0}
        self._solves = False  # this iteration
        self._solved: Instance | None = None  # in this iteration
        self._kind = "solved_steps"
        self._kinds: list[str] = []  # of the plans whose outcome has not come

    def on_outcome(self, outcome: StepOutcome) -> None:
        super().on_outcome(outcome)
        if self._kinds:
            self.counters[self._kinds.pop(0)] += len(outcome.ends_s)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        real_time = len(self.queues.rt_waiting) + len(self.queues.rt_pending)
        everyone = real_time + len(self.queues.be_waiting) + len(self.queues.be_pending)
        self._solves = everyone <= self.options.max_requests
        self._kind = "solved_steps" if self._solves else "fallback_steps"
        plan = super().plan(view, ledger)
        if plan:
            self._kinds.append(self._kind)
        return plan

    # -- what differs from Algorithm 1 -------------------------------------------------------------
    def _reach(self, size: int) -> int:
        return max(size, self.options.max_requests) if self._solves else size

    def _plainly(
        self, step: PlanInProgress, everyone: Batch, n: int, residual: np.ndarray, size: int
    ) -> bool:
        """That all fit says nothing here: it may be better to leave some out."""
        return not self._solves and super()._plainly(step, everyone, n, residual, size)

    def _stands(self, step: PlanInProgress, batch: Batch, real_time: int) -> None:
        """Each iteration is solved anew unless the solution is plain. There are only real-time
        requests, all rows with memory decode and keep their objectives together, and no waiting row
        could change that."""
        if not self._solves or not len(self.queues.be_waiting) + len(self.queues.be_pending):
            super()._stands(step, batch, real_time)
            # a solution goes by free memory, too
            step.plan.outlasts_ends = type(self) is BrosExactPolicy and not self._solves

    def _keeps_out(
        self, step: PlanInProgress, running: Batch, residual: np.ndarray, bound: float
    ) -> bool:
        """Return whether, after a solved iteration, no other batch will be as good as that of all
        rows with memory, and until when. Those that wait either lose their deadlines anyhow, or can
        still keep them later."""
        if not self._solves:
            return super()._keeps_out(step, running, residual, bound)
        solved, self._solved = self._solved, None
        if (
            solved is None
            or len(solved) > _ENUMERATED
            or self.options.solver == "milp"
            or not isinstance(self.estimator, LinearEstimator)
        ):
            return False
        rows, residual = running.rows, np.fmin(residual, np.inf)
        if (rows[1:] < rows[:-1]).any() or (residual[1:] < residual[:-1]).any():
            return False  # the next iteration has another order
        outside = ~among(solved.batch.rows, rows)
        waiting, left = solved.batch[outside], solved.residual[outside]
        lasts = self._returns_early_alike(step, running, residual, waiting, left)
        if not lasts > _APART_S:
            return False
        everyone, n = waiting + running, len(waiting)
        alone = (
            self._alone(everyone) if self.options.following == "own" else np.zeros(len(everyone))
        )
        kept = left >= self.estimator.seconds(running) + alone[:n]
        spare = left[kept] - self.estimator.seconds(_longer(running))
        # iterations that take u seconds together make T_avg, the mean of k, at most u / k longer;
        # and all have u seconds less
        k = max(len(self.queues.iterations), 1)
        until = np.minimum(
            spare - alone[:n][kept], (spare - self.queues.average_iteration_s) * (k / (k + 1))
        )
        lasts = min(lasts, float(until.min(initial=np.inf)))
        if not lasts > _APART_S:
            return False
        later = replace(
            solved, batch=everyone, residual=np.concatenate([left, residual]), following=alone
        )
        if not stays_best(later, self.estimator, n):
            return False
        step.plan.valid_until_s = step.view.now + lasts - _APART_S
        return True

    def _returns_early_alike(
        self,
        step: PlanInProgress,
        running: Batch,
        residual: np.ndarray,
        waiting: Batch,
        left: np.ndarray,
    ) -> float:
        """For how long Algorithm 1, which the batch size of the next iteration depends on, goes on
        ending in the same way while `running` decode, at least; seconds. residual, left: of those
        that run (right after a token) and those that wait."""
        # of those that wait, so many are more urgent than all that run
        first = int(np.searchsorted(left, residual[0]))
        # two without a deadline: not a number, and so no promise below
        with np.errstate(invalid="ignore"):
            lasts = float((left[first:] - residual[-1]).min(initial=np.inf))
            close = not (np.diff(left) >= _APART_S).all()
        everyone = waiting[:first] + running + waiting[first:]
        if close or not lasts > 0.0 or len(everyone) > self.batch_size:
            return 0.0
        residual = np.concatenate([left[:first], residual, left[first:]])
        costs = self.estimator.prefixes(everyone)
        savable = (residual >= costs).nonzero()[0]  # behind those that run, these only become fewer
        if (
            not first
        ):  # a running row keeps the nearest deadline; the next one is too long to join them
            fits = len(running)
            if costs[fits] <= residual[0]:
                return 0.0
        elif not len(savable):
            bound = max(least(step.view.requests.slo_tpot_s[everyone.rows]), float(costs[0]))
            fits = int(np.searchsorted(costs, bound, side="right"))
            if fits > first:
                return 0.0
        elif savable[0] < first + len(running):
            return 0.0
        else:
            # one that waits bounds the batch, and all of it is within that, however long the
            # contexts get in a run
            fits = len(everyone)
            lasts = min(
                lasts, float(residual[savable[0]] - self.estimator.prefixes(_longer(everyone))[-1])
            )
        before = self.batch_size
        self._adapt(early_return=fits < self.packer.within_tokens(everyone))
        changed, self.batch_size = self.batch_size != before, before
        return 0.0 if changed else lasts

    def _choose(self, step: PlanInProgress, urgent: Urgent, candidates: Batch, size: int) -> Choice:
        greedy = super()._choose(step, urgent, candidates, size)
        if not self._solves or not len(urgent.batch) + len(candidates):
            return greedy
        instance = self._solved = self.instance(
            urgent, candidates, size, step.view.requests, step.ledger
        )
        found = self.solve(instance)
        if found is None:  # no row has memory to go on
            self._kind = "memory_steps"
            return greedy
        n = instance.real_time
        x, y = found.chosen[:n], found.chosen[n:]
        first = np.concatenate([np.flatnonzero(x), np.flatnonzero(~x)])
        ordered = Urgent(
            urgent.batch[first], urgent.residual[first], urgent.costs[first], urgent.bound
        )
        best_effort = candidates[y] + candidates[~y]
        served = int(x.sum()), int(y.sum())
        return Choice(ordered, best_effort, *served, 0, greedy.early_return, urgent)

    def _place(self, step: PlanInProgress, choice: Choice, size: int) -> None:
        super()._place(step, choice, size)
        chosen = np.append(
            choice.urgent.batch.rows[: choice.fits], choice.candidates.rows[: choice.packed]
        )
        if self._solves and not np.array_equal(np.sort(chosen), np.sort(step.plan.rows)):
            self._kind = "memory_steps"

    # -- the problem -------------------------------------------------------------------------------
    def instance(
        self,
        urgent: Urgent,
        candidates: Batch,
        size: int,
        requests: RequestTable,
        ledger: KvLedger | None = None,
    ) -> Instance:
        """The problem of an iteration; without `ledger` memory is no matter."""
        n, everyone = len(urgent.batch), urgent.batch + candidates
        following = np.full(n, self.queues.average_iteration_s)
        if self.options.following == "own":
            following = np.maximum(following, self._alone(urgent.batch))
        pace, new_blocks, empty = np.inf, np.zeros(len(everyone), np.int64), 0
        if n:
            pace = max(least(requests.slo_tpot_s[urgent.batch.rows]), float(urgent.costs[0]))
        if ledger is not None:
            new_blocks, empty = _new_blocks(everyone, ledger), ledger.free_blocks
        tokens, options = self.limits.max_num_batched_tokens, self.options
        goals = options.rt_first, options.objective == "requests"
        return Instance(
            everyone, urgent.residual, following, pace, size, tokens, new_blocks, empty, *goals
        )

    def _alone(self, batch: Batch) -> np.ndarray:
        """float64[n], seconds: what each request takes by itself."""
        return np.array([self.estimator.seconds(batch[i : i + 1]) for i in range(len(batch))])

    def greedy_batch(self, urgent: Urgent, candidates: Batch, size: int) -> np.ndarray:
        """bool[n]: Algorithm 1's choice, in the order of `instance`."""
        choice = self.packer.choose(urgent, candidates, size)
        chosen = np.zeros(len(urgent.batch) + len(candidates), bool)
        chosen[: choice.fits - choice.replaced] = True
        chosen[len(urgent.batch) :][: choice.packed] = True
        return chosen

    def take_average(self, seconds: float) -> None:
        """T_avg is this from now on, as if all iterations so far had taken so long."""
        self.queues.iterations.clear()
        self.queues.iterations.append(seconds)

    def solve(self, instance: Instance) -> Solution | None:
        """The best batch; None if there is none, for lack of memory."""
        solver, estimator = self.options.solver, self.estimator
        if isinstance(estimator, LinearEstimator) and (
            solver == "milp" or (solver == "auto" and len(instance) > _ENUMERATED)
        ):
            from twinserve.policies.bros.milp import solve_milp

            return solve_milp(instance, estimator)
        return enumerate_batches(instance, estimator)


def _longer(batch: Batch) -> Batch:
    """The same after a run of steps, at most."""
    return replace(batch, context=batch.context + LONGEST_RUN)


def _new_blocks(batch: Batch, ledger: KvLedger) -> np.ndarray:
    """M_new, int64[n]: blocks that each request would need besides those it holds."""
    held = np.array([ledger.held_blocks(row) > 0 for row in batch.rows.tolist()], bool)
    slack = np.zeros(len(batch), np.int64)
    if held.any():
        slack[held] = ledger.slack_tokens(batch.rows[held])
    wanted = np.where(held, batch.new - slack, batch.context)
    return np.maximum(-(-wanted // ledger.block_tokens), 0)
