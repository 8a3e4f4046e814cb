"""BROS's problem, eqs. (1)-(8) (see problem.py), by mixed-integer linear programming:
`scipy.optimize.milp`, that is HiGHS.

The objective is a ratio: Dinkelbach's iterations maximise sum y - rate T for rates that grow until
that is 0. A phase costs alpha0 L^n + alpha1 L^n L^a + beta with sums over the batch. L^n L^a is a
sum over pairs of requests: each pair of a phase has a variable p >= b_i + b_j - 1, p >= 0. T is
only pressed down, so it needs no upper side. (6) is relaxed by a binary z_i each, and goals are
solved for one after another, each held as a constraint in the solves that follow.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from twinserve.policies.bros.problem import SAME, Instance, Solution, batch_seconds, solution
from twinserve.policies.parts.estimators import LinearEstimator


class _Program:
    """Variables by number, constraints as sparse rows. Times are in units of the whole batch's, so
    that the solver's tolerances, about 1e-6, are relative."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integer: list[int] = []
        self._rows: list[tuple[list[int], list[float], float]] = []
        self._matrix = None

    def add(self, count: int, upper: float, integer: bool = False) -> np.ndarray:
        """New variables between 0 and `upper`; their numbers, int64[count]."""
        first = len(self.upper)
        self.upper += [upper] * count
        self.integer += [int(integer)] * count
        return np.arange(first, first + count)

    def at_most(self, variables, factors, limit: float) -> None:
        """sum of factors x variables <= limit; arrays, or numbers for a single one."""
        numbers = np.atleast_1d(variables)
        self._rows.append(
            (numbers.tolist(), np.broadcast_to(factors, numbers.shape).tolist(), float(limit))
        )

    def maximise(self, variables: np.ndarray, factors) -> np.ndarray | None:
        """The values of all variables, float64; None if no values satisfy the constraints."""
        target = np.zeros(len(self.upper))
        np.add.at(target, np.atleast_1d(variables), -np.asarray(factors, float))
        limits = np.array([limit for _, _, limit in self._rows])
        found = milp(
            target,
            integrality=self.integer,
            bounds=Bounds(0.0, self.upper),
            constraints=LinearConstraint(self._constraints(), -np.inf, limits),
            options={"mip_rel_gap": 0.0},
        )
        if found.status == 2:
            return None
        if found.x is None:
            raise RuntimeError(f"the problem of an iteration was not solved: {found.message}")
        return found.x

    def _constraints(self):
        """Those before the last call are kept as a matrix."""
        done = 0 if self._matrix is None else self._matrix.shape[0]
        fresh = self._rows[done:]
        rows = np.repeat(np.arange(len(fresh)), [len(numbers) for numbers, _, _ in fresh])
        columns = [number for numbers, _, _ in fresh for number in numbers]
        values = [factor for _, factors, _ in fresh for factor in factors]
        more = coo_array((values, (rows, columns)), shape=(len(fresh), len(self.upper))).tocsr()
        self._matrix = more if self._matrix is None else vstack([self._matrix, more], format="csr")
        return self._matrix


def solve_milp(instance: Instance, estimator: LinearEstimator) -> Solution | None:
    """The best batch; None if none is feasible. At most 18 requests: the last tie-break weighs them
    by powers of two."""
    n, r = len(instance), instance.real_time
    if not 1 <= n <= 18:
        raise ValueError(f"{n} requests; an instance has 1 to 18")
    unit = float(batch_seconds(estimator, instance.batch, np.ones((1, n), bool))[0])
    program = _Program()
    b = program.add(n, 1, integer=True)
    x, y = b[:r], b[r:]
    program.at_most(b, -1.0, -1.0)
    program.at_most(b, 1.0, instance.size)  # (7)
    time = _time(program, instance, estimator, b, unit)
    _tokens(program, instance, b)
    z = program.add(r, 1, integer=True)
    alone = batch_seconds(estimator, instance.batch, np.eye(r, n, dtype=bool))
    _deadlines(program, instance, x, z, time, unit, alone)
    beyond = program.add(1, float(instance.new_blocks.sum()))
    # (8)
    program.at_most(
        np.append(b, beyond), np.append(instance.new_blocks, -1.0), instance.empty_blocks
    )
    program.at_most(np.append(x, beyond), np.append(-instance.new_blocks[:r], 1.0), 0.0)
    served = _served(program, instance, x, z)

    def best(variables: np.ndarray, factors: np.ndarray) -> Solution | None:
        """Maximise, hold it, and say what the batch is."""
        values = program.maximise(variables, factors)
        if values is None:
            return None
        batch = solution(instance, estimator, values[b] > 0.5)
        reached = float(np.round(np.dot(values[variables], factors)))
        program.at_most(variables, -np.asarray(factors, float), -reached)
        return batch

    goals = [(z, -np.ones(r)), (served, np.ones(len(served))), (beyond, -np.ones(1))]
    if instance.rt_first:
        goals.append((x, np.ones(r)))
    if instance.most_requests:
        goals.append((y, np.ones(n - r)))
    found: Solution | None = None
    for variables, factors in goals:
        if len(variables):
            found = best(variables, factors)
            if found is None:
                return None
    if len(y) and found is not None:
        found = _dinkelbach(program, instance, estimator, found, b, time, unit)
    if r:
        best(x, np.ones(r))
    values = program.maximise(b, 2.0 ** np.arange(n - 1, -1, -1))
    return None if values is None else solution(instance, estimator, values[b] > 0.5)


def _dinkelbach(program, instance, estimator, found: Solution, b, time, unit: float) -> Solution:
    """The largest sum y / T (1); held from here on."""
    y = b[instance.real_time :]
    variables = np.concatenate([y, time])
    while True:
        rate = found.rate * unit
        values = program.maximise(variables, np.append(np.ones(len(y)), -rate))
        better = solution(instance, estimator, values[b] > 0.5)
        if better.rate <= found.rate * (1.0 + SAME):
            break
        found = better
    program.at_most(variables, np.append(-np.ones(len(y)), rate), SAME * len(y))
    return found


def _time(
    program: _Program, instance: Instance, estimator: LinearEstimator, b, unit: float
) -> np.ndarray:
    """T, the number of one variable: at least what execution and swap of the batch take (2)-(5)."""
    batch = instance.batch
    time = program.add(1, 2.0)
    numbers, factors = [time], [np.array([-1.0])]
    for cost, phase in (
        (estimator.model.prefill, batch.is_prefill),
        (estimator.model.decode, ~batch.is_prefill),
    ):
        members = np.flatnonzero(phase)
        if not len(members):
            continue
        new, attended = batch.new[members].astype(float), batch.context[members].astype(float)
        present = program.add(1, 1)
        for i in b[members]:
            program.at_most(np.append(present, i), [-1.0, 1.0], 0.0)
        numbers += [b[members], present]
        factors += [
            (cost.alpha0 * new + cost.alpha1 * new * attended) / unit,
            np.array([cost.beta / unit]),
        ]
        first, second = np.triu_indices(len(members), 1)
        if len(first) and cost.alpha1:
            pairs = program.add(len(first), 1)
            for p, i, j in zip(pairs, b[members[first]], b[members[second]], strict=True):
                program.at_most(np.array([i, j, p]), [1.0, 1.0, -1.0], 1.0)
            product = new[first] * attended[second] + new[second] * attended[first]
            numbers.append(pairs)
            factors.append(cost.alpha1 * product / unit)
    program.at_most(np.concatenate(numbers), np.concatenate(factors), 0.0)
    swapped = np.flatnonzero(batch.swapped)
    if len(swapped):
        present = program.add(1, 1)
        for i in b[swapped]:
            program.at_most(np.append(present, i), [-1.0, 1.0], 0.0)
        seconds = batch.swapped[swapped] * estimator.swap.seconds_per_byte / unit
        terms = np.concatenate([b[swapped], present, time])
        program.at_most(terms, np.concatenate([seconds, [estimator.swap.base_s / unit, -1.0]]), 0.0)
    return time


def _tokens(program: _Program, instance: Instance, b) -> None:
    """All but the longest request keep to the step's tokens: new tokens less those of one chosen
    request (`longest`)."""
    new = instance.batch.new.astype(float)
    if new.sum() - new.max() <= instance.tokens:
        return
    longest = program.add(len(b), 1)
    program.at_most(longest, 1.0, 1.0)
    for chosen, most in zip(b, longest, strict=True):
        program.at_most(np.array([most, chosen]), [1.0, -1.0], 0.0)
    program.at_most(np.concatenate([b, longest]), np.concatenate([new, -new]), instance.tokens)


def _deadlines(
    program: _Program, instance: Instance, x, z, time, unit: float, alone: np.ndarray
) -> None:
    """(6), unless z_i; and the pace of an iteration that keeps no deadline. alone: float64[r],
    seconds of each by itself."""
    longest = 2.0  # an upper bound of T, in units
    lost = instance.residual < np.minimum(alone, instance.following)  # whatever is chosen
    for i, (residual, following) in enumerate(
        zip(instance.residual / unit, instance.following / unit, strict=True)
    ):
        slack = longest + following - residual
        if slack <= 0:  # kept, whatever is chosen
            program.at_most(z[i], 1.0, 0.0)
            continue
        if lost[i]:  # and no large factor in the program
            program.at_most(z[i], -1.0, -1.0)
            continue
        terms = np.array([time[0], x[i], z[i]])
        program.at_most(terms, [1.0, -following, -slack], residual - following)
    if len(x) and np.isfinite(instance.pace):
        pace = instance.pace / unit
        program.at_most(
            np.concatenate([time, z]),
            np.append(1.0, np.full(len(z), longest)),
            pace + longest * len(z),
        )


def _served(program: _Program, instance: Instance, x, z) -> np.ndarray:
    """Return variables: 1 if a request with a lost deadline, or without an objective, is in the
    batch."""
    served = program.add(len(x), 1)
    for i, v in enumerate(served):
        program.at_most(np.array([v, x[i]]), [1.0, -1.0], 0.0)
        if np.isfinite(instance.residual[i]):
            program.at_most(np.array([v, z[i]]), [1.0, -1.0], 0.0)
    return served
