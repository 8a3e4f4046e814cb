"""One trial of a plan: the verdict of `simulate`, and the same whether it ends early or not. Echo's
prediction of online memory, against what was held."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from tests.examples import examples
from tests.sim.planned import settings, write_trace
from twinserve.policies.echo.offline import MemoryForecast
from twinserve.sim.plan.closer import drawn
from twinserve.sim.plan.sizes import Size
from twinserve.sim.plan.trial import (
    Kept,
    Trial,
    TrialSpec,
    dealt,
    needed,
    predicted_memory,
    run_trial,
)
from twinserve.sim.plan.verdicts import attained, together
from twinserve.sim.results.options import Objective
from twinserve.sim.results.parts import ratio, student
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.run import simulate
from twinserve.traces.generators.synth import synth
from twinserve.traces.transform import set_slo


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", seed=3, count=150, rate=25.0)


@pytest.mark.slow
@examples(12)
@given(
    replicas=st.integers(1, 4),
    ttft_ms=st.sampled_from([30, 60, 150, 1000]),
    tpot_ms=st.sampled_from([8, 12, 20, 50]),
    e2el_s=st.sampled_from([None, 1, 3]),
    percentile=st.sampled_from([50, 90, 99]),
    asynchronous=st.booleans(),
    since_s=st.sampled_from([0.0, 1.5]),
    front_end=st.sampled_from(["none", "vllm"]),
)
def test_ending_early_never_changes_a_verdict(
    trace, replicas, ttft_ms, tpot_ms, e2el_s, percentile, asynchronous, since_s, front_end
):
    slo = f"ttft p{percentile} < {ttft_ms} ms, tpot p{percentile} < {tpot_ms} ms"
    slo += f", e2el p{percentile} < {e2el_s} s" if e2el_s else ""
    more = {"async_scheduling": asynchronous, "front_end": front_end}
    given = settings(trace, slo, replicas=replicas, **more)
    whole = run_trial(TrialSpec(given, since_s, early=False))
    early = run_trial(TrialSpec(given, since_s))
    assert early.keeps == whole.keeps and set(early.missed) <= set(whole.missed)
    assert early == whole if not early.early else not whole.keeps
    verdict = run_trial(TrialSpec(given, since_s, verdict=True))
    assert verdict.keeps == whole.keeps and verdict.missed == early.missed


@pytest.mark.parametrize("slo", ["ttft p90 < 60 ms, tpot p90 < 12 ms", "ttft p50 < 1 s"])
def test_the_verdict_is_that_of_simulate(trace, slo):
    given = settings(trace, slo, replicas=2)
    found = run_trial(TrialSpec(given, early=False))
    (result,) = simulate(SimulationConfig(**given)).values()
    verdicts = result.summary["objectives"]
    assert [kept.share for kept in found.objectives] == [one["share"] for one in verdicts]
    assert found.keeps == all(one["met"] for one in verdicts)
    for kept, one in zip(found.objectives, verdicts, strict=True):
        assert (kept.value_s <= one["bound_s"]) == one["met"]
        assert sum(due for due, _ in kept.windows) == kept.due
        assert sum(good for _, good in kept.windows) == kept.kept
    requests = result.rows.requests
    ttft = np.sort(requests["first_token_s"] - requests["arrival_s"])
    last = needed(parse_objectives(slo)[0], len(ttft)) - 1
    assert found.objectives[0].value_s == ttft[last]
    assert found.requests == len(result.rows.requests) and found.preemptions == 0


def test_only_what_comes_after_the_lead_is_judged(trace):
    given = settings(trace, "ttft p90 < 1 s")
    (result,) = simulate(SimulationConfig(**given)).values()
    later = int((result.rows.requests.arrival_s >= 2.0).sum())
    assert run_trial(TrialSpec(given, 2.0)).requests == later < len(result.rows.requests)


def test_offline_tokens_are_those_of_the_judged_time(trace):
    given = settings(trace, "ttft p90 < 1 s", pool=4)
    (result,) = simulate(SimulationConfig(**given)).values()
    rows = result.rows.requests
    until_s = rows.arrival_s[rows.service_class == "rt"].max()
    mine = rows[(rows.service_class == "be") & rows.last_token_s.between(2.0, until_s)]
    tokens = (mine.prompt_tokens + mine.output_tokens)[mine.finished].sum()
    found = run_trial(TrialSpec(given, 2.0, early=False))
    assert found.offline_tokens_per_s == pytest.approx(tokens / (until_s - 2.0))


def test_an_overload_ends_long_before_its_requests_do(trace):
    given = settings(trace, "ttft p99 < 30 ms", max_num_seqs=1)
    found = run_trial(TrialSpec(given))
    assert found.early and found.missed == (0,) and not found.objectives


def test_a_trial_for_its_verdict_ends_once_enough_requests_have_kept(trace):
    given = settings(trace, "ttft p50 < 1 s, tpot p50 < 1 s", replicas=2)
    whole, verdict = (run_trial(TrialSpec(given, verdict=flag)) for flag in (False, True))
    assert whole.keeps and not whole.early and whole.objectives
    assert verdict.keeps and verdict.early and not verdict.objectives and not verdict.missed


def test_draws_deal_the_same_lengths_to_the_same_arrivals():
    load = set_slo(synth("sharegpt", rate=5.0, count=60, seed=1), 1.0, 0.1)
    drawn = [dealt(load, 3.0, draw) for draw in (1, 1, 2)]
    before = load.arrival_s < 3.0
    for one in drawn:
        assert one.arrival_s is load.arrival_s
        assert (one.prompt_tokens[before] == load.prompt_tokens[before]).all()
        pairs = sorted(zip(one.prompt_tokens, one.output_tokens, strict=True))
        assert pairs == sorted(zip(load.prompt_tokens, load.output_tokens, strict=True))
    first, again, other = (one.prompt_tokens for one in drawn)
    assert (first == again).all() and (first != other).any()
    sessions = replace(load, group=np.zeros(60, np.int64), group_names=["s"])
    assert dealt(sessions, 0.0, 1) is sessions


def steps_of(held, seconds: float = 1.0) -> pd.DataFrame:
    """A step of `seconds` for each number of blocks that online requests hold."""
    start = np.arange(len(held)) * seconds
    return pd.DataFrame(
        {
            "replica": 0,
            "start_s": start,
            "end_s": start + seconds,
            "kv_rt_blocks": np.array(held, np.int64),
        }
    )


def test_a_prediction_by_hand():
    """History of four: 2, 4, 4, 6 have mu 4 and sigma sqrt(2), so mu + 2 sigma is 6.83 and 7 blocks
    are kept."""
    predicted, held = predicted_memory(steps_of([2, 4, 4, 6, 9, 5]), 2.0, 4.0, 1.0, 1.0)
    assert predicted.tolist() == [7, 10] and held.tolist() == [9, 5]  # 4, 4, 6, 9: 5.75 + 2 * 2.05
    steady, held = predicted_memory(steps_of([70] * 50), 2.0, 10.0, 1.0, 5.0)
    assert set(steady.tolist()) == set(held.tolist()) == {70} and len(held) == 36
    assert not len(predicted_memory(steps_of([70] * 14), 2.0, 10.0, 1.0, 5.0)[0])


@examples(40)
@given(
    held=st.lists(st.integers(0, 500_000), min_size=3, max_size=60),
    history=st.integers(1, 10),
    ahead=st.integers(1, 3),
    sigmas=st.sampled_from([0.0, 1.0, 2.0, 3.5]),
)
def test_it_is_the_prediction_of_the_policy(held, history, ahead, sigmas):
    forecast = MemoryForecast(sigmas, float(history), 1.0)
    blocks = []
    for now, value in enumerate(held):
        forecast.observe(float(now), value)
        blocks.append(forecast.blocks)
    predicted, later = predicted_memory(steps_of(held), sigmas, history, 1.0, ahead)
    # the last bit before rounding up
    assert np.abs(predicted - blocks[history - 1 : len(held) - ahead]).max(initial=0) <= 1
    assert later.tolist() == held[history - 1 + ahead :]


def test_more_sigmas_are_exceeded_less():
    steps = steps_of(np.random.default_rng(0).normal(1000, 100, 4000).astype(int))
    exceeded = []
    for sigmas in (0.0, 1.0, 2.0, 3.0):
        predicted, held = predicted_memory(steps, sigmas, 600.0, 1.0, 60.0)
        exceeded.append(float((held > predicted).mean()))
    assert exceeded == sorted(exceeded, reverse=True)
    # of a normal distribution 2.3 % lie above mu + 2 sigma
    assert exceeded[2] == pytest.approx(0.023, abs=0.01)


def test_nothing_is_held_while_nothing_runs():
    steps = steps_of([5, 5])
    steps.loc[1, ["start_s", "end_s"]] = [3.0, 4.5]  # idle from 1 to 3 s
    predicted, held = predicted_memory(steps, 0.0, 1.0, 1.0, 1.0)
    assert predicted.tolist() == [5, 0, 0, 5] and held.tolist() == [0, 0, 5, 5]


# -- whether an objective is met, failed or not decided, from parts of runs ------------------------
TTFT = Objective("rt", "ttft", 1.0, statistic="p90")


def trial(*kept: int, due: int = 100, value_s: float = 0.5) -> Trial:
    windows = tuple((due, k) for k in kept)
    one = Kept(due * len(kept), sum(kept), windows, value_s)
    return Trial(True, False, (), (one,))


@pytest.mark.parametrize("freedom", [1, 2, 9, 11, 19, 29, 99, 500])
def test_student_is_never_too_narrow(freedom):
    exact = float(special.stdtrit(freedom, 0.975))
    assert exact - 0.0005 <= student(freedom) <= 1.02 * exact


def test_an_interval_by_hand():
    """Parts that keep 9, 10, 8 and 9 of 10: 0.9, and residuals 0, 1, -1, 0."""
    share, half = ratio([(10, 9), (10, 10), (10, 8), (10, 9)])
    assert share == 0.9 and half == pytest.approx(3.182 * np.sqrt(4 / 3 * 2) / 40)
    assert ratio([(10, 9)]) == (0.9, np.inf)


def test_the_three_answers():
    sure, lost = [99, 98, 97, 99], [80, 82, 81, 79]
    for kept, answer in ((sure, "meets"), (lost, "fails"), ([80, 100, 95, 88], "undecided")):
        (one,) = attained([TTFT], [trial(*kept)])
        assert one.answer == answer and one.low <= one.share <= one.high
    assert one.slack == pytest.approx(0.5)
    met, failed = (attained([TTFT], [trial(*kept)])[0] for kept in (sure, lost))
    assert together([met, met]) == "meets" and together([met, one]) == "undecided"
    assert together([failed, one]) == "fails"
    for kept, end in (([100, 100, 96, 100], "high"), ([0, 4, 0, 0], "low")):
        assert getattr(attained([TTFT], [trial(*kept)])[0], end) == (end == "high")
    empty = replace(trial(*sure).objectives[0], windows=((0, 0), *((100, k) for k in sure)))
    assert attained([TTFT], [Trial(True, False, (), (empty,))])[0].low == met.low


@examples(50)
@given(st.lists(st.integers(70, 100), min_size=10, max_size=10))
def test_the_same_again_in_more_draws_is_surer_and_says_the_same_share(kept):
    (once,) = attained([TTFT], [trial(*kept)])
    (often,) = attained([TTFT], [trial(*kept)] * 4)
    assert often.share == pytest.approx(once.share)
    assert often.high - often.low <= once.high - once.low + 1e-12


def test_of_a_thousand_requests_a_percentile_needs_whole_ones():
    p = Objective("rt", "ttft", 1.0, statistic="p99.9")
    assert (needed(p, 1000), needed(p, 1001), needed(TTFT, 10), needed(TTFT, 11)) == (
        999, 1000, 9, 10,
    )  # fmt: skip


def test_nothing_due_says_nothing():
    none = Trial(True, False, (), (Kept(0, 0, (), None),))
    assert attained([TTFT], [none]) == () and together(()) == "meets"


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    """Independent parts of 200 requests that keep 90 % on the mean, some parts better than
    others."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        rates = np.clip(rng.normal(0.9, 0.04, 10), 0, 1)
        share, half = ratio([(200, int(rng.binomial(200, p))) for p in rates])
        hits += abs(share - 0.9) <= half
    assert 0.93 <= hits / 2000 <= 0.97


@pytest.mark.parametrize("draws", [1, 2])
def test_a_size_that_failed_at_the_end_of_its_first_peak_is_seen_on_all(draws):
    """Its search did not go on to the second one."""
    candidate = SimpleNamespace(config=SimulationConfig(rate_scale=1.0))
    peaks = [SimpleNamespace(settings=lambda n, speed, fails: {}, since_s=0.0)] * 2
    size = Size(candidate, peaks, 1, 1, 4, None, trials={1: [trial(*[50] * 10)]})
    look, asked = drawn(size, [TTFT], 1, draws), 0
    try:
        next(look)
        while True:
            asked += 1
            look.send(trial(*[50] * 10))
    except StopIteration as end:
        found = end.value
    assert asked == 2 * draws and len(found.attained) == 2 and found.answer == "fails"
