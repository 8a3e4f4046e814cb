"""Sets of rows that BROS keeps and asks: always what a plain sorted list would say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.policies.bros.parts import Victims, among
from twinserve.policies.parts.deadlines import DeadlineQueue, RowSet

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
