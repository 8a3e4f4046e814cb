"""Runs of identical decode steps: when a plan is one of them, and for how long it can be
(`StepPlan.valid_for`)."""

from __future__ import annotations

import numpy as np

from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable

# A decision to decode on is handed to the engine for at most this many steps: more would seldom be
# used, since an arrival or an end comes before, and must be checked for memory.
LONGEST_RUN = 256


def decodes_only(plan: StepPlan, requests: RequestTable) -> bool:
    """Every row computes the one token after its last emitted one, and nothing else happens."""
    if plan.admitted or plan.preempted or plan.swapped_in or plan.moves or not len(plan.rows):
        return False
    if max(plan.tokens.tolist()) > 1:  # part of a prompt, which is seen at once
        return False
    rows = plan.rows
    after = requests.computed_tokens[rows] + 1 == requests.known_tokens(rows)
    return np.count_nonzero(after & (requests.output_tokens[rows] > 0)) == len(rows)


def further_decodes(plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> int:
    """`valid_for` of a plan that will be made again as long as its rows decode and find memory.

    That it will be is for the caller to know: whoever was left out must stay so.
    """
    if not decodes_only(plan, requests):
        return 0
    return max(0, ledger.decode_steps(plan.rows, LONGEST_RUN) - 1)
