"""Runs of identical steps: when a plan is one of them, and for how long it can be
(`StepPlan.valid_for`).

In a run of decodes every row computes one token. In a mixed run there are prompts too, each with
the same chunk in every step, up to the step before the first of them ends.
"""

import numpy as np

from twinserve.native.chosen import columns
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable

# A decision to decode on is handed to the engine for at most this many steps: more would seldom be
# used, since an arrival or an end comes before, and must be checked for memory.
LONGEST_RUN = 256
LONGEST_DECODES = 1024  # the same if nothing but memory is checked (`further_decodes`)
LONGEST_MIXED_RUN = 32  # the same with prompts: each of its steps is timed by itself


def decodes_only(plan: StepPlan, requests: RequestTable) -> bool:
    """Every row computes the one token after its last emitted one, and nothing else happens."""
    if plan.admitted or plan.preempted or plan.swapped_in or plan.moves or not len(plan.rows):
        return False
    return columns.decoding(requests, plan.rows, plan.tokens, True)


def further_decodes(plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> int:
    """`valid_for` of a plan that will be made again as long as its rows decode and find memory.

    That it will be is for the caller to know: rows left out must stay so.
    """
    if not decodes_only(plan, requests):
        return 0
    return max(0, ledger.decode_steps(plan.rows, LONGEST_DECODES) - 1)


def further_steps(plan: StepPlan, requests: RequestTable, ledger: KvLedger, shut: bool) -> int:
    """`further_decodes`; and for a plan with prompts in chunks, which it marks as `chunked`, for
    how long these find memory and none of them ends.

    That the chunks stay as they are is for the caller to know, too. shut: so does every waiting
    row, even if more of its text came to be cached (no seat is left, or no token; or no row waits).
    """
    rows, tokens = plan.rows, plan.tokens
    if further := further_decodes(plan, requests, ledger):
        return further
    if not shut or not len(rows) or max(tokens.tolist()) == 1:
        return 0
    if not ledger.runs_of_chunks or plan.preempted or plan.swapped_in:
        return 0
    hits = dict(plan.admitted)  # the table shows them when the plan is made
    chunks, most = [], LONGEST_MIXED_RUN - 1
    for at in (tokens > 1).nonzero()[0].tolist():
        row, chunk = int(rows[at]), int(tokens[at])
        computed = hits[row] if row in hits else int(requests.computed_tokens[row])
        left = int(requests.known_tokens(row)) - computed - chunk
        if left <= chunk:  # it ends in this step or in the next
            return 0
        most = min(most, (left - 1) // chunk)
        chunks.append((row, chunk, computed))
    if not columns.decoding(requests, rows, tokens):
        return 0
    further = max(0, ledger.chunk_steps(rows[tokens == 1], chunks, most + 1) - 1)
    plan.chunked = further > 0
    return further


def growth_of(
    plan: StepPlan, ledger: KvLedger, steps: int, chosen: np.ndarray | None = None
) -> np.ndarray:
    """int64[steps]: blocks that the rows of a run (those `chosen`, bool[n]; None: all) newly take
    at each of its steps."""
    rows = plan.rows if chosen is None else plan.rows[chosen]
    if not plan.chunked:
        return ledger.block_growth(rows, steps)
    tokens = plan.tokens if chosen is None else plan.tokens[chosen]
    long = tokens > 1
    parts = rows[long], tokens[long], ledger.table.computed_tokens[rows[long]]
    chunks = list(zip(*(part.tolist() for part in parts), strict=True))
    return ledger.chunk_growth(rows[~long], chunks, steps)
