"""Runs of steps with prompts in chunks (`bros:chunk=N`): for how long a batch of all rows stays
the choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinserve.policies.bros.parts import PlanInProgress
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.parts.runs import further_steps

_LONGEST = 16  # steps that are estimated one by one: more are seldom used
_CLOCK_SLACK_S = 1e-6  # a run of steps ends this much before a deadline binds, and is planned anew


def chunks_stand(
    step: PlanInProgress, everyone: Batch, real_time: int, estimator: BatchEstimator
) -> None:
    """Let the plan stand while its prompts compute as many tokens again and the batch still keeps
    every deadline. It serves `everyone`, the first `real_time` of them real-time, and no row waits.

    In a run each step gives every request that decodes a token, so that its residual time is TPOT
    at each of them; that of a prompt melts.
    """
    plan, requests = step.plan, step.view.requests
    steps = min(further_steps(plan, requests, step.ledger, shut=True), _LONGEST)
    if not steps:
        return
    rows, prompt = everyone.rows[:real_time], everyone.is_prefill[:real_time]
    pace = float(np.fmin.reduce(requests.slo_tpot_s[rows[~prompt]], initial=np.inf))
    most = 0.0
    for further in range(1, steps + 1):
        later = replace(everyone, context=everyone.context + everyone.new * further)
        seconds = estimator.seconds(later)
        if seconds > pace:
            steps = further - 1
            break
        most = max(most, seconds)
    plan.valid_for = steps
    begun = requests.output_tokens[rows] > 0  # and were dropped since
    due = np.where(
        begun,
        requests.last_token_s[rows] + requests.slo_tpot_s[rows],
        requests.arrival_s[rows] + requests.slo_ttft_s[rows],
    )[prompt]
    plan.valid_until_s = float(np.fmin.reduce(due, initial=np.inf)) - most - _CLOCK_SLACK_S
