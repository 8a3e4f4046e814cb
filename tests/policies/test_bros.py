"""Algorithm 1 by hand. A prompt token takes 1 ms, a decode 10 ms, a token swapped in 1 ms.

Requests named a to w are real-time, x, y, z best-effort. Blocks of four tokens.
"""

import numpy as np
import pytest

from tests.policies.policy_runs import BE, RT, Desk
from tests.sim.stepper import granted
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepOutcome
from twinserve.policies.registry import parse_policy


class Counter(Desk):
    """A desk with a clock: an iteration starts when it is told to, and ends when it is told to."""

    def __init__(self, options: str = "", blocks: int = 100, **values) -> None:
        values.setdefault("limits", EngineLimits(max_num_seqs=256, kv_bytes_per_token=1))
        super().__init__(f"bros:{options}" if options else "bros", blocks, **values)

    def arrives(
        self, name: str, prompt: int, output: int = 9, ttft=None, tpot=None, at=0.0
    ) -> None:
        """Seconds; no objective where none is given."""
        slo = {"slo_ttft_s": ttft or np.nan, "slo_tpot_s": tpot or np.nan}
        service_class = BE if name >= "x" else RT
        self.submit(name, prompt, output, service_class=service_class, arrival_s=at, **slo)

    def iteration(self, now: float, seconds: float = 0.001) -> dict[str, int]:
        """Tokens granted, by name, in order."""
        core, table = self.stepper.core, self.table
        plan = core.plan(now)
        emitted = plan.rows[core.emitting(plan)]
        outputs = self.stepper._outputs
        ended = [r for r in emitted.tolist() if table.output_tokens[r] + 1 >= outputs[r]]
        core.complete(plan, StepOutcome(now, np.array([now + seconds]), emitted, ended))
        self.ledger.check()
        return granted(plan, table.ids)

    def order(self, now: float) -> str:
        return "".join(self.iteration(now))


# -- real-time requests, lines 3 to 15 -----------------------------------------------------------
def test_real_time_requests_by_residual_time():
    desk = Counter(kind="paged")
    desk.arrives("a", 10, ttft=1.0)
    desk.arrives("b", 10, ttft=0.5)
    desk.arrives("c", 10, ttft=0.7)
    assert desk.order(0.0) == "bca"


def test_waiting_and_pending_are_polled_together_and_the_nearest_deadline_stops():
    desk = Counter()
    desk.arrives("p", 10, ttft=0.5, tpot=0.2)
    assert desk.iteration(0.0, seconds=0.02) == {"p": 10}
    desk.arrives("b", 20, ttft=0.3, at=0.06)
    desk.arrives("a", 30, ttft=0.1, at=0.05)
    # At 0.1 s: a has 0.05 s left, p 0.2 - 0.08 = 0.12 s, b 0.26 s. a and p take 0.04 s, b 0.02 s.
    assert desk.iteration(0.1) == {"a": 30, "p": 1}


def test_the_batch_size_stops_the_batch():
    desk = Counter("base_batch=2,adaptive_batch=false")
    for name in "abc":
        desk.arrives(name, 10, ttft=1.0)
    assert desk.order(0.0) == "ab"


def test_the_first_that_finds_no_memory_ends_the_search():
    desk = Counter(blocks=5)
    desk.arrives("a", 8, ttft=0.5)  # two blocks
    desk.arrives("b", 16, ttft=0.6)  # four
    desk.arrives("c", 4, ttft=0.7)  # one would be free
    assert desk.order(0.0) == "a"


def test_who_holds_all_its_memory_runs_though_a_more_urgent_one_found_none():
    desk = Counter(blocks=3)
    desk.arrives("p", 6, ttft=1.0, tpot=5.0)
    assert desk.order(0.0) == "p"
    desk.arrives("a", 12, ttft=0.5, at=0.1)
    assert desk.order(0.1) == "p"
    assert desk.held("p") == 2 and not desk.preempted()


def test_late_requests_go_first_and_the_bound_comes_from_those_that_can_be_saved():
    desk = Counter()
    desk.arrives("a", 30, ttft=0.05)  # 0.15 s late at 0.2 s
    desk.arrives("b", 30, ttft=0.3)  # 0.1 s left, and a and b take 0.06 s
    desk.arrives("c", 30, ttft=0.7)
    desk.arrives("d", 30, ttft=0.8)
    assert desk.order(0.2) == "abc"  # 0.09 s; with d 0.12 s


def test_with_order_savable_those_whose_time_has_passed_wait_behind_the_others():
    desk = Counter("order=savable")
    desk.arrives("a", 30, ttft=0.05)  # 0.15 s late at 0.2 s
    desk.arrives("b", 30, ttft=0.3)
    desk.arrives("c", 30, ttft=0.7)
    desk.arrives("d", 30, ttft=0.8)
    assert desk.order(0.2) == "bcd"  # 0.09 s of the 0.1 s that b has left; with a 0.12 s


def test_a_deadline_bounds_only_while_it_can_be_kept_behind_the_more_urgent_ones():
    desk = Counter()
    desk.arrives("a", 30, ttft=0.05)
    desk.arrives("b", 30, ttft=0.25)  # 0.05 s left: alone in time, behind a not
    desk.arrives("c", 30, ttft=0.3)  # 0.1 s left, and the three take 0.09 s
    desk.arrives("d", 30, ttft=0.8)
    assert desk.order(0.2) == "abc"


def test_where_nobody_can_be_saved_the_bound_is_the_promised_pace():
    desk = Counter()
    for name in "abcde":
        desk.arrives(name, 60, ttft=0.01, tpot=0.2)
    assert desk.order(1.0) == "abc"  # 0.18 s; four take 0.24 s


def test_the_bound_is_never_below_the_cost_of_the_head_alone():
    desk = Counter()
    desk.arrives("a", 300, ttft=0.01, tpot=0.2)
    desk.arrives("b", 10, ttft=0.02, tpot=0.2)
    assert desk.order(1.0) == "a"


def test_without_objectives_only_size_and_memory_bind():
    desk = Counter("base_batch=3,adaptive_batch=false")
    for name in "abcd":
        desk.arrives(name, 80)
    assert desk.order(0.0) == "abc"


def test_residual_time_of_a_token_group():
    desk = Counter("group_size=3")
    desk.arrives("p", 10, ttft=0.5, tpot=0.2)
    desk.iteration(0.0, seconds=0.02)  # the first token is a group of its own, out at 0.02 s
    row, policy = np.array([0]), desk.policy
    # A group of three has 0.6 s from 0.02 s on; 0.08 s have passed, two iterations must follow.
    assert policy.queues.residual(row, desk.table, 0.1) == pytest.approx(0.6 - 0.08 - 2 * 0.02)
    # T_avg becomes 0.03 s; two of the group are left, due 0.4 s on
    desk.iteration(0.1, seconds=0.04)
    assert policy.queues.residual(row, desk.table, 0.14) == pytest.approx(0.4 - 0.03)
    desk.iteration(0.14, seconds=0.03)
    assert policy.queues.residual(row, desk.table, 0.17) == pytest.approx(0.2)
    desk.iteration(0.17, seconds=0.03)  # the group is out, the next one begins
    assert policy.queues.residual(row, desk.table, 0.2) == pytest.approx(0.6 - 2 * 0.03)


def test_average_iteration_time_forgets_what_is_older_than_its_window():
    desk = Counter("avg_window=2")
    desk.arrives("a", 4)
    for now, seconds in ((0.0, 0.5), (1.0, 0.1), (2.0, 0.3)):
        desk.iteration(now, seconds)
    assert desk.policy.queues.average_iteration_s == pytest.approx(0.2)


# -- best-effort requests, lines 17 to 36 --------------------------------------------------------
def test_best_effort_requests_fill_up_what_the_deadline_leaves():
    desk = Counter("replacement=false")
    desk.arrives("x", 30)
    desk.arrives("y", 30)
    desk.arrives("z", 30)
    desk.arrives("a", 30, ttft=0.1)
    assert desk.order(0.0) == "axy"  # 0.09 s


def replacing(options: str = "", blocks: int = 100, second: float = 1.0) -> Counter:
    """a and b take 64 ms of 100 ms, x fits beside them, y in the place of b."""
    desk = Counter(options, blocks)
    desk.arrives("a", 32, ttft=0.1)
    desk.arrives("b", 32, ttft=second)
    desk.arrives("x", 32)
    desk.arrives("y", 32)
    return desk


def test_the_next_one_replaces_the_least_urgent_real_time_request():
    assert replacing().order(0.0) == "axy"


def test_who_could_not_wait_for_the_next_iteration_is_not_replaced():
    desk = Counter()
    desk.arrives("w", 1, output=1)
    desk.iteration(0.0, seconds=0.06)  # T_avg
    desk.arrives("a", 32, ttft=0.1, at=1.0)
    desk.arrives("b", 32, ttft=0.15, at=1.0)
    desk.arrives("x", 32, at=1.0)
    desk.arrives("y", 32, at=1.0)
    assert desk.order(1.0) == "abx"  # after 0.096 s and another 0.06 s b would be late


def test_the_replaced_one_gets_its_place_back_if_the_other_finds_no_block():
    desk = Counter(blocks=22)
    desk.arrives("a", 32, ttft=0.1)  # eight blocks
    desk.arrives("b", 20, ttft=1.0)  # five
    desk.arrives("x", 32)  # eight
    desk.arrives("y", 32)  # eight: six are left
    # a, b, x: 0.084 s. a, x, y: 0.096 s, so y takes b's place; but there is no room for y.
    assert desk.order(0.0) == "abx"


def test_but_not_if_its_memory_went_to_a_more_urgent_one():
    desk = Counter("swap=false", blocks=5)
    desk.arrives("r", 7, ttft=1.0, tpot=10.0)
    desk.arrives("x", 8)
    assert desk.order(0.0) == "rx"
    desk.arrives("a", 16, ttft=0.03, at=0.1)  # four blocks, one is free
    # a and r take 0.026 s of 0.03 s, a and x too: x takes r's place. Then a takes both's memory.
    assert desk.order(0.1) == "a"
    assert desk.preempted() == [("x", "recompute"), ("r", "recompute")]


def test_a_stuck_best_effort_request_is_skipped():
    desk = Counter(blocks=4)
    desk.arrives("x", 20)
    desk.arrives("y", 4)
    assert desk.order(0.0) == "y"


def test_by_slots_on_the_host_then_arrival():
    options = "base_batch=2,adaptive_batch=false,replacement=false"
    desk = Counter(options, blocks=8, host=8)
    desk.arrives("x", 8)
    desk.arrives("y", 8)
    assert desk.order(0.0) == "xy"
    desk.arrives("a", 20, output=1, ttft=0.5, at=0.1)
    assert desk.order(0.1) == "ax"  # a needs five blocks of four: y goes to the host
    assert desk.preempted() == [("y", "swap")] and desk.moves() == [("y", "d2h", 8, "step")]
    desk.arrives("z", 4, at=0.2)
    assert desk.order(0.2) == "xz"  # y came before z, but would have to be swapped in


def test_where_all_lack_memory_and_host_data_the_first_one_gets_what_it_needs():
    desk = Counter(blocks=4, kind="bidirectional", host=8)
    desk.arrives("x", 8)
    desk.arrives("y", 8)
    assert desk.order(0.0) == "xy"
    desk.arrives("a", 16, output=1, ttft=0.5, at=0.1)
    # over all that x and y have, and gone with the end of the iteration
    assert desk.order(0.1) == "a"
    # neither has all its KV, both need a third block, and none is empty
    assert desk.order(0.2) == "x"
    assert desk.preempted() == [("y", "swap")] and desk.moves() == [("x", "h2d", 8, "step")]
    assert desk.order(0.3) == "x"


# -- batch size ----------------------------------------------------------------------------------
def test_the_batch_doubles_up_to_the_seats_and_falls_back_at_an_early_return():
    limits = EngineLimits(max_num_seqs=10, kv_bytes_per_token=1)
    desk = Counter("base_batch=2", limits=limits)
    desk.arrives("x", 4, output=99)
    sizes = []
    for i in range(4):
        desk.iteration(i * 0.1)
        sizes.append(desk.policy.batch_size)
    assert sizes == [4, 8, 10, 10]
    for name in "ab":
        desk.arrives(name, 80, ttft=0.1, at=1.0)
    assert desk.order(1.0) == "ax"  # b would take the iteration past 0.1 s
    assert desk.policy.batch_size == 2
    assert desk.order(1.001) == "bx"  # of two seats x takes that of a, which has no deadline now


def test_a_fixed_batch_stays():
    desk = Counter("base_batch=2,adaptive_batch=false")
    desk.arrives("x", 4)
    desk.iteration(0.0)
    assert desk.policy.batch_size == 2


# -- memory --------------------------------------------------------------------------------------
def full(options: str = "", host: int = 16, paces=(10.0, 20.0)) -> Counter:
    """r, s, x and y hold two blocks each of ten; s has the later deadline."""
    desk = Counter(options, blocks=10, host=host)
    for name, tpot in zip("rs", paces, strict=True):
        desk.arrives(name, 7, ttft=1.0, tpot=tpot)
    desk.arrives("x", 7)
    desk.arrives("y", 7)
    assert list(desk.iteration(0.0, seconds=0.05)) == ["r", "s", "x", "y"]
    return desk


def test_best_effort_is_dropped_first_the_last_to_arrive_first():
    desk = full()
    desk.arrives("a", 24, ttft=0.03, at=0.1)  # six blocks; its deadline leaves no time for r and s
    assert desk.order(0.1) == "a"
    assert desk.preempted() == [("y", "swap"), ("x", "swap")]
    assert desk.moves() == [("y", "d2h", 7, "step"), ("x", "d2h", 7, "step")]


def test_then_real_time_by_the_largest_residual_time():
    desk = full()
    desk.arrives("a", 32, ttft=0.04, at=0.1)  # eight blocks
    assert desk.order(0.1) == "a"
    assert desk.preempted() == [("y", "swap"), ("x", "swap"), ("s", "swap")]
    assert desk.held("r") == 2


def test_nobody_of_the_batch_is_dropped():
    desk = full()
    desk.arrives("a", 32, ttft=0.5, at=0.1)  # time for all, memory for none
    assert "a" not in desk.order(0.1)
    assert not desk.preempted()


def test_real_time_preempts_blocks_of_a_best_effort_request_without_dropping_it():
    desk = Counter(blocks=4, kind="bidirectional", host=4)
    desk.arrives("x", 15)
    assert desk.order(0.0) == "x"
    desk.arrives("a", 8, output=1, ttft=0.5, at=0.1)
    # in two of x's blocks, one of them the last; x cannot run beside it
    assert desk.order(0.1) == "a"
    assert not desk.preempted() and desk.held("x") == 4
    assert desk.moves() == [("x", "d2h", 7, "step")]
    assert desk.order(0.2) == "x"
    assert desk.moves() == [("x", "h2d", 7, "step")]


# -- options and seams ---------------------------------------------------------------------------
def test_prompts_are_whole_whatever_the_token_budget():
    desk = Counter(limits=EngineLimits(max_num_batched_tokens=16))
    desk.arrives("a", 40)
    assert desk.iteration(0.0) == {"a": 40}


def test_all_but_the_longest_prompt_keep_to_the_token_budget():
    desk = Counter(limits=EngineLimits(max_num_batched_tokens=16))
    for name in "abc":
        desk.arrives(name, 12)
    # 24 tokens, 12 without the longest; with c 36 and 24
    assert desk.iteration(0.0) == {"a": 12, "b": 12}
    desk.arrives("d", 2)
    assert desk.iteration(0.1) == {"a": 1, "b": 1, "c": 12, "d": 2}


def test_a_replacement_keeps_to_the_token_budget():
    desk = Counter(limits=EngineLimits(max_num_batched_tokens=16))
    desk.arrives("a", 40, ttft=1.0)
    desk.arrives("b", 4, ttft=1.0)
    desk.arrives("x", 12)
    desk.arrives("y", 12)
    assert desk.order(0.0) == "abx"  # a and x, y in the place of b: 24 tokens beside the longest


def test_chunks():
    desk = Counter("chunk=8")
    desk.arrives("a", 20, ttft=1.0)
    grants = [desk.iteration(i * 0.1) for i in range(4)]
    assert grants == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]


def test_the_ledger_is_the_bidirectional_one_unless_it_is_ablated():
    assert parse_policy("bros").kv_name == "bidirectional"
    assert parse_policy("bros:kv=paged").kv_name == "paged"


def test_a_policy_without_best_effort_part_refuses_best_effort_requests():
    desk = Counter("best_effort=false")
    desk.arrives("x", 4)
    with pytest.raises(PolicyError, match="'x' is best-effort"):
        desk.iteration(0.0)
