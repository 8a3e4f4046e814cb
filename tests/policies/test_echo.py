"""Echo's scheduler by hand: deadlines, plan edits, victims, threshold, and what each rung of the
ladder adds."""

import numpy as np
import pytest

from tests.policies.echo_runs import BY_HAND, LADDER, echo_ledgers
from tests.policies.policy_runs import BE, RT, Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import parse_policy

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400, kv_bytes_per_token=1
)


@pytest.fixture(autouse=True)
def ledgers():
    with echo_ledgers():
        yield


def desk(policy: str = "echo", blocks: int = 100, kind: str = "task-aware", **limits) -> Desk:
    made = Desk(policy, blocks, kind=kind, limits=LIMITS, estimator=BY_HAND)
    made.ledger.pool.new_contents(1000)  # of shared texts
    return made


def text(start: int, blocks: int) -> np.ndarray:
    """A text of its own for each `start`, in blocks of four tokens."""
    return 20 * start + np.arange(blocks)


# -- deadlines (Sec. 5.1) --------------------------------------------------------------------------
# An online request has its first token at 1 s; an offline prompt of 70 tokens comes then. c tokens
# of it beside the online decode are estimated at 0.1 c + 0.203 s, within SLO_r = TTFT + i * TPOT -
# waiting; iterations really take a second.
@pytest.mark.parametrize(
    ("options", "ttft", "tpot", "chunks"),
    [
        # i = 1 at 1 s, i = 2 at 2 s: 3.25 s each
        ("", 3.25, 1.0, [30, 30, 10]),
        # 2.75 + 1.5 - 1 = 3.25 s, then half a second more each time
        ("", 2.75, 1.5, [30, 35, 5]),
        # the next token is due a TPOT after the last one
        (":slo=gap", 3.25, 1.25, [10] * 7),
        # 0.55 s, and a decode alone takes 0.405 s: it can be kept, with 3 tokens beside it
        ("", 0.55, 1.0, [3, 3, 3]),
        # 0.1 + 1.05 - 1 = 0.15 s: too late even alone; then TPOT is the pace, 1.05 s, and 0.2 s the
        # next time
        ("", 0.1, 1.05, [8, 8]),
        # without the estimator the token budget alone counts
        (":slo_aware=false", 0.1, 1.0, [63, 7]),
    ],
)
def test_the_online_slo_bounds_the_iteration(options, ttft, tpot, chunks):
    d = desk("echo" + options)
    d.submit("on", 4, 20, service_class=RT, slo_ttft_s=ttft, slo_tpot_s=tpot)
    d.step()
    d.submit("off", 70, 2, service_class=BE)
    assert d.scheduled(len(chunks)) == [{"on": 1, "off": n} for n in chunks]


def test_online_prompts_come_in_order_and_the_first_never_stands_still():
    """Decodes alone take 0.5 s (contexts of 300) and their SLO leaves no time: a block of the first
    prompt goes on."""
    d = desk("echo", blocks=300)
    d.submit("late", 60, 9, service_class=RT, slo_ttft_s=0.01, slo_tpot_s=0.01)
    d.step()
    d.submit("a", 20, 1, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=0.01)
    d.submit("b", 20, 1, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=0.01)
    d.submit("off", 20, 1, service_class=BE)
    assert d.scheduled(3) == [{"late": 1, "a": 4}] * 3


def test_an_offline_request_does_not_delay_an_online_one():
    """Online first, whatever came first; offline fills what is left."""
    d = desk("echo")
    d.submit("off", 60, 3, service_class=BE)
    d.step()
    d.submit("on", 60, 3, service_class=RT, slo_ttft_s=6.0, slo_tpot_s=1.0)
    # 12 s, too late for 6 s: it is served at once all the same, and an offline decode beside it
    # makes it no later
    assert d.scheduled(1) == [{"on": 60, "off": 1}]


# -- plan edits (Sec. 4.1, eq. 4) ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "planned"),
    [
        ("echo", [{"b": 4, "a": 44, "c": 16}, {"b": 1, "a": 1, "c": 28}]),
        ("echo:offline=climb,b_hit=1", [{"b": 4}, {"b": 1, "a": 44, "c": 19}]),
    ],
)
def test_the_longest_cached_text_is_taken_first(policy, planned):
    """Three documents of ten blocks. The second is in the cache; its tokens count (`b_hit`) or not:
    then all three rewards are 5, and the longest cached text comes first.

    | candidate | hit | new | reward (hit + new) / (0.2 s * new) |
    |-----------|-----|-----|------------------------------------|
    | a, cold   |  0  | 44  | 5                                  |
    | b, cached | 40  |  4  | 55                                 |
    | c, cold   |  0  | 44  | 5                                  |

    Then a's prompt, and 16 tokens of c's: that is all the budget leaves. By `climb` a's prompt
    waits, as with b in it lowers the reward of the iteration, (44 + 44) / 9.6 s < 44 / 0.8 s. Then
    b decodes, 1 token in 0.445 s: a's 44 make it 45 in 4.62 s, and 19 of c's, 64 in 6.52 s.
    """
    d = desk(policy)
    d.submit("b0", 40, 1, service_class=BE, prefix=text(1, 10))
    d.step()
    for name, document in (("a", 0), ("b", 1), ("c", 2)):
        d.submit(name, 44, 3, service_class=BE, prefix=text(document, 10))
    assert d.scheduled(1) == planned[:1]
    assert d.plan.admitted[0] == (2, 40)
    assert d.scheduled(1) == planned[1:]


def test_first_come_first_served_without_the_scheduler():
    d = desk("echo-bs-e", kind="cached")
    d.submit("b0", 40, 1, service_class=BE, prefix=text(1, 10))
    d.step()
    for name, document in (("a", 0), ("b", 1), ("c", 2)):
        d.submit(name, 44, 3, service_class=BE, prefix=text(document, 10))
    assert d.scheduled(1) == [{"a": 44, "b": 4, "c": 16}]


def test_questions_on_a_document_wait_for_the_one_that_computes_it():
    """Budget 64, a document of 80 tokens, three questions: one computes it, the others find it."""
    d = desk("echo")
    for name in ("q0", "q1", "q2"):
        d.submit(name, 84, 2, service_class=BE, prefix=text(0, 20))
    assert d.scheduled(2) == [{"q0": 64}, {"q0": 20, "q1": 4, "q2": 4}]
    assert d.plan.admitted == [(1, 80), (2, 80)]


# Decoding takes 0.4 s + 1 ms a token of the longest. Contexts of 21, 21, 305 tokens and the one
# computed: k = 1: 1 / 0.422 = 2.4;  k = 2: 2 / 0.422 = 4.7;  k = 3: 3 / 0.706 = 4.2.
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("echo:offline=climb", {"s0", "s1"}),
        ("echo", {"s0", "s1", "long"}),
        ("echo-bs-e", {"s0", "s1", "long"}),
    ],
)
def test_only_climb_leaves_a_long_decode_out_for_the_reward(policy, expected):
    d = desk(policy, blocks=300)
    d.submit("long", 299, 30, service_class=BE)
    for _ in range(5):
        d.step()
    d.submit("s0", 20, 30, service_class=BE)
    d.submit("s1", 20, 30, service_class=BE)
    d.step()
    assert set(d.scheduled(2)[1]) == expected
    assert d.held("long")  # it keeps its memory


def test_b_decode_weighs_decodes_against_prompts():
    """1 token in 0.445 s, or 45 in 4.62 s: 2.2 < 9.7 at b = 1, but 22 > 11.7 where a decoded token
    counts for ten. `climb` weighs them."""
    for b, expected in ((1, {"a": 44}), (10, {})):
        d = desk(f"echo:offline=climb,b_decode={b}")
        d.submit("b", 44, 9, service_class=BE)
        d.step()
        d.submit("a", 44, 9, service_class=BE)
        assert d.scheduled(1) == [{"b": 1, **expected}]


@pytest.mark.parametrize(
    ("wanted", "expected"), [(True, {"old": 1}), (False, {"old": 1, "cold": 16})]
)
def test_what_an_eviction_loses_counts_against_a_prompt(wanted, expected):
    """Eq. 2. Of 21 blocks 20 hold a cached text and one a request that decodes, 1 token in 0.404 s:
    2.5 a second.

    A prompt of 16 tokens makes it 17 in 1.8 s, 9.4 a second, but pushes four blocks out. If a
    queued request wants them (one that does not fit now), that is 17 - 16 in 1.8 s, 0.6 a second.
    """
    d = desk("echo", blocks=21)
    d.submit("hot", 80, 1, service_class=BE, prefix=text(0, 20))
    d.scheduled(2)
    d.submit("old", 3, 9, service_class=BE)
    d.step()
    if wanted:
        d.submit("large", 140, 1, service_class=BE, prefix=text(0, 35))
    d.submit("cold", 16, 1, service_class=BE, prefix=text(3, 4))
    assert d.scheduled(1) == [expected]


# -- memory ----------------------------------------------------------------------------------------
def hold(d: Desk, **tokens: int) -> None:
    for name, n in tokens.items():
        d.submit(name, n, 40, service_class=BE)
    for _ in range(3):
        d.step()
    assert all(d.held(name) for name in tokens)


@pytest.mark.parametrize(
    ("policy", "need", "gone"),
    [
        # blocks of 4: a holds 3, b 8, c 5 of 18; 2 are free
        ("echo", 16, ["a"]),  # 4 blocks, 2 more: all would do, a loses least
        ("echo", 26, ["c"]),  # 7 blocks, 5 more: b or c, c loses less
        ("echo", 52, ["b", "a"]),  # 13, 11 more: none alone; b gives most, then a is enough
        ("echo-bs", 16, ["c"]),  # the last to arrive
        ("echo-bs", 36, ["c", "b"]),
    ],
)
def test_an_online_request_takes_the_memory_that_is_missed_least(policy, need, gone):
    d = desk(policy, blocks=18, kind="task-aware")
    hold(d, a=9, b=29, c=17)
    assert [d.held(name) for name in "abc"] == [3, 8, 5]
    d.submit("on", need, 1, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=99.0)
    d.step()
    assert d.preempted() == [(name, "recompute") for name in gone]


def test_an_online_request_waits_if_no_eviction_would_help():
    d = desk("echo", blocks=18)
    d.submit("first", 40, 9, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=99.0)
    hold(d, a=8)
    d.submit("on", 40, 1, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=99.0)
    d.step()
    assert d.preempted() == [] and d.held("a") and not d.held("on")


def test_preempted_offline_requests_go_on_later_and_find_their_text():
    d = desk("echo", blocks=18)
    hold(d, a=30)
    d.submit("on", 60, 2, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=99.0)
    d.step()
    assert d.preempted() == [("a", "recompute")]
    for _ in range(4):
        d.step()
    assert d.table.hit_tokens[0] == 0 and d.held("a")
    assert d.table.recomputes[0] == 1


# -- threshold (Sec. 4.2, 5.3) ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "offline_tokens", "admitted"),
    [
        # online memory at 0, 1, .. 4 s: 0, 10, 10, 0, 1 blocks, so mu = 4.2 and sigma = 4.75. mu +
        # 2 sigma is 13.7: of 40 blocks 14 are for online requests, which hold one of them, and 26
        # for offline ones
        ("", 104, True),
        ("", 105, False),
        (":sigmas=0", 140, True),  # 5 blocks
        (":sigmas=0", 141, False),
        (":threshold=false", 156, True),
        (":threshold=false", 157, False),
    ],
)
def test_offline_requests_are_begun_below_the_threshold(options, offline_tokens, admitted):
    d = desk("echo" + options, blocks=40)
    d.submit("on", 38, 3, service_class=RT, slo_ttft_s=99.0, slo_tpot_s=99.0)
    for _ in range(3):
        d.step()
    assert d.table.state[0] == 3
    d.submit("tiny", 1, 30, service_class=RT, slo_ttft_s=999.0, slo_tpot_s=999.0)
    d.step()
    d.submit("off", offline_tokens, 1, service_class=BE)
    d.step()
    assert bool(d.held("off")) == admitted


# -- the ladder ------------------------------------------------------------------------------------
def test_the_ladder_is_a_matter_of_options_and_memory():
    parts = ("slo_aware", "kv_aware", "threshold")
    seen = {}
    for name in LADDER:
        spec = parse_policy(name)
        options = spec.build(LIMITS, BY_HAND).options
        seen[name] = ([getattr(options, part) for part in parts], spec.kv_name)
    assert seen == {
        "echo-bs": ([False, False, False], "paged"),
        "echo-bs-e": ([True, False, False], "paged"),
        "echo-bs-e-s": ([True, True, False], "paged-rc"),
        "echo": ([True, True, True], "task-aware"),
    }


def test_step_times_are_asked_for_only_where_they_are_used():
    assert parse_policy("echo-bs").build(LIMITS, None).cost.seconds([(4, 0)], 1, 9, 9) == 0.0
    with pytest.raises(PolicyError, match="has no estimator"):
        parse_policy("echo").build(LIMITS, None)


# -- feedback --------------------------------------------------------------------------------------
def test_feedback_learns_what_an_iteration_really_takes():
    """Iterations take 1 s; estimated are 0.8 s for the prompt, then 0.405 s. The factor goes half
    of the way each time."""
    d = desk("echo:feedback=0.5")
    d.submit("on", 4, 9, service_class=RT, slo_ttft_s=9.0, slo_tpot_s=9.0)
    d.step()
    assert d.policy.online.factor == pytest.approx(1 + 0.5 * (1 / 0.8 - 1))
    before = d.policy.online.factor
    d.step()
    assert d.policy.online.factor == pytest.approx(before + 0.5 * (1 / 0.405 - before))
