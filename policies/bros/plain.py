"""Outcomes of BROS's algorithm that are plain to see: no row has to be chosen. Most steps are of
these kinds, and cost a fraction of a selection this way. Each is what the selection itself would
come to, memory permitting."""

from __future__ import annotations

import numpy as np

from twinserve.policies.bros.parts import PlanInProgress, within_tokens
from twinserve.policies.parts.estimators import Batch, BatchEstimator


def all_fit(
    everyone: Batch, residual: np.ndarray, size: int, tokens: int, estimator: BatchEstimator
) -> bool:
    """Whether the batch of all requests, real-time ones first, keeps every deadline: neither order
    nor replacement matters.

    residual  float64[real-time requests], seconds
    size      requests in a batch; tokens: of a step
    """
    if not 0 < len(everyone) <= size or np.count_nonzero(everyone.swapped):
        return False
    if len(residual) and estimator.seconds(everyone) > residual.min():
        return False
    return within_tokens(everyone, tokens) == len(everyone)


def place_all(step: PlanInProgress, everyone: Batch) -> bool:
    """Memory for all without dropping or restoring anything; False and nothing changed where that
    is too little."""
    requests, ledger = step.view.requests, step.ledger
    holding = requests.computed_tokens[everyone.rows] > 0
    if holding.all():
        return ledger.grow_all(everyone.rows, everyone.context)
    mark = ledger.mark()
    newcomers = everyone[~holding]
    done = ledger.grow_all(everyone.rows[holding], everyone.context[holding]) and all(
        ledger.admit(row, tokens)
        for row, tokens in zip(newcomers.rows.tolist(), newcomers.context.tolist(), strict=True)
    )
    if not done:
        ledger.rollback(mark)
        return False
    ledger.commit(mark)
    step.plan.admitted += [(row, 0) for row in newcomers.rows.tolist()]
    return True


def nobody_joins(
    real_time: Batch,
    residual: np.ndarray,
    pending: int,
    best_effort: Batch,
    size: int,
    tokens: int,
    estimator: BatchEstimator,
) -> Batch | None:
    """The batch of all that hold memory, real-time requests by residual time, where just these are
    chosen: they decode, together they keep the nearest deadline, and the first one that waits comes
    after them and would break it.

    real_time    the first `pending` of them hold memory, the others wait; residual: float64[n],
                 theirs, seconds
    best_effort  all of them, by arrival; none waits
    None         where it is not that plain, for whatever reason
    """
    if not 0 < pending < min(size, len(real_time)) or pending + len(best_effort) > min(
        size, tokens
    ):
        return None
    running = real_time[:pending]
    if np.count_nonzero(running.is_prefill) or np.count_nonzero(best_effort.is_prefill):
        return None
    order = residual[:pending].argsort(kind="stable")
    first = pending + int(residual[pending:].argmin())
    bound = residual[order[0]]  # the nearest deadline; kept by the whole batch, so it can be kept
    if (
        residual[first] < residual[order[-1]]
        or estimator.seconds(real_time[first : first + 1], running) <= bound
    ):
        return None
    running = running[order] + best_effort
    return running if estimator.seconds(running) <= bound else None
