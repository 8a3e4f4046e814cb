"""Two queues in turn, step by step. Blocks of four tokens; a to d are real-time, x best-effort."""

from tests.policies.policy_runs import BE, RT, Desk
from twinserve.policies.base import EngineLimits


def desk_with(policy: str, blocks: int, *requests: tuple[str, int, int], **values) -> Desk:
    desk = Desk(policy, blocks, **values)
    for name, prompt, output in requests:
        submit(desk, name, prompt, output)
    return desk


def submit(desk: Desk, name: str, prompt: int, output: int) -> None:
    desk.submit(name, prompt, output, service_class=RT if name in "abcd" else BE)


def test_the_classes_take_turns():
    desk = desk_with("round-robin", 20, ("x", 4, 3), ("a", 4, 3))
    expected = [{"a": 4}, {"x": 4}, {"a": 1}, {"x": 1}, {"a": 1}, {"x": 1}]
    assert desk.scheduled(6) == expected
    assert not desk.stepper.core.active


def test_prefills_and_decodes_share_a_batch_of_whole_prompts():
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=8)
    desk = desk_with("round-robin", 20, ("a", 4, 9), limits=limits)
    desk.step()
    submit(desk, "b", 30, 9)
    assert desk.step().scheduled == {"a": 1, "b": 30}  # max_num_batched_tokens does not bind


def test_max_num_seqs_bounds_the_batch_too():
    requests = (("a", 4, 2), ("b", 4, 3))
    desk = desk_with("round-robin", 20, *requests, limits=EngineLimits(max_num_seqs=1))
    assert desk.step().scheduled == {"a": 4}


def test_chunks():
    desk = desk_with("round-robin:chunk=3", 20, ("a", 8, 2), ("b", 2, 9))
    expected = [{"a": 3, "b": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}]
    assert desk.scheduled(4) == expected


def test_a_prompt_is_begun_only_where_all_of_it_would_fit():
    desk = desk_with("round-robin:chunk=4", 6, ("a", 16, 2), ("b", 12, 1))
    assert desk.scheduled(4) == [{"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 4}]


def test_a_decision_stands_only_while_the_other_class_is_empty():
    desk = desk_with("round-robin", 40, ("a", 4, 90))
    desk.scheduled(2)
    assert desk.plan.valid_for > 20
    submit(desk, "x", 4, 90)
    desk.scheduled(4)
    assert desk.plan.valid_for == 0
