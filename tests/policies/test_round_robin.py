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


def test_a_class_without_requests_gives_its_turn_away():
    desk = desk_with("round-robin", 20, ("x", 4, 9))
    assert desk.scheduled(3) == [{"x": 4}, {"x": 1}, {"x": 1}]
    submit(desk, "a", 4, 2)
    assert desk.scheduled(4) == [{"a": 4}, {"x": 1}, {"a": 1}, {"x": 1}]


def test_prefills_and_decodes_share_a_batch_of_whole_prompts():
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=8)
    desk = desk_with("round-robin", 20, ("a", 4, 9), limits=limits)
    desk.step()
    submit(desk, "b", 30, 9)
    assert desk.step().scheduled == {"a": 1, "b": 30}  # max_num_batched_tokens does not bind


def test_at_most_batch_size_of_a_class_run_in_order_of_arrival():
    requests = (("a", 4, 2), ("b", 4, 3), ("c", 4, 1))
    desk = desk_with("round-robin:batch_size=2", 20, *requests)
    assert desk.scheduled(3) == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"b": 1, "c": 4}]


def test_max_num_seqs_bounds_the_batch_too():
    requests = (("a", 4, 2), ("b", 4, 3))
    desk = desk_with("round-robin", 20, *requests, limits=EngineLimits(max_num_seqs=1))
    assert desk.step().scheduled == {"a": 4}


def test_chunks():
    desk = desk_with("round-robin:chunk=3", 20, ("a", 8, 2), ("b", 2, 9))
    expected = [{"a": 3, "b": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}]
    assert desk.scheduled(4) == expected


def test_the_last_to_arrive_of_the_same_class_gives_way():
    desk = desk_with("round-robin", 6, ("a", 8, 9), ("b", 8, 9), ("x", 8, 9))
    assert desk.scheduled(2) == [{"a": 8, "b": 8}, {"x": 8}]
    assert desk.step().scheduled == {"a": 1}
    assert desk.preempted() == [("b", "recompute")]  # not x, though it came last of all
    assert desk.step().scheduled == {"x": 1}
    assert desk.held("x") == 3 and desk.ledger.free_blocks == 0


def test_a_request_that_cannot_grow_is_paused_while_the_other_class_can_run():
    desk = desk_with("round-robin", 5, ("a", 8, 9), ("x", 7, 9))
    assert desk.scheduled(4) == [{"a": 8}, {"x": 7}, {"a": 1}, {"x": 1}]
    # x has filled its second block, and a took the last one: x keeps what it has, a goes on.
    assert desk.scheduled(3) == [{"a": 1}] * 3
    assert desk.held("x") == 2 and not desk.table.recomputes.any()


def test_where_each_class_is_stuck_on_the_other_the_oldest_goes_on():
    desk = desk_with("round-robin", 4, ("x", 8, 2), ("a", 8, 5))
    assert desk.scheduled(2) == [{"a": 8}, {"x": 8}]
    assert desk.step().scheduled == {"x": 1}  # a's turn, but nobody can run: x came first
    assert desk.preempted() == [("a", "recompute")]
    assert desk.step().scheduled == {"a": 9}  # x has ended


def test_nobody_overtakes_a_request_that_waits_for_memory():
    desk = desk_with("round-robin", 6, ("a", 16, 2), ("b", 12, 1), ("c", 4, 1))
    assert desk.step().scheduled == {"a": 16}
    assert desk.step().scheduled == {"a": 1}  # b needs three blocks, and c stays behind it
    assert desk.step().scheduled == {"b": 12, "c": 4}


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
