"""However many newcomers come, how long can one request be left out? The bounds follow from each
policy's order. A step takes a second; some request comes in every one of them, more than there are
seats for."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.order_runs import Arrival, Step, watched
from tests.policies.policy_runs import BY_HAND, Desk
from tests.policies.test_mlfq import SLOW
from twinserve.policies.base import EngineLimits

STREAM = 25  # seconds
property_test = examples(25, suppress_health_check=list(HealthCheck))
sizes = st.tuples(st.integers(1, 20), st.integers(1, 8))


@st.composite
def streams(draw, **columns) -> list[Arrival]:
    """One or two requests in every second, of a few sizes; columns: strategies of their further
    values."""
    kinds = draw(st.lists(sizes, min_size=1, max_size=4))
    each = draw(st.integers(1, 2))
    picked = draw(st.lists(st.sampled_from(kinds), min_size=STREAM * each, max_size=STREAM * each))
    further = {
        name: draw(st.lists(s, min_size=len(picked), max_size=len(picked)))
        for name, s in columns.items()
    }
    return [
        Arrival(i // each, *size, **{name: values[i] for name, values in further.items()})
        for i, size in enumerate(picked)
    ]


def desk_of(policy: str, blocks: int, seats: int, host: int = 0, estimator=BY_HAND) -> Desk:
    limits = EngineLimits(
        max_num_seqs=seats, max_num_batched_tokens=64, max_model_len=64, kv_bytes_per_token=1
    )
    return Desk(policy, blocks, host=host, limits=limits, estimator=estimator)


class Waits:
    """Since when everybody waits for an iteration."""

    def __init__(self, many: list[Arrival]) -> None:
        self.since = {row: one.step for row, one in enumerate(many)}
        self.longest = 0

    def after(self, step: Step) -> dict[int, int]:
        """Row -> seconds for which those were left out that run in this step, or still are."""
        waited = {row: step.now - self.since[row] for row in step.active}
        self.longest = max([self.longest, *waited.values()])
        for row in step.running:
            self.since[row] = step.now + 1
        return waited


@property_test
@given(streams(), st.integers(1, 3), st.integers(9, 24))
def test_preemptive_wait_leaves_nobody_out_for_longer_than_there_were_others(many, seats, blocks):
    """In each step the longest wait runs, and who has run waits less than all the others."""
    waits, others = Waits(many), {}
    for step in watched(desk_of("preemptive-wait", blocks, seats), many):
        others |= {row: len(step.active) - 1 for row in step.active if waits.since[row] == step.now}
        assert all(waited <= others[row] for row, waited in waits.after(step).items())


@pytest.mark.slow
@property_test
@given(
    streams(),
    st.integers(1, 2),
    st.sampled_from([12, 200]),
    st.sampled_from([0, 40]),
    st.sampled_from([2, 5]),
)
def test_mlfq_leaves_nobody_out_for_much_longer_than_the_starve_limit(
    many, seats, blocks, host, limit
):
    """Then it is in the first queue, and newcomers join behind it. Who is before it leaves that
    queue with a quantum of a second: two steps at most, as one may have begun it between steps."""
    desk = desk_of(
        f"mlfq:quantum=1,starve_limit={limit},min_free_blocks=1", blocks, seats, host, SLOW
    )
    waits, others = Waits(many), {}
    for step in watched(desk, many):
        others |= {
            row: len(step.active) - 1 for row in step.active if step.now - waits.since[row] == limit
        }
        for row, waited in waits.after(step).items():
            assert waited <= limit or waited <= limit + 2 * others[row]


CLIENTS = 3


@property_test
@given(
    streams(group=st.integers(0, CLIENTS - 1)),
    st.integers(1, 2),
    st.sampled_from([12, 200]),
    st.integers(1, 10),
    sizes,
)
def test_vtc_lets_each_client_before_a_new_one_at_most_once(many, seats, blocks, at, size):
    """It starts with the counter of who has paid least, and whoever is served has paid more."""
    newcomer = sum(one.step <= at for one in many)
    many.insert(newcomer, Arrival(at, *size, group=CLIENTS))
    before: list[int] = []
    for step in watched(desk_of("vtc", blocks, seats, host=40), many):
        if step.now >= at and newcomer not in before:
            before += (
                step.begun[: step.begun.index(newcomer) + 1]
                if newcomer in step.begun
                else step.begun
            )
    served = [many[row].group for row in before]
    assert served.pop() == CLIENTS and len(served) == len(set(served))


EASY, TIGHT = 200, 12
hybrid = streams(slo_ttft_s=st.just(4.0), slo_tpot_s=st.just(2.0), service_class=st.integers(0, 1))


@property_test
@given(hybrid, st.integers(1, 3), st.sampled_from([EASY, TIGHT]), st.sampled_from([0, 40]))
def test_bros_begins_real_time_requests_of_one_objective_as_they_come(many, seats, blocks, host):
    for step in watched(desk_of("bros:kv=paged", blocks, seats, host), many):
        waiting = [row for row in step.waiting if many[row].service_class == 0]
        assert all(
            row < min(waiting, default=len(many))
            for row in step.begun
            if many[row].service_class == 0
        )


@property_test
@given(hybrid, st.integers(1, 3))
def test_bros_leaves_a_real_time_request_out_no_longer_than_objectives_before_it(many, seats):
    """A late request has a negative residual time that only falls. Whoever comes first of all
    always runs, and its next deadline is a later one."""
    waits, others = Waits(many), {}
    real_time = {row for row, one in enumerate(many) if one.service_class == 0}
    begun: set[int] = set()
    for step in watched(desk_of("bros", EASY, seats), many):
        due = {row: 2 if row in begun else 4 for row in step.active}
        others |= {
            row: len(real_time & set(step.active)) - 1
            for row in step.active
            if step.now - waits.since[row] == due[row]
        }
        for row, waited in waits.after(step).items():
            assert row not in real_time or waited <= due[row] or waited <= due[row] + others[row]
        begun |= set(step.begun)
