"""VTC: whoever has paid least goes first, and nobody gets far ahead."""

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits

ONE_SEAT = EngineLimits(max_num_seqs=1, max_model_len=64, kv_bytes_per_token=1)


def test_prompts_cost_one_and_outputs_two_and_the_poorest_goes_first():
    desk = Desk("vtc", 20, limits=ONE_SEAT)
    for name, prompt, output, group in (
        ("a0", 4, 2, 0),
        ("a1", 4, 2, 0),
        ("b0", 10, 1, 1),
        ("b1", 1, 1, 1),
    ):
        desk.submit(name, prompt, output, group=group)
    order = [list(s)[0] for s in desk.scheduled(6)]
    # a pays 4 + 2*2 = 8, then b 10 + 2 = 12, then a 16, then b
    assert order == ["a0", "a0", "b0", "a1", "a1", "b1"]
    assert desk.policy.paid == {0: 16, 1: 15}


def test_who_was_away_has_not_saved_up():
    """A newcomer starts where the poorest of those who wait is, not at 0."""
    desk = Desk("vtc", 40, limits=ONE_SEAT)
    for i in range(6):
        desk.submit(f"a{i}", 4, 3, group=0)
    desk.scheduled(6)
    paid = desk.policy.paid[0]
    assert paid == 20
    desk.submit("b0", 4, 3, group=1)
    desk.step()
    assert desk.policy.paid[1] >= paid


def test_if_nobody_waits_the_last_to_leave_the_queue_is_the_measure():
    desk = Desk("vtc", 40, limits=ONE_SEAT)
    desk.submit("a", 4, 3, group=0)
    desk.scheduled(3)
    desk.submit("b", 1, 1, group=1)
    desk.step()
    assert desk.policy.paid == {0: 10, 1: 10 + 3}


def backlog(policy: str, clients, seats: int):
    """Clients with all their requests there from the start. Yields, after each step, what the
    clients that still wait have been served (p + 2d), and what those in `policy` have paid."""
    desk = Desk(policy, 200, limits=EngineLimits(max_num_seqs=seats, max_model_len=64))
    owner = {}
    for client, requests in enumerate(clients):
        for i, (prompt, output) in enumerate(requests):
            owner[desk.submit(f"{client}.{i}", prompt, output, group=client)] = client
    table = desk.table
    while desk.stepper.core.active:
        desk.step()
        served = dict.fromkeys(range(len(clients)), 0)
        waiting = set()
        for row, client in owner.items():
            begun = table.first_scheduled_s[row] == table.first_scheduled_s[row]
            served[client] += begun * int(table.prompt_tokens[row]) + 2 * int(
                table.output_tokens[row]
            )
            waiting |= set() if begun else {client}
        yield desk, {client: served[client] for client in sorted(waiting)}


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12)


@examples(40, suppress_health_check=list(HealthCheck))
@given(st.lists(lengths, min_size=2, max_size=4), st.integers(1, 5))
def test_backlogged_clients_differ_by_no_more_than_a_batch(clients, seats):
    """Sheng et al., Lemma 4.3: at most max(w_p * L_input, w_q * M), M being the tokens that a batch
    can hold."""
    longest = max(p + d for requests in clients for p, d in requests)
    bound = max(max(p for requests in clients for p, _ in requests), 2 * seats * longest)
    for desk, served in backlog("vtc", clients, seats):
        assume(not desk.plan.preempted)
        for client, amount in served.items():
            assert desk.policy.paid[client] == amount
        if len(served) > 1:
            assert max(served.values()) - min(served.values()) <= bound


@pytest.mark.slow
def test_first_come_first_served_has_no_such_bound():
    clients = [[(5, 5)] * 40] * 2
    gaps = {
        policy: max(
            max(s.values()) - min(s.values()) for _, s in backlog(policy, clients, 2) if len(s) > 1
        )
        for policy in ("vtc", "parrot", "vllm")
    }
    assert gaps["vtc"] <= 2 * 2 * 10 < 400 < gaps["vllm"]


def test_the_last_one_admitted_gives_way():
    desk = Desk("vtc:watermark=0", 4, host=8)
    for name, group in (("a", 0), ("b", 1)):
        desk.submit(name, 7, 4, group=group)
    assert desk.scheduled(3)[-1] == {"a": 1}
    assert desk.preempted() == [("b", "swap")]


def test_a_run_of_decodes_lasts_until_it_is_another_clients_turn():
    """A request of `a` and one of `b` do not fit; `a` pays 2 with each step of its decode."""
    desk = Desk("vtc:watermark=0", 4)
    desk.submit("a0", 4, 12, group=0)
    desk.submit("a1", 16, 1, group=0)
    desk.step()
    desk.submit("b0", 16, 1, group=1)
    desk.policy.paid[1] = 15
    desk.step()
    quiet = desk.policy.quiet_steps(desk.plan, desk.ledger)
    heads = []
    while 1 not in heads:
        desk.step()
        heads.append(desk.policy.waiting.first())
    assert quiet == len(heads) - 2 > 0
