"""The routers of other systems: examples worked by hand from their documentation and source."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.sim.harness import Affine
from tests.sim.routing import Scene, prompt
from twinserve.policies.errors import PolicyError
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.routers.base import Verdict
from twinserve.sim.fleet.routers.dynamo import softmax
from twinserve.sim.fleet.routers.llm_d import queue_scores
from twinserve.sim.fleet.routers.vllm_dp import pick, score


# -- vLLM's data-parallel balancer -----------------------------------------------------------------
def test_a_burst_on_idle_engines_goes_round():
    scene = Scene("vllm-dp", replicas=3)
    assert [scene.send() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    scene.view.in_flight[:] = [0, 0, 0]  # all has ended, and the next snapshot shows it
    scene.view.now = 0.1
    assert [scene.send() for _ in range(2)] == [1, 2]  # the scan goes on where it was


@pytest.mark.parametrize(
    ("counts", "under_way", "expected"),
    [
        ((0, 0, 0.9), 0, 0),
        ((5, 5, 0.5), 0, 10),  # memory at half: the queue is taken to be short-lived
        ((5, 5, 0.75), 0, 10 + 5 * 6 * 0.25),
        ((5, 5, 1.0), 0, 10 + 5 * 3),
        ((0, 10, 1.0), 0, 10),  # nobody waits
        ((1, 2, 0.0), 8, 8),  # its own count is higher than an old snapshot
    ],
)
def test_the_score_of_an_engine(counts, under_way, expected):
    assert score(counts, under_way) == pytest.approx(expected)


def test_ties_go_to_the_engine_where_the_scan_starts():
    counts = [[0, 2, 0.1]] * 3
    assert [pick(counts, [0, 0, 0], start, 1) for start in range(3)] == [0, 1, 2]


def test_what_it_sent_counts_until_the_next_snapshot():
    scene = Scene("vllm-dp", replicas=2)
    scene.loads = [(4, 0, 10), (0, 0, 0)]
    assert [scene.send() for _ in range(4)] == [1, 1, 1, 1]  # 0 to 4 beside 4
    scene.view.now = 0.09  # no snapshot yet
    scene.loads = [(0, 0, 0), (4, 0, 10)]
    assert scene.send() == 0
    scene.view.in_flight[:] = [0, 0]  # all of that has ended
    scene.view.now = 0.1
    assert [scene.send() for _ in range(2)] == [0, 0]
    scene.view.in_flight[:] = [0, 0]  # these too, and they still count
    scene.loads = [(0, 0, 0), (2, 0, 10)]
    scene.view.now = 0.2
    sent = []
    for _ in range(4):
        sent.append(scene.send())
        scene.view.in_flight[:] = [0, 0]
    assert sorted(sent) == [0, 0, 0, 1]


def test_several_clients_count_their_requests_so_often():
    scene = Scene("vllm-dp:clients=4", replicas=2)
    scene.loads = [(0, 0, 0), (3, 0, 0)]
    assert [scene.send() for _ in range(2)] == [0, 1]  # 4 beside 3


# -- SGLang's cache-aware router -------------------------------------------------------------------
def test_a_prompt_follows_its_prefix_above_the_threshold():
    scene = Scene("sglang", replicas=3)
    assert scene.send(prompt(*range(10))) == 0
    assert scene.send(prompt(*range(100, 110))) == 1  # unknown: the least loaded
    assert scene.send(prompt(*range(4), *range(50, 56))) == 0  # 40 % of it
    assert scene.send(prompt(*range(3), *range(60, 67))) == 2  # exactly 30 %: not above


def test_load_decides_where_it_is_far_apart():
    scene = Scene("sglang", replicas=2)
    document = prompt(*range(10))
    assert scene.send(document) == 0
    scene.view.in_flight[:] = [64, 0]
    assert scene.choose(document) == 0  # not more than 64 apart
    scene.view.in_flight[:] = [65, 0]
    assert scene.choose(document) == 1
    scene.view.in_flight[:] = [201, 136]  # 65 apart, but less than 1.5 times as many
    assert scene.choose(document) == 0


def test_its_tree_forgets_what_was_used_least_recently():
    scene = Scene("sglang:tree_tokens=160", replicas=2)  # ten blocks
    scene.send(prompt(*range(6)))
    scene.view.in_flight[:] = [0, 9]
    scene.send(prompt(*range(20, 28)))  # to replica 0 as well: two blocks of the first are left
    scene.view.in_flight[:] = [5, 0]
    assert scene.choose(prompt(*range(20, 28))) == 0
    assert scene.choose(prompt(*range(6))) == 0  # a third of it
    assert scene.choose(prompt(*range(2), *range(70, 76))) == 1


def test_a_replica_that_failed_has_lost_its_prompts():
    scene = Scene("sglang", replicas=2)
    scene.send(prompt(*range(10)))
    scene.down(0)
    assert scene.send(prompt(*range(10))) == 1


# -- Dynamo's KV router ----------------------------------------------------------------------------
def figure(router: str = "dynamo-kv") -> Scene:
    """The example of its documentation: a prompt of ten blocks, of which three workers have 2, 5
    and 8, with 10, 5 and 9 blocks under way."""
    scene = Scene(router, replicas=3)
    for replica, (cached, active) in enumerate([(2, 10), (5, 5), (8, 9)]):
        scene.stored(replica, *range(cached))
        other = prompt(tokens=active * 16)
        scene.router.on_dispatched(other, replica)
        scene.first_token(other, replica)
    return scene


def test_costs_of_the_example_in_its_documentation():
    """There 8 + 10, 5 + 5 and 2 + 9; the ten blocks of the prompt itself come on top of each."""
    scene, request = figure(), prompt(*range(10))
    assert scene.router.costs(request, scene.view) == [28, 20, 21]
    assert scene.choose(request) == 1
    alike = Scene("dynamo-kv", replicas=2)
    alike.stored(0, 100, 101)
    assert alike.choose(request) == 1  # that has less in its cache


def test_blocks_that_requests_share_count_once():
    scene = Scene("dynamo-kv", replicas=1)
    first, second = prompt(*range(8)), prompt(*range(6), 30, 31)
    for request in (first, second):
        scene.send(request)
        scene.first_token(request, 0)
    assert scene.router.costs(prompt(*range(4)), scene.view) == [4 + 10]  # nothing is cached yet
    scene.end(first, 0)
    assert scene.router.costs(prompt(*range(4)), scene.view) == [4 + 8]


def test_weights_of_the_cost():
    request = prompt(*range(10))
    scene = figure("dynamo-kv:scale=2,credit=0.5,request_weight=3")
    assert scene.router.costs(request, scene.view) == [
        2 * 9 + 20 + 3, 2 * 7.5 + 15 + 3, 2 * 6 + 19 + 3
    ]  # fmt: skip


def test_a_temperature_draws_by_cost():
    chances = softmax([10.0, 20.0, 30.0], 0.5)
    assert chances == pytest.approx(np.exp([0, -1, -2]) / np.exp([0, -1, -2]).sum())
    assert softmax([7.0, 7.0], 0.1).tolist() == [0.5, 0.5]
    scene, request = figure("dynamo-kv:temperature=1"), prompt(*range(10))
    picks = [scene.choose(request) for _ in range(600)]
    assert 600 > picks.count(1) > picks.count(2) > picks.count(0) > 0


def test_what_it_dispatched_counts_for_two_minutes_without_events():
    scene = Scene("dynamo-kv:index=approximate", replicas=2)
    assert not scene.router.hears_kv_events()
    document = prompt(*range(10))
    scene.send(document)
    scene.end(document, 0)
    scene.view.now = 119.0
    assert scene.router.costs(document, scene.view) == [10, 20]
    scene.view.now = 121.0
    assert scene.router.costs(document, scene.view) == [20, 20]


@examples(60)
@given(st.data())
def test_costs_are_those_of_a_recount(data):
    """Of all requests that are there, from scratch, after any coming and going."""
    scene, here = Scene("dynamo-kv", replicas=2), []  # request, replica, tokens to compute
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["send", "send", "first", "end", "cached"]))
        if what == "cached":
            scene.stored(data.draw(st.integers(0, 1)), data.draw(st.integers(0, 5)))
        elif what == "send" or not here:
            blocks = data.draw(st.integers(0, 6))
            request = prompt(*range(blocks), tokens=data.draw(st.integers(96, 140)))
            cached = scene.router._prefixes.matched(request, scene.view)
            replica = scene.send(request)
            here.append([request, replica, request.prompt_tokens - 16 * cached[replica]])
        else:
            entry = data.draw(st.sampled_from(here))
            if what == "first":
                scene.first_token(*entry[:2])
                entry[2] = 0
            else:
                scene.end(*entry[:2])
                here.remove(entry)
    request = prompt(*range(4), tokens=100)
    cached = scene.router._prefixes.matched(request, scene.view)
    expected = []
    for replica in (0, 1):
        mine = [entry for entry in here if entry[1] == replica]
        named = {int(b) for r, *_ in mine for b in r.contents(16)} if mine else set()
        others = sum(r.prompt_tokens // 16 - len(r.contents(16)) for r, *_ in mine)
        prefill = sum(tokens for *_, tokens in mine) + 100 - 16 * cached[replica]
        expected.append(prefill / 16 + len(named | set(range(4))) + others + 2)
    assert scene.router.costs(request, scene.view) == expected


# -- llm-d -----------------------------------------------------------------------------------------
def test_queue_scores_of_its_documentation():
    assert queue_scores(np.array([0.0, 5, 10])).tolist() == [1.0, 0.5, 0.0]
    assert queue_scores(np.array([7.0, 7, 7])).tolist() == [1.0, 1.0, 1.0]


def test_the_default_weights():
    """Cached 4, 2, 0 of 4 blocks; 0, 5, 10 wait; 90, 50, 10 of 100 blocks are in use."""
    scene = Scene("llm-d:index=exact", replicas=3)
    scene.loads = [(3, 0, 90), (3, 5, 50), (3, 10, 10)]
    scene.stored(0, 0, 1, 2, 3)
    scene.stored(1, 0, 1)
    scores = scene.router.scores(prompt(0, 1, 2, 3), scene.view)
    assert scores == pytest.approx([3 + 2 + 0.2, 1.5 + 1 + 1, 0 + 0 + 1.8])
    assert scene.choose(prompt(0, 1, 2, 3)) == 0


def test_its_measurements_are_50_ms_old():
    scene = Scene("llm-d", replicas=2)
    scene.history = [(0.0, [(0, 9, 0), (0, 0, 0)]), (1.0, [(0, 0, 0), (0, 9, 0)])]
    scene.view.now = 1.04
    assert scene.choose(prompt(tokens=100)) == 1
    scene.view.now = 1.06
    assert scene.choose(prompt(tokens=100)) == 0


def test_ties_are_drawn():
    scene = Scene("llm-d", replicas=4)
    picks = [scene.choose(prompt(tokens=100)) for _ in range(400)]
    assert {picks.count(i) > 60 for i in range(4)} == {True}


def test_prompts_that_it_sent_are_taken_to_be_cached():
    scene = Scene("llm-d", replicas=3)
    home = scene.send(prompt(*range(8)))
    assert [scene.send(prompt(*range(8))) for _ in range(5)] == [home] * 5


# -- Mooncake's conductor --------------------------------------------------------------------------
STEP = Affine(base=0.0, prefill=1e-3, decode=1e-2, context=0.0)  # 1 ms a token, 10 ms a decode


def conductor(options: str = "", replicas: int = 2) -> Scene:
    return Scene(f"conductor{options}", replicas, models=[STEP] * replicas)


def test_a_hit_beats_an_empty_queue_as_long_as_that_saves_more():
    """160 tokens, 128 of them on replica 0: 32 ms there, 160 ms elsewhere."""
    scene, document = conductor(), prompt(*range(10))
    scene.stored(0, *range(8))
    assert scene.router.ttft_s(document, 0, 8) == pytest.approx(0.032)
    assert [scene.send(prompt(*range(10))) for _ in range(4)] == [0, 0, 0, 0]
    assert scene.send(prompt(*range(10))) == 0  # 4 x 32 + 32 = 160 ms: the first of a tie
    assert scene.send(prompt(*range(10))) == 1


def test_what_has_its_first_token_is_in_nobodys_way():
    scene = conductor()
    first = prompt(tokens=500)
    assert scene.send(first) == 0
    assert scene.choose(prompt(tokens=10)) == 1
    scene.first_token(first, 0)
    assert scene.choose(prompt(tokens=10)) == 0


def test_a_request_whose_objectives_would_break_is_rejected():
    scene = conductor(replicas=1)
    assert scene.send(prompt(tokens=400, slo_ttft_s=0.41)) == 0
    assert scene.send(prompt(tokens=400, slo_ttft_s=0.41)) is Verdict.REJECT
    assert scene.send(prompt(tokens=400)) == 0  # it has none
    late = conductor(":reject=false", replicas=1)
    late.send(prompt(tokens=400))
    assert late.send(prompt(tokens=400, slo_ttft_s=0.41)) == 0


def test_a_request_is_rejected_where_tokens_would_come_too_slowly():
    """Steps of 10 ms a request: with an objective of 25 ms two fit."""
    scene = conductor(replicas=1)
    for expected in (0, 0, Verdict.REJECT):
        request = prompt(tokens=10, slo_tpot_s=0.025)
        assert scene.send(request) == expected
        if expected == 0:
            scene.first_token(request, 0)


def side(stage: Role) -> Scene:
    scene = conductor()
    scene.router.stage = stage
    return scene


def test_where_prefill_is_apart_it_decodes_where_tokens_come_soonest():
    """Steps of 10 ms a request, counted from its arrival on, whatever is cached: two requests on
    each of two replicas keep 25 ms."""
    scene = side(Role.DECODE)
    scene.stored(1, *range(8))
    requests = [prompt(*range(10), slo_tpot_s=0.025, slo_ttft_s=1e-9) for _ in range(5)]
    chosen = [scene.send(request, Role.DECODE) for request in requests]
    assert chosen == [0, 1, 0, 1, Verdict.REJECT]
    scene.end(requests[1], 1)
    assert scene.send(requests[4], Role.DECODE) == 1


def test_where_prefill_is_apart_only_the_first_token_is_asked_of_that_side():
    scene = side(Role.PREFILL)
    soon = {"tokens": 400, "slo_ttft_s": 0.41, "slo_tpot_s": 1e-9}
    chosen = [scene.send(prompt(**soon), Role.PREFILL) for _ in range(3)]
    assert chosen == [0, 1, Verdict.REJECT]


def test_it_needs_step_times():
    scene = Scene("conductor", replicas=1)
    scene.view.models[0] = None
    with pytest.raises(PolicyError, match="the step times of replica 0 are unknown"):
        scene.send(prompt(tokens=10))
