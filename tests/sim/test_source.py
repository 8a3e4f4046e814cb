"""Who is submitted when, and to which replica: arrivals, sessions, applications, the closed-loop
pool."""

import numpy as np
import pytest

from tests.sim.harness import Affine, build, hybrid, prefixes, simulate
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.registry import policy_names
from twinserve.sim.fleet.prefix_index import content_ids, shared_contents
from twinserve.sim.results.files import POOL_GROUP
from twinserve.traces.workload import (
    ApplicationInfo,
    BestEffortPool,
    PrefixBlocks,
    Workload,
    WorkloadError,
)

# a request of n output tokens takes n seconds
STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)
NAN = float("nan")


def groups(arrival, output, group, stage, delay=None, names=("s",), **more):
    n = len(arrival)
    return Workload.build(
        arrival,
        [8] * n,
        output,
        group=np.array(group),
        stage=np.array(stage),
        delay_s=np.array([0.0] * n if delay is None else delay),
        group_names=list(names),
        **more,
    )


# -- arrivals --------------------------------------------------------------------------------------
def test_requests_come_in_order_of_arrival_and_ties_in_order_of_the_list():
    arrival = [2.0, 0.5, 2.0, 0.0, 0.5]
    sim = simulate(Workload.build(arrival, [8] * 5, [1] * 5), model=STEP)
    assert sim.requests.request_id.tolist() == ["r3", "r1", "r4", "r0", "r2"]
    assert sim.requests.arrival_s.tolist() == sorted(arrival)


def test_arrivals_are_the_traces_to_the_last_bit():
    arrival = np.cumsum(np.random.default_rng(0).exponential(0.1, 200)) + 1e6 / 3
    sim = simulate(Workload.build(arrival, [8] * 200, [3] * 200), audit=False)
    assert np.array_equal(sim.requests.arrival_s, arrival)


def test_columns_reach_the_engine():
    workload = hybrid(0, 20)
    rows = simulate(workload).requests.set_index("request_id").loc[workload.ids]
    for column in ("prompt_tokens", "output_tokens", "priority", "stage"):
        assert rows[column].tolist() == getattr(workload, column).tolist()
    for column in ("slo_ttft_s", "slo_tpot_s"):
        assert np.array_equal(rows[column], getattr(workload, column), equal_nan=True)
    assert rows.service_class.tolist() == np.array(["rt", "be"])[workload.service_class].tolist()
    grouped = workload.group >= 0
    assert rows.group.notna().tolist() == grouped.tolist()
    assert rows.group[grouped].tolist() == [
        workload.group_names[g] for g in workload.group[grouped]
    ]


# -- sessions and applications ---------------------------------------------------------------------
def test_a_turn_comes_its_delay_after_the_end_of_the_turn_before():
    workload = groups(
        [1.0, NAN, NAN, NAN], [2, 3, 1, 1], [0] * 4, [0, 1, 2, 3], [0.0, 0.0, 10.5, 0.25]
    )
    requests = simulate(workload, model=STEP).requests
    assert requests.arrival_s.tolist() == [1.0, 3.0, 16.5, 17.75]
    assert requests.last_token_s.tolist() == [3.0, 6.0, 17.5, 18.75]


def test_a_turn_without_delay_is_in_the_next_step():
    """Its predecessor's end and the next decision are at one instant, with other work going on."""
    workload = groups([0.0, 0.0, NAN], [12, 2, 1], [-1, 0, 0], [0, 0, 1])
    requests = simulate(workload, model=STEP).requests.set_index("request_id")
    assert requests.arrival_s["r2"] == requests.first_scheduled_s["r2"] == 2.0


def test_a_stage_waits_for_the_last_row_of_the_one_before():
    workload = groups(
        [0.0, NAN, NAN, NAN, NAN], [1, 4, 2, 7, 1], [0] * 5, [0, 1, 1, 1, 2], [0, 0, 0, 2.0, 1.5]
    )
    requests = simulate(workload, model=STEP).requests.set_index("request_id")
    # the last of stage 1 ends at 10 s
    assert requests.arrival_s.tolist() == [0.0, 1.0, 1.0, 3.0, 11.5]
    assert requests.index.tolist() == ["r0", "r1", "r2", "r3", "r4"]


# -- the pool --------------------------------------------------------------------------------------
def pooled(until_s, batch=4, **more):
    workload = Workload.build([0.0, 30.0], [8, 8], [2, 2])
    pool = BestEffortPool(batch, (5, 20), (2, 9), seed=1, until_s=until_s)
    return simulate(Workload(**{**vars(workload), "pool": pool}), model=STEP, **more)


def batches(sim):
    requests = sim.requests
    return requests[requests.group == POOL_GROUP].groupby("stage")


def test_the_next_batch_comes_when_the_last_request_of_the_former_ends():
    rounds = batches(pooled(25.0))
    arrivals, ends = rounds.arrival_s, rounds.last_token_s.max()
    assert (arrivals.nunique() == 1).all() and (rounds.size() == 4).all()
    assert len(ends) > 2
    assert arrivals.first().tolist() == [0.0, *ends.tolist()[:-1]]
    assert (rounds.service_class.first() == "be").all()


def test_no_batch_comes_at_or_after_the_end_of_the_loop():
    rounds = batches(pooled(25.0))
    first, ends = rounds.arrival_s.first(), rounds.last_token_s.max()
    assert first.max() < 25.0 <= ends.max()
    exactly = float(ends.iloc[1])  # the loop ends at the very time at which a batch would come
    assert len(batches(pooled(exactly))) == 2
    assert len(batches(pooled(np.nextafter(exactly, 99)))) == 3


def test_without_an_end_the_loop_runs_to_the_last_arrival():
    first = batches(pooled(None)).arrival_s.first()
    assert 20 < first.max() < 30.0
    assert first.equals(batches(pooled(30.0)).arrival_s.first())


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_gets_the_same_pool_requests(policy):
    """How many batches come depends on how fast they are served, what is in batch k does not."""
    workload = hybrid(0, 20, pool=5)
    requests = simulate(workload, policy, audit=False).requests
    pool = requests[requests.group == POOL_GROUP]
    assert pool.stage.max() >= 1
    for k, batch in pool.groupby("stage"):
        prompts, outputs = workload.pool.draw(k)
        assert batch.request_id.tolist() == [f"be-{k}-{i}" for i in range(5)]
        assert batch.prompt_tokens.tolist() == prompts.tolist()
        assert batch.output_tokens.tolist() == outputs.tolist()


# -- replicas --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_sessions_stay_on_their_replica_and_the_pool_is_spread():
    requests = simulate(hybrid(2, 40, rate=60, sessions=8, pool=9), replicas=3).requests
    sessions = requests[requests.group.notna() & (requests.group != POOL_GROUP)]
    assert (sessions.groupby("group").replica.nunique() == 1).all()
    assert sessions.replica.nunique() == 3
    assert requests[requests.group == POOL_GROUP].replica.nunique() == 3


def test_nothing_is_lost_among_replicas():
    workload = hybrid(3, 40, pool=6)
    requests = simulate(workload, replicas=3).requests
    listed = requests[requests.group != POOL_GROUP]
    assert sorted(listed.request_id) == sorted(workload.ids)
    assert requests.finished.all()


# -- prefix blocks as KV blocks --------------------------------------------------------------------
def blocks_workload(block_tokens, prompts, ids):
    offsets = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
    prefix = PrefixBlocks(np.concatenate(ids).astype(np.int64), offsets, block_tokens)
    return Workload.build([0.0] * len(prompts), prompts, [1] * len(prompts), prefix=prefix)


def test_kv_blocks_inside_a_trace_block_are_told_apart_by_place():
    # |--- 32 ---|--- 32 ---|- 6 -|  prompt of 70 tokens, KV blocks of 16
    workload = blocks_workload(32, [70, 64], [[0, 1, 2], [0, 3]])
    assert content_ids(workload, 0, 16).tolist() == [0, 1, 2, 3]  # 70 // 16 = 4 full ones
    assert content_ids(workload, 1, 16).tolist() == [0, 1, 6, 7]
    assert shared_contents(workload, 16) == 8


def test_a_kv_block_over_several_trace_blocks_is_named_by_the_last():
    workload = blocks_workload(16, [70, 64], [[0, 1, 2, 3, 4], [0, 1, 2, 5]])
    assert content_ids(workload, 0, 32).tolist() == [1, 3]
    assert content_ids(workload, 1, 32).tolist() == [1, 5]
    assert shared_contents(workload, 32) == 6


def test_equal_content_ids_mean_equal_text():
    """Against the definition: a KV block's text is the ids of all trace blocks up to its end, and
    its end."""
    rng = np.random.default_rng(0)
    for trace_block, kv_block in ((64, 16), (16, 64), (32, 32)):
        prompts = rng.integers(1, 700, 60)
        prefix = prefixes(rng, prompts, trace_block)
        workload = Workload.build(np.zeros(60), prompts, np.ones(60, int), prefix=prefix)
        text_of: dict[int, tuple] = {}
        id_of: dict[tuple, int] = {}
        shared = 0
        for row in range(60):
            contents = content_ids(workload, row, kv_block)
            assert len(contents) == prompts[row] // kv_block
            for i, content in enumerate(contents.tolist()):
                end = (i + 1) * kv_block
                text = (end, *prefix.of(row)[: -(-end // trace_block)].tolist())
                shared += text in id_of
                assert text_of.setdefault(content, text) == text
                assert id_of.setdefault(text, content) == content
        assert shared > 20
        assert max(text_of) < shared_contents(workload, kv_block)


def test_block_sizes_that_do_not_nest_are_refused_in_one_line():
    with pytest.raises(
        WorkloadError, match="prefix blocks of 24 tokens and KV blocks of 16 tokens do not nest"
    ):
        build(blocks_workload(24, [30], [[0, 1]]))


def test_an_application_is_known_before_its_requests():
    """Two stages of two rows: the policy hears of the application once, before its first row, with
    what it is."""
    heard = []

    class Listening(VllmPolicy):
        def on_application(self, application):
            heard.append(
                (application.name, application.kind, application.text, application.arrival_s)
            )

        def on_arrival(self, row, requests):
            heard.append((requests.ids[row], int(requests.stage[row])))
            super().on_arrival(row, requests)

    workload = Workload.build(
        [1.0, 1.0, np.nan, np.nan],
        [8, 8, 8, 8],
        [2, 2, 2, 2],
        group=np.zeros(4, np.int64),
        stage=np.array([0, 0, 1, 1]),
        group_names=["merge"],
        applications={0: ApplicationInfo("document merging", "two texts")},
    )
    simulate(workload, Listening)
    assert heard == [
        ("merge", "document merging", "two texts", 1.0),
        ("r0", 0),
        ("r1", 0),
        ("r2", 1),
        ("r3", 1),
    ]


def test_rows_carry_the_text_of_their_application():
    workload = groups(
        [0, NAN, 1],
        [2, 1, 1],
        [0, 0, -1],
        [0, 1, 0],
        applications={0: ApplicationInfo("summary", "a text")},
    )
    table = simulate(workload, model=STEP).engines[0].core.requests
    assert dict(zip(table.ids, table.text, strict=True)) == {
        "r0": "a text",
        "r2": None,
        "r1": "a text",
    }
