"""Outcomes that BROS sees without selecting are those that the selection comes to, and estimators
that start behind a batch add up to the same floats as whole batches."""

from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.policy_runs import MODEL, simulate
from tests.policies.test_fast_path import KINDS, LONGEST, workloads
from twinserve.policies.base import EngineLimits
from twinserve.policies.bros import policy as bros
from twinserve.policies.bros.parts import Victims, among, within_tokens
from twinserve.policies.parts.deadlines import DeadlineQueue, RowSet
from twinserve.policies.parts.estimators import Batch, LinearEstimator, ModelEstimator
from twinserve.profiles.forms.bros import SwapTimeModel
from twinserve.traces.workload import BestEffortPool, Workload

LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=LONGEST)


def never(*_):
    return None


def run(workload, policy, kind, blocks, host, limits=LIMITS):
    return simulate(workload, policy, kind, blocks, host=host, limits=limits)[:3]


def same(one, other) -> None:
    for ours, theirs in zip(one, other, strict=True):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["bros", "bros:chunk=5", "bros:group_size=3"])
@examples(12, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_a_step_that_nobody_joins_is_what_the_selection_gives(policy, kind, case):
    seen = run(case[0], policy, kind, *case[1:])
    with patch.object(bros, "nobody_joins", never):
        same(seen, run(case[0], policy, kind, *case[1:]))


def test_a_prompt_that_does_not_fit_beside_running_requests_waits_without_selections():
    """Three decode under tight objectives, best-effort requests beside them, and a long prompt
    waits: most steps are of the kind that is recognised."""
    workload = Workload.build(
        [0.0, 0.0, 0.0, 0.02],
        [4, 4, 4, 40],
        [36, 37, 38, 2],
        slo_ttft_s=np.array([1.0, 1.0, 1.0, 2.0]),
        slo_tpot_s=np.full(4, 0.009),
        pool=BestEffortPool(2, (4, 8), (2, 9), until_s=0.2),
    )
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    found, selections = [], []
    plainly, select = bros.nobody_joins, bros.BrosPolicy._choose

    def counted(*args):
        found.append(plainly(*args) is not None)
        return plainly(*args)

    def selected(self, *args):
        selections.append(1)
        return select(self, *args)

    with (
        patch.object(bros, "nobody_joins", counted),
        patch.object(bros.BrosPolicy, "_choose", selected),
    ):
        seen = run(workload, "bros", "bidirectional", 64, 0, limits)
    assert sum(found) > len(selections) > 0
    with patch.object(bros, "nobody_joins", never):
        same(seen, run(workload, "bros", "bidirectional", 64, 0, limits))


@pytest.mark.slow
@examples(60)
@given(
    objectives=st.lists(
        st.sampled_from([0.0022, 0.0024, 0.0026, 0.004, 0.009]), min_size=2, max_size=5
    ),
    prompts=st.lists(st.integers(2, 40), min_size=1, max_size=3),
    pool=st.integers(1, 3),
    ttft=st.sampled_from([0.02, 0.1, 2.0]),
)
def test_near_the_bound_the_same_batches_are_made_in_the_same_order(
    objectives, prompts, pool, ttft
):
    """Running requests with objectives of their own that a few best-effort ones more would
    break."""
    n, late = len(objectives), len(prompts)
    workload = Workload.build(
        [*[0.0] * n, *[0.02 + 0.004 * i for i in range(late)]],
        [4 + i for i in range(n)] + prompts,
        [30 - 3 * i for i in range(n)] + [3] * late,
        slo_ttft_s=np.array([1.0] * n + [ttft] * late),
        slo_tpot_s=np.array(objectives + [0.01] * late),
        pool=BestEffortPool(pool, (2, 4), (6, 12), until_s=0.1),
    )
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64)
    finish, batches = bros.BrosPolicy._finish, []

    def noted(self, step, batch, real_time):
        batches.append((batch.rows.tolist(), real_time))
        return finish(self, step, batch, real_time)

    with patch.object(bros.BrosPolicy, "_finish", noted):
        run(workload, "bros", "bidirectional", 128, 0, limits)
        plainly, batches = batches, []
        with patch.object(bros, "nobody_joins", never):
            run(workload, "bros", "bidirectional", 128, 0, limits)
    assert plainly == batches


requests = st.lists(
    st.tuples(st.booleans(), st.integers(1, 400), st.integers(0, 900), st.integers(0, 1 << 20)),
    max_size=12,
)


def batch(rows) -> Batch:
    prefill = np.array([r[0] for r in rows], bool)
    new = np.array([r[1] if r[0] else 1 for r in rows], np.int64)
    resident = np.array([r[2] for r in rows], np.int64)
    swapped = np.array([r[3] * (i % 3 == 0) for i, r in enumerate(rows)], np.int64)
    return Batch(np.arange(len(rows)), prefill, new, new + resident, swapped)


SWAP = SwapTimeModel(seconds_per_byte=1e-9, base_s=1e-4)


@pytest.mark.parametrize("estimator", [LinearEstimator(MODEL, SWAP), ModelEstimator(MODEL, SWAP)])
@examples(60)
@given(first=requests, then=requests, limit=st.integers(1, 600), share=st.floats(0.0, 1.2))
def test_behind_a_batch_is_the_end_of_the_whole_batch(estimator, first, then, limit, share):
    behind, more = batch(first), batch(then)
    whole = behind + more
    costs = estimator.prefixes(whole)
    assert estimator.prefixes(more, behind).tobytes() == costs[len(behind) :].tobytes()
    assert estimator.seconds(more, behind) == estimator.seconds(whole)
    if len(whole):
        assert estimator.seconds(whole) == costs[-1]
        bound = share * costs[-1]
        fits = int(np.searchsorted(costs, bound, side="right"))
        assert estimator.fitting(whole, bound) == fits
        assert estimator.fitting(whole, costs[-1]) == len(whole)  # what just fits does
        assert estimator.fitting(more, bound, behind) == max(fits - len(behind), 0)
    assert within_tokens(more, limit, behind) == max(within_tokens(whole, limit) - len(behind), 0)


@examples(60)
@given(rows=requests, limit=st.integers(1, 600))
def test_all_but_the_longest_keep_to_the_tokens_of_a_step(rows, limit):
    new = batch(rows).new.tolist()
    longest_first = [sum(new[:i]) - max(new[:i]) <= limit for i in range(1, len(new) + 1)]
    assert within_tokens(batch(rows), limit) == sum(longest_first)


@pytest.mark.parametrize("estimator", [LinearEstimator(MODEL, SWAP), ModelEstimator(MODEL, SWAP)])
@examples(60)
@given(
    contexts=st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    limit=st.integers(1, 300),
    more=st.integers(-1, 400),
)
def test_decodes_stay_within_the_bound_as_long_as_single_steps_do(estimator, contexts, limit, more):
    def at(step):
        rows = np.arange(len(contexts))
        one = np.ones(len(contexts), np.int64)
        return estimator.seconds(Batch(rows, one < 1, one, np.array(contexts) + step, one - 1))

    bound = at(more)
    expected = next((k for k in range(limit) if at(k + 1) > bound), limit)
    rows = np.arange(len(contexts))
    one = np.ones(len(contexts), np.int64)
    now = Batch(rows, one < 1, one, np.array(contexts), one - 1)
    assert estimator.decodes_within(now, bound, limit) == expected


# -- sets of rows that BROS keeps and asks: always what a plain sorted list would say --------------
ROWS = st.lists(st.integers(0, 40), unique=True, max_size=20)


@examples(100, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "look"]), st.integers(0, 30)), max_size=80
    )
)
def test_a_row_set_is_a_sorted_list(operations):
    rows, plain, seen = RowSet(), set(), []
    for what, row in operations:
        if what == "look":
            seen.append((rows.rows, sorted(plain)))
        elif what == "discard":
            rows.discard(row)
            plain.discard(row)
        elif row not in plain:
            rows.add(row)
            plain.add(row)
        assert len(rows) == len(plain) and (row in rows) == (row in plain)
    seen.append((rows.rows, sorted(plain)))
    # what was handed out does not change
    assert all(array.tolist() == expected for array, expected in seen)


@examples(50, derandomize=True)
@given(ROWS, ROWS)
def test_among(rows, others):
    rows, others = np.array(rows, np.int64), np.array(others, np.int64)
    assert among(rows, others).tolist() == np.isin(rows, others).tolist()


def test_deadlines_that_have_passed_come_last():
    queue = DeadlineQueue()
    for row, deadline in ((4, 2.0), (1, 3.0), (2, 1.0), (3, 3.0)):
        queue.add(row, deadline)
    assert queue.open_first(1.5, 3).tolist() == [4, 1, 3]
    assert queue.open_first(2.5, 3).tolist() == [1, 3, 2]


changes = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, 2.0, np.inf])))


@given(changes, st.sampled_from([0.0, 0.5, 1.5, 3.0]), st.integers(0, 12))
def test_a_queue_of_deadlines_is_in_order(changes, now, count):
    queue, here = DeadlineQueue(), {}
    for row, deadline in changes:  # a row comes, or, if it is here, leaves
        if row in here:
            del here[row]
            queue.remove(row)
            queue.remove(row)  # of one that is not here nothing
        else:
            here[row] = deadline
            queue.add(row, deadline)
    order = sorted(here, key=lambda row: (here[row], row))
    assert len(queue) == len(here) and queue.first(count).tolist() == order[:count]
    late = [row for row in order if here[row] < now]
    still_open = [row for row in order if here[row] >= now]
    assert queue.open_first(now, count).tolist() == (still_open + late)[:count]
    if here:
        assert queue.first_deadline == here[order[0]]


def test_victims_in_order():
    best_effort, urgency = np.array([2, 5, 9]), np.array([7, 1, 4, 3, 8])
    victims = Victims(best_effort, urgency, placed=np.array([3]), row=1)
    # down to its own place, and nobody of the batch
    assert victims.rows.tolist() == [9, 5, 2, 8, 4]
    nobody_urgent = Victims(best_effort, urgency[:0], np.array([3]), 1)
    assert nobody_urgent.rows.tolist() == [9, 5, 2]
