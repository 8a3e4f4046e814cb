"""Applications first come, first served."""

from tests.policies.justitia_reference import app, run
from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.requests import Application


def test_the_requests_of_an_application_are_not_interleaved_with_the_next_ones():
    # Memory for one request. With vLLM the second stage of the first application queues behind the
    # second one.
    samples = [app([[(1, 2)], [(1, 2)]]), app([[(1, 2)] * 3])]
    assert run("parrot", [0.0, 1.0], samples, 1)[0] == [4.0, 10.0]
    assert run("vllm", [0.0, 1.0], samples, 1)[0] == [10.0, 8.0]


def test_requests_of_no_application_queue_by_arrival():
    desk = Desk("parrot", 20, limits=EngineLimits(max_num_seqs=1, max_model_len=64))
    desk.submit("x", 4, 1)
    desk.submit("s0", 4, 1, group=7)  # a group that nobody announced as an application of a class
    desk.stepper.core.announce(Application(8, "app8", 0.0, "X"))
    desk.submit("a0", 4, 1, group=8)
    desk.submit("y", 4, 1)
    desk.submit("a1", 4, 1, group=8)
    desk.submit("s1", 4, 1, group=7)
    assert [list(s)[0] for s in desk.scheduled(6)] == ["x", "s0", "a0", "a1", "y", "s1"]


def test_prompts_are_computed_in_parts_unless_told_otherwise():
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    for policy, expected in (
        ("parrot", [{"a": 6, "b": 2}, {"a": 1, "b": 4}, {"b": 1}]),
        ("parrot:enable_chunked_prefill=false", [{"a": 6}, {"a": 1, "b": 6}, {"b": 1}]),
    ):
        desk = Desk(policy, 20, limits=limits)
        desk.submit("a", 6, 2)
        desk.submit("b", 6, 2)
        assert desk.scheduled(3) == expected
        assert not desk.stepper.core.active
