"""Prefill apart from decode: the hand-over of single requests, by the clock."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.apart import Apart, hand_over, inputs_of, parts_add_up
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.connector import parse_rule
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.setup.audit import CROWDED
from twinserve.traces.workload import Workload

ROOMY = CROWDED.model_copy(update={"num_blocks": 400, "exact": True})
BYTES = 131_072  # of a token's KV
RATE, LATENCY = 1e8, 2e-3
NETWORK = (RATE, LATENCY)


def some(prompts, outputs=None, arrival=None) -> Workload:
    n = len(prompts)
    arrival = np.zeros(n) if arrival is None else np.array(arrival, float)
    outputs = np.full(n, 5) if outputs is None else np.array(outputs)
    return Workload.build(arrival, np.array(prompts), outputs)


def run_of(workload, connector=None, config=ROOMY, events=(), network=NETWORK, **more):
    """events: (seconds, what to call with the run)."""
    run = Apart(inputs_of(workload, connector or hand_over(), config), network=network, **more)

    def happen():
        for at_s, what in events:
            yield run.clock.at(at_s, BEFORE_STEPS)
            what(run)

    run.clock.process(happen())
    run.run()
    rows = run.rows()
    parts_add_up(rows)
    return run, rows


def stays_of(rows, role):
    return rows.placements[rows.placements["role"] == role].reset_index(drop=True)


def sent_s(tokens: int) -> float:
    return LATENCY + -(-tokens // 8) * 8 * BYTES / RATE


def test_the_clients_first_token_comes_from_the_decode_replica():
    _, rows = run_of(some([100]))
    (request,) = rows.requests.itertuples()
    prefill, decode = rows.placements.itertuples()
    assert (prefill.role, prefill.outcome, prefill.output_tokens) == ("prefill", "handed_over", 0)
    assert (decode.role, decode.outcome, decode.output_tokens) == ("decode", "completed", 5)
    assert request.first_token_s > decode.load_end_s > prefill.ended_s
    assert request.transfer_s == pytest.approx(sent_s(100), rel=1e-9)
    assert request.prefill_s == prefill.ended_s and request.replica == 1
    assert rows.gaps["count"].sum() == 4


def test_a_prefill_replica_keeps_the_blocks_until_they_have_been_fetched():
    run, rows = run_of(some([100, 8], arrival=[0.0, 0.05]))
    kept, fetched = stays_of(rows, "prefill"), stays_of(rows, "decode")
    assert kept["released_s"].tolist() == fetched["load_end_s"].tolist()
    later = rows.steps[(rows.steps["replica"] == 0) & (rows.steps["start_s"] == 0.05)]
    assert later["kv_used_blocks"].tolist() == [13 + 1]  # the first one's are still there
    assert run.engines[0].core.ledger.usage().free == 400


def test_the_conductor_chooses_both_replicas_when_a_request_arrives():
    """So three that come together go to three decode replicas, though their prompts are computed
    one after another; and who would get tokens too late is rejected before its prompt is."""
    config = ROOMY.model_copy(update={"router": "conductor"})
    workload = some([100] * 3, outputs=[2, 2, 2])
    _, rows = run_of(workload, hand_over(router="conductor"), config, decode=3)
    assert sorted(stays_of(rows, "decode")["replica"]) == [1, 2, 3]
    workload = replace(workload, slo_tpot_s=np.array([np.nan, np.nan, 1e-9]))
    _, rows = run_of(workload, hand_over(router="conductor"), config, decode=3)
    assert rows.requests["outcome"].tolist() == ["completed", "completed", "rejected"]
    assert len(stays_of(rows, "prefill")) == 2


# -- leases ----------------------------------------------------------------------------------------
def late_decode(lease_s: float, recompute: bool, at_s: float):
    """The only decode replica fails before the prompt is computed; another comes at `at_s`."""
    events = [
        (1e-4, lambda run: run.fleet.fail(1)),
        (at_s, lambda run: run.add(run.kinds[Role.DECODE])),
    ]
    return run_of(some([100]), hand_over("none", lease_s, recompute), events=events)


def test_a_load_that_fails_fails_the_request_by_default():
    _, rows = late_decode(0.5, recompute=False, at_s=1.0)
    assert rows.requests["outcome"].tolist() == ["failed"]


# -- failures --------------------------------------------------------------------------------------
def test_prompts_are_computed_by_decode_replicas_while_no_prefill_replica_is_up():
    events = [(1e-4, lambda run: run.fleet.fail(0))]
    _, rows = run_of(some([100, 100], arrival=[0.1, 0.2]), events=events)
    assert rows.placements["role"].tolist() == ["decode"] * 2
    assert rows.requests["finished"].all() and rows.requests["queue_s"].notna().all()


# -- local prefill ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "prompt", "cached", "least", "local"),
    [
        ("none", 10, 9, 99, False),
        ("llm-d", 10, 10, 0, False),
        ("llm-d:threshold=512", 1000, 488, 0, False),
        ("llm-d:threshold=512", 1000, 489, 0, True),
        ("dynamo", 4000, 2000, 0, True),
        ("dynamo", 4000, 1952, 0, False),
        ("dynamo", 1000, 300, 0, False),
        ("dynamo", 1000, 301, 0, True),
        ("dynamo:busy=4", 9000, 0, 3, False),
        ("dynamo:busy=4", 9000, 0, 4, True),
    ],
)
def test_rules_of_local_prefill(rule, prompt, cached, least, local):
    assert parse_rule(rule).local(prompt, cached, least) is local


# -- draining --------------------------------------------------------------------------------------
def test_a_router_that_sends_a_computed_prompt_to_be_computed_again_is_stopped():
    class Always(LeastRequests):
        def place(self, request, stage, view):
            return 0

    with pytest.raises(ValueError, match="replica 0, which is up for prefill; give one of view.up"):
        run_of(some([60]), router=Always())


def test_a_prefill_replica_that_drains_is_down_when_all_has_been_fetched():
    run, rows = run_of(some([100]), events=[(1e-3, lambda run: run.fleet.drain(0))])
    (kept,) = stays_of(rows, "prefill").itertuples()
    assert rows.replicas["down_s"][0] == kept.released_s > kept.ended_s
    assert rows.requests["finished"].all() and run.engines[0].core.ledger.usage().free == 400
