"""BROS's scheduling problem (1)-(8) of one iteration, solved exactly on small instances (Wan et
al., IEEE version, Sec. IV-A).

Choose x_i of the real-time and y_j of the best-effort requests so that

    (1) sum y / T is largest, where (2)-(5) T = C(batch), the cost model with max(execution, swap)
    (6) T + (1 - x_i) F_i <= residual_i   every real-time request
    (7) sum x + sum y <= B_curr
    (8) sum M_new <= M_ept

residual_i is T_SLO - t_i - (k_i - 1) T_avg, so (6) is that of the ACM version; IEEE prints 1 for
k_i. F_i is T_avg in the paper. As soon as one request is late (6) cannot be met, and (8) does not
say that real-time requests may drop others. So the goals are taken one after another, each among
the batches that are best by those before:

    1. fewest lost deadlines: real-time requests that (6) does not hold for
    2. most of these served, and of those that have no objective: (6) never asks for them, and they
       would wait for ever
    3. fewest blocks beyond M_ept, for which others must be dropped: by real-time requests only
    4. with `rt_first`: most real-time requests; with `most_requests`: then most best-effort ones.
       Both are no part of the problem: they are what Algorithm 1 fills an iteration with
    5. (1), largest
    6. most real-time requests; then the first ones in order: ties have one outcome

An iteration has at least one request. If it keeps no deadline, T is bounded as in Algorithm 1: by
the least TPOT objective, never below the most urgent request alone (docs/bros.md). All tokens but
the longest request's keep to the engine's step.

`enumerate_batches` tries every batch. `solve_milp` (milp.py) is the same by integer
programming.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from twinserve.policies.parts.estimators import Batch, BatchEstimator, LinearEstimator

SAME = 1e-9  # rates that differ by less, relatively, are the same


@dataclass(frozen=True, eq=False)
class Instance:
    """One iteration's problem over n requests, of which the first r are real-time.

    batch         real-time requests by residual time, then best-effort ones as line 17 orders them
    residual      float64[r], seconds; inf: no objective
    following     float64[r], F_i: seconds that a request left out needs after this iteration
    pace          seconds that an iteration may take if it keeps no deadline; inf: any
    size, tokens  B_curr, requests; new tokens of a step
    new_blocks    int64[n], M_new; empty_blocks: M_ept
    rt_first, most_requests  see above, 4
    """

    batch: Batch
    residual: np.ndarray
    following: np.ndarray
    pace: float
    size: int
    tokens: int
    new_blocks: np.ndarray
    empty_blocks: int
    rt_first: bool = False
    most_requests: bool = False

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def real_time(self) -> int:
        """r"""
        return len(self.residual)


@dataclass(frozen=True, eq=False)
class Scores:
    """The goals, for each of m batches: int64[m], but seconds and rate float64[m] (rate:
    best-effort tokens a second), and feasible bool[m]."""

    seconds: np.ndarray
    feasible: np.ndarray
    lost: np.ndarray
    served: np.ndarray
    beyond: np.ndarray
    real_time: np.ndarray
    best_effort: np.ndarray
    rate: np.ndarray

    def goals(self, instance: Instance) -> list[np.ndarray]:
        """Those before (1), in order; less is better."""
        first = [-self.real_time] if instance.rt_first else []
        first += [-self.best_effort] if instance.most_requests else []
        return [self.lost, -self.served, self.beyond, *first]


@dataclass(frozen=True, eq=False)
class Solution:
    """chosen: bool[n]; goals: those before (1), less is better; the rest as in Scores."""

    chosen: np.ndarray
    feasible: bool
    seconds: float
    lost: int
    rate: float
    goals: tuple[int, ...]


def score(instance: Instance, estimator: BatchEstimator, batches: np.ndarray) -> Scores:
    """Every goal for every batch; batches: bool[m, n]."""
    r, batch = instance.real_time, instance.batch
    seconds = batch_seconds(estimator, batch, batches)
    x = batches[:, :r]
    lost = seconds[:, None] + np.where(x, 0.0, instance.following) > instance.residual
    objectiveless = np.isinf(instance.residual)
    first = np.arange(len(instance)) < r
    sums = batches.astype(float) @ np.stack(
        [first, ~first, instance.new_blocks, instance.new_blocks * first], axis=1
    )
    real_time, best_effort, blocks, rt_blocks = sums.astype(np.int64).T
    number = real_time + best_effort
    beyond = np.maximum(blocks - instance.empty_blocks, 0)
    feasible = (number >= 1) & (number <= instance.size) & (beyond <= rt_blocks)
    if batch.new.sum() - batch.new.max() > instance.tokens:
        new = batches * batch.new
        feasible &= new.sum(axis=1) - new.max(axis=1) <= instance.tokens
    number_lost = lost.sum(axis=1)
    if r:
        feasible &= (number_lost < r) | (seconds <= instance.pace)
    return Scores(
        seconds,
        feasible,
        number_lost,
        (x & (lost | objectiveless)).sum(axis=1),
        beyond,
        real_time,
        best_effort,
        np.divide(best_effort, seconds, out=np.zeros(len(batches)), where=seconds > 0),
    )


def solution(instance: Instance, estimator: BatchEstimator, chosen: np.ndarray) -> Solution:
    """What a batch comes to, feasible or not. chosen: bool[n]."""
    return _scored(instance, chosen, score(instance, estimator, chosen[None, :]), 0)


def _scored(instance: Instance, chosen: np.ndarray, s: Scores, i: int) -> Solution:
    """`chosen` is batch `i` of those that were scored."""
    goals = tuple(int(goal[i]) for goal in s.goals(instance))
    return Solution(
        chosen, bool(s.feasible[i]), float(s.seconds[i]), int(s.lost[i]), float(s.rate[i]), goals
    )


def enumerate_batches(instance: Instance, estimator: BatchEstimator) -> Solution | None:
    """The best of all 2^n batches; None if none is feasible."""
    batches = _subsets(len(instance))
    s = score(instance, estimator, batches)
    left = np.flatnonzero(s.feasible)
    if not len(left):
        return None
    for goal in s.goals(instance):
        left = left[goal[left] == goal[left].min()]
    left = left[s.rate[left] >= s.rate[left].max() * (1.0 - SAME)]
    left = left[s.real_time[left] == s.real_time[left].max()]
    # in order: those with the first requests come first
    return _scored(instance, batches[left[0]], s, left[0])


def stays_best(instance: Instance, estimator: LinearEstimator, waiting: int) -> bool:
    """Return whether all but the first `waiting` requests are the only best batch. They stay it
    while they decode on and keep their own deadlines, and no other request loses its deadline that
    does not lose it now.

    All are real-time; residual: of those that wait now, of those that decode right after a token;
    following: the least that it can be. From step to step contexts grow, and those that wait have
    less time left: whatever deadline a batch loses it goes on losing. So another batch is never
    better if it is not with the deadlines that it loses now, be memory as it may.
    """
    s = score(
        replace(instance, new_blocks=np.zeros(len(instance), np.int64)),
        estimator,
        _subsets(len(instance)),
    )
    mine = 2 ** len(instance) - 2 ** (len(instance) - waiting)
    if s.seconds[mine] > instance.residual[waiting:].min():
        return False
    fewer, even = s.lost < s.lost[mine], s.lost == s.lost[mine]
    more, even = even & (s.served > s.served[mine]), even & (s.served == s.served[mine])
    return np.count_nonzero(fewer | more | even & (s.real_time >= s.real_time[mine])) == 1


@lru_cache(maxsize=8)
def _subsets(n: int) -> np.ndarray:
    """bool[2^n, n], sorted: from all requests to none; of two, the one that holds the first request
    not in both comes first."""
    numbers = np.arange(2**n - 1, -1, -1)
    return (numbers[:, None] >> np.arange(n - 1, -1, -1) & 1).astype(bool)


def batch_seconds(estimator: BatchEstimator, batch: Batch, batches: np.ndarray) -> np.ndarray:
    """float64[m]: seconds of each of `batches` (bool[m, n]) over the requests of `batch`; 0 of an
    empty one."""
    if not isinstance(estimator, LinearEstimator):
        return np.array(
            [estimator.seconds(batch[chosen]) if chosen.any() else 0.0 for chosen in batches]
        )
    total = np.zeros(len(batches))
    chosen = batches.astype(float)  # sums of tokens are exact in a float
    for cost, phase in (
        (estimator.model.prefill, batch.is_prefill),
        (estimator.model.decode, ~batch.is_prefill),
    ):
        if phase.any():
            new, attended = chosen @ (batch.new * phase), chosen @ (batch.context * phase)
            total += np.where(new > 0, cost.seconds(new, attended), 0.0)
    if batch.swapped.any():
        swapped = chosen @ batch.swapped
        swap = estimator.swap
        total = np.maximum(
            total, np.where(swapped > 0, swap.base_s + swapped * swap.seconds_per_byte, 0.0)
        )
    return total
