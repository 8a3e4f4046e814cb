"""What Justitia and its rivals keep of an application goes when it ends."""

import sys

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.justitia_reference import app, run
from tests.policies.policy_runs import Desk
from twinserve.policies.justitia.queues import SPARE, OwnersQueue, RankedQueue
from twinserve.policies.requests import Application

POLICIES = ["justitia:predictor=perfect", "srjf:predictor=perfect", "vllm-sjf", "vtc", "parrot"]
# what is kept, of the policies that have it: by application, client or row
KEPT = ("F", "_arrived", "_kinds", "remaining", "paid", "_applications", "_groups", "_duration")
LAST = 1  # the client that left VTC's queue last is kept, ended or not


def kept(policy) -> int:
    """The most entries of one kind that a policy has."""
    sizes = [len(getattr(policy, name)) for name in KEPT if hasattr(policy, name)]
    queue = policy.waiting
    sizes += [len(queue._numbers)] if isinstance(queue, OwnersQueue) else []
    here = getattr(policy, "here", None) or getattr(policy, "_here", None)
    sizes += [] if here is None else [len(here._here), len(here._closed)]
    return max(sizes)


@st.composite
def applications(draw):
    pair = st.tuples(st.integers(1, 9), st.integers(1, 9))
    stages = st.lists(st.lists(pair, min_size=1, max_size=3), min_size=1, max_size=3)
    apps = draw(st.lists(st.tuples(st.integers(0, 60), stages), min_size=1, max_size=12))
    apps.sort(key=lambda one: one[0])
    return [float(a) for a, _ in apps], [app(s) for _, s in apps], draw(st.integers(9, 24))


@pytest.mark.parametrize("policy", POLICIES)
@examples(15, suppress_health_check=list(HealthCheck))
@given(case=applications())
def test_nothing_is_kept_of_applications_that_have_ended(policy, case):
    """After each plan there is no more of anything than applications and requests that live, and
    after one more request nothing but of that."""
    arrivals, samples, blocks = case
    arrivals, samples = [*arrivals, 1e6], [*samples, app([[(1, 1)]])]
    most = []

    def watched(core):
        one, decide = core.policy, core.policy.plan

        def plan(view, ledger):
            found = decide(view, ledger)
            requests = view.requests
            rows = {row for row in range(len(requests)) if requests.state[row] != 3}
            live = {int(requests.group[row]) for row in rows}
            most.append(kept(one) - LAST - len(live) - len(rows))
            return found

        one.plan = plan

    _, _, engine = run(policy, arrivals, samples, blocks, seats=4, watched=watched)
    # between two stages an application has no request, but the next comes in the same instant
    assert max(most) <= 0
    assert kept(engine.core.policy) <= 1 + LAST


BY_MEANS = [policy.replace("perfect", "class-mean") for policy in POLICIES]


@pytest.mark.parametrize("policy", BY_MEANS)
@pytest.mark.parametrize("at_once", [False, True])
def test_requests_by_themselves_leave_nothing_behind(policy, at_once):
    desk = Desk(policy, 20)
    for i in range(12):
        desk.submit(f"r{i}", 3, 2)
        if not at_once:
            desk.step()
    while desk.stepper.core.active:
        desk.step()
    assert kept(desk.policy) <= LAST


@pytest.mark.parametrize("policy", BY_MEANS)
def test_the_end_may_be_said_before_the_last_request_has_left(policy):
    """As a server says it, which hears of a request's end before its policy."""
    desk = Desk(policy, 20)
    if "class-mean" in policy:
        desk.policy.predictor.application = lambda application, cost: 50
    for group in (0, 1):
        desk.stepper.core.announce(Application(group, f"app{group}", 0.0, "X"))
        desk.submit(f"r{group}", 3, 3, group=group)
    desk.step()
    assert kept(desk.policy) == 2
    desk.stepper.core.close(0)
    desk.step()
    assert kept(desk.policy) == 2  # its request still runs
    while desk.stepper.core.active:
        desk.step()
    desk.stepper.core.close(1)
    desk.submit("later", 1, 1)
    desk.step()
    assert kept(desk.policy) <= 1 + LAST


def test_vtc_lifts_a_newcomer_to_an_ended_client_that_left_last():
    desk = Desk("vtc", 20)
    desk.submit("a", 4, 3, group=0)
    desk.scheduled(3)
    desk.stepper.core.close(0)
    desk.submit("b", 1, 1, group=1)
    assert desk.step().scheduled == {"b": 1}
    assert desk.policy.paid[1] >= 4 + 2 * 3  # a's, though it is gone


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=400))
def test_heaps_hold_little_more_than_what_waits(steps):
    """Both queues, with much that leaves from the middle: the head is that of a plain list, and
    the heap stays small."""
    ranked, values = RankedQueue(), dict.fromkeys(range(6), sys.maxsize)
    owners: OwnersQueue[int] = OwnersQueue(values.__getitem__)
    waiting: dict[int, int] = {}
    for row, (owner, value) in enumerate(steps):
        waiting[row] = owner
        ranked.add(row, (value,))
        owners.add(row, owner)
        values[owner] -= value
        owners.shrunk(owner)
        assert len(ranked._heap) <= 2 * len(ranked) + SPARE
        assert len(owners._heap) <= 2 * len(owners._rows) + SPARE
        if value < 7:
            gone = max(waiting)
            del waiting[gone]
            ranked.remove(gone)
            owners.remove(gone)
        if waiting:
            assert ranked.peek() == min(waiting, key=lambda r: (steps[r][1], r))
            assert values[owners.first()] == min(values[o] for o in waiting.values())
