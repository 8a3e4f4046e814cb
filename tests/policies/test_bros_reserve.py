"""BROS with `reserve`: a best-effort prompt that is computed in chunks is begun only where there is
room for the whole of it. Blocks of four tokens."""

from __future__ import annotations

import pytest

from tests.policies.policy_runs import BE, Desk
from tests.policies.test_bros import Counter
from twinserve.policies.base import EngineLimits
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy


def test_a_newcomer_waits_for_room_for_all_of_its_prompt():
    """x will need four of six blocks, so y's three are not there, though its first one is."""
    for options, begun in (("chunk=4", {"x": 4, "y": 4}), ("chunk=4,reserve=true", {"x": 4})):
        desk = Counter(options, blocks=6)
        desk.arrives("x", 16)
        desk.arrives("y", 12)
        assert desk.iteration(0.0) == begun
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 16)
    assert desk.iteration(0.0) == {"x": 4}
    desk.arrives("y", 12, at=0.1)  # five are free, of which x will take three
    assert desk.iteration(0.1) == {"x": 4}


def test_who_fits_beside_what_is_promised_begins():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 16)
    desk.arrives("y", 8)
    assert desk.iteration(0.0) == {"x": 4, "y": 4}


def test_the_first_one_begins_where_nobody_has_memory():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 24, output=1)
    assert [desk.iteration(i * 0.1) for i in range(6)] == [{"x": 4}] * 6


def test_real_time_requests_do_not_wait_for_promised_memory():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 20)
    desk.iteration(0.0)
    desk.arrives("a", 12, ttft=1.0, at=0.1)
    assert "a" in desk.iteration(0.1)


def lost(policy: str, kind: str) -> int:
    """How often a best-effort request of a crowd lost its memory; all of them end."""
    desk = Desk(policy, 12, kind=kind, limits=EngineLimits(max_num_seqs=8, max_model_len=64))
    for i in range(20):
        desk.submit(f"r{i}", 16 + i % 3, 9, service_class=BE)
    for _ in range(2000):
        if desk.stepper.core.active:
            desk.step()
    assert not desk.stepper.core.active
    return int(desk.table.recomputes.sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "bidirectional"])
def test_fewer_lose_their_memory_in_a_crowd_and_all_end(kind):
    assert lost("bros:chunk=4,reserve=true", kind) < lost("bros:chunk=4", kind) / 2


def test_there_is_none_with_chunks_that_fit():
    with pytest.raises(RegistryError, match="reserve=.*chunk=fit has none"):
        parse_policy("bros:chunk=fit,reserve=true").given  # noqa: B018
