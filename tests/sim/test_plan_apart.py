"""Plans with prefill apart from decode, and the staircase, beside brute force over
all splits."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.planned import GPU, MODEL, settings, write_trace
from twinserve.sim.plan.apart import Answer, Split, said_of, staircase
from twinserve.sim.plan.document import described
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.show import apart_lines
from twinserve.sim.plan.trial import TrialSpec, run_trial
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.fleet_file import of_roles
from twinserve.sim.sweep.executors import InThisProcess

PRICES = read_prices("gpu,usd_per_hour\na100-40g,2\n", "prices")
SLO = "ttft p90 < 800 ms, tpot p90 < 25 ms"


def planned(trace: str, slo: str = SLO, **asked) -> Plan:
    question = Question(
        MODEL, (trace,), slo, (GPU,), (1,), peak_s=10.0, lead_s=1.0, prefill_decode=True
    )
    return make_plan(replace(question, **asked), PRICES, InThisProcess())


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart") / "trace.csv"
    return write_trace(path, seed=3, count=300, rate=25.0, longest=3000)


@pytest.fixture(scope="module")
def plan(trace):
    return planned(trace)


def spec_of(plan: Plan, split: Split, **more) -> TrialSpec:
    """Of its first row's replicas in these roles."""
    (peak,) = plan.peaks
    config = plan.best.candidate.config.model_dump(mode="json")
    config |= peak.settings(1) | {"fleet": str(split)}
    return TrialSpec(config, peak.since_s, **more)


@pytest.mark.nightly
def test_no_split_with_fewer_replicas_is_enough(plan):
    (one,) = plan.apart
    assert one.split is not None and 3 <= one.split.total <= one.most
    assert one.aggregated[0].replicas == plan.best.replicas
    fewer = one.split.total - 1
    for prefill in range(1, fewer):
        split = Split(prefill, fewer - prefill)
        assert not run_trial(spec_of(plan, split, early=False)).keeps, split
    assert run_trial(spec_of(plan, one.split, early=False)).keeps


@pytest.mark.nightly
@pytest.mark.parametrize("split", [Split(1, 1), Split(1, 4), Split(4, 1), Split(3, 3)])
def test_ending_early_changes_no_verdict(plan, split):
    """The token that a prefill replica gives is no client's, and no verdict rests on it."""
    early, whole = (run_trial(spec_of(plan, split, early=flag)) for flag in (True, False))
    assert early.keeps == whole.keeps
    assert set(early.missed) <= set(whole.missed)


@pytest.mark.slow
def test_a_decode_replicas_token_is_judged_not_the_prefill_replicas(trace):
    """A network so slow that every transfer takes longer than the objective: all are late, however
    soon prompts are computed."""
    pools = of_roles(6, 6)["pools"]
    slow = [{**pool, "ports": {"network_latency_us": 900_000.0}} for pool in pools]
    config = settings(trace, SLO) | {"requests": 40}
    late = run_trial(TrialSpec(config | {"fleet": json.dumps({"pools": slow})}, early=False))
    soon = run_trial(TrialSpec(config | {"fleet": json.dumps({"pools": pools})}, early=False))
    assert late.objectives[0].kept == 0 and soon.objectives[0].kept > 0
    assert not run_trial(TrialSpec(config | {"fleet": json.dumps({"pools": slow})})).keeps


@pytest.mark.slow
def test_what_is_said_and_told(plan):
    (one,), (head, line) = plan.apart, apart_lines(plan)
    assert head == "prefill apart from decode, on the same GPUs:"
    assert str(one.split) in line and f"${2 * one.split.total:.2f} an hour" in line
    (told,) = described(plan, PRICES)["apart"]
    assert told["prefill_replicas"] + told["decode_replicas"] == told["gpus"] == one.split.total
    assert told["tried"] == [str(split) for split in one.tried]
    assert told["sized"]["attained"] and told["fleet"]["pools"][0]["role"] == "prefill"
    ends = dict.fromkeys([told["steps_fast"], told["steps_slow"]])
    assert f"steps off {' to '.join(ends)}: " in line
    assert one.fast.total <= one.split.total <= one.slow.total
    (same,) = (size for size in one.aggregated if size.replicas == one.compared)
    assert same.answer == one.sized.answer and f" {one.compared} that do both (" in line
    other = replace(one, aggregated=(SimpleNamespace(replicas=9, answer="fails"),))
    assert ", not compared with 9 that do both (fails)" in said_of(other, "it", "")
    shares = [kept["share"] for peak in told["sized"]["attained"] for kept in peak]
    assert np.min(shares) >= 0.9


@pytest.mark.slow
def test_where_no_split_is_enough_it_is_said(trace):
    """Two replicas of each kind are allowed, and one that does both is enough."""
    plan = planned(trace, "ttft p90 < 30 s, tpot p90 < 500 ms", most_gpus=2, grow=0.05)
    assert plan.best.replicas == 1
    (one,) = plan.apart
    assert one.most == 2 and one.tried == (Split(1, 1),)
    assert apart_lines(replace(plan, apart=())) == [
        "prefill apart from decode was not tried: no row of policy vllm is enough"
    ]
    none = planned(trace, most_gpus=plan.best.replicas, slo="ttft p90 < 30 s", grow=0.05)
    assert none.apart[0].split is None and none.apart[0].tried == ()
    assert "needs 2 replicas, and --most-gpus allows 1" in apart_lines(none)[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"survive": 1}, "--prefill-decode: --survive plans for fleets of equal"),
        ({"policies": ("sarathi",)}, "--prefill-decode: only policy vllm, with kv=paged, has"),
        ({"policies": ("vllm:kv=bidirectional",)}, "--prefill-decode: only policy vllm, with kv"),
    ],
)
def test_what_is_refused_is_one_line(trace, asked, said):
    with pytest.raises(SettingsError, match=said) as error:
        planned(trace, **asked)
    assert "\n" not in str(error.value)


def walked(first: Split, most: int, answer) -> tuple[Split | None, list[Split]]:
    tried, walk = [], staircase(first, most)
    try:
        split = next(walk)
        while True:
            tried.append(split)
            split = walk.send(answer(split))
    except StopIteration as end:
        return end.value, tried


def cheapest(enough, most: int) -> int | None:
    totals = [p + d for p in range(1, most) for d in range(1, most - p + 1) if enough(p, d)]
    return min(totals, default=None)


@st.composite
def staircases(draw):
    """What `p` prefill replicas need of decode ones, never more for more; None: no number helps."""
    steps = draw(st.lists(st.none() | st.integers(1, 14), min_size=14, max_size=14))
    known = sorted((s for s in steps if s is not None), reverse=True)
    needs = [None] * (14 - len(known)) + known
    return lambda p, d: needs[p - 1] is not None and d >= needs[p - 1]


@given(
    enough=staircases(),
    most=st.integers(2, 14),
    first=st.builds(Split, st.integers(0, 20), st.integers(0, 20)),
    of_decode=st.booleans(),
)
def test_the_walk_finds_what_brute_force_finds(enough, most, first, of_decode):
    def answer(split):
        assert split.prefill >= 1 and split.decode >= 1 and split.total <= most
        return Answer(True) if enough(*split) else Answer(False, of_decode)

    found, tried = walked(first, most, answer)
    best = cheapest(enough, most)
    assert (None if found is None else found.total) == best
    assert found is None or (enough(*found) and found in tried)
    assert len(set(tried)) == len(tried)


@given(p=st.integers(1, 12), d=st.integers(1, 12))
def test_a_corner_takes_no_more_trials_than_two_diagonals_and_the_climb(p, d):
    """Prompts need `p` replicas and decodes `d`, each by themselves."""

    def answer(split):
        return Answer(split.prefill >= p and split.decode >= d, split.prefill >= p)

    found, tried = walked(Split(1, 1), 64, answer)
    assert found == (p, d)
    climb = next(i for i, split in enumerate(tried) if split.prefill >= p and split.decode >= d)
    assert len(tried) <= 2 * tried[climb].total + climb + 1


def test_late_later_tokens_add_no_prefill_replica():
    found, tried = walked(Split(3, 1), 40, lambda s: Answer(s.decode >= 5 and s.prefill >= 3, True))
    assert found == (3, 5)
    climb = next(i for i, split in enumerate(tried) if split.decode >= 5) + 1
    assert {split.prefill for split in tried[:climb]} == {3}


@pytest.mark.parametrize("most", [2, 3, 9])
def test_where_none_is_enough_no_split_of_the_most_is_left_out(most):
    found, tried = walked(Split(1, 1), most, lambda split: Answer(False))
    assert found is None
    assert {split for split in tried if split.total == most} == {
        Split(p, most - p) for p in range(1, most)
    }
