"""`--slo` in its two spellings, and what a run owes as a whole."""

import json
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.test_cli import run
from tests.sim.test_metrics import NAN, THREE, request, rows_of
from tests.sim.test_results_rows import toy_rows
from twinserve.sim.cli.main import simulate_main
from twinserve.sim.report.table import render_table
from twinserve.sim.results.export import as_workload
from twinserve.sim.results.files import POOL_GROUP, RunResult
from twinserve.sim.results.metrics import latencies, summarise
from twinserve.sim.results.options import MetricsOptions, Objective, read_options, spoken
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.run import simulate

TRAFFIC = {
    "trace": "poisson", "rate": 40.0, "requests": 30, "cap_length": 200, "num_blocks": 90,
    "max_num_seqs": 8, "pool": 2,
}  # fmt: skip


def simulated(slo: str | None, policy: str = "bros", **more) -> RunResult:
    config = SimulationConfig(policy=(policy,), slo=slo, **TRAFFIC | more)
    return simulate(config)[policy]


def verdicts(rows, *objectives: Objective) -> list[dict]:
    return summarise(rows, MetricsOptions(objectives=objectives))["objectives"]


# -- one meaning, two spellings --------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("ttft=1,tpot=0.05", "rt: ttft < 1 s, tpot < 50 ms"),
        ("ttft=1,tpot=0.05", "tpot<=50ms,ttft<=1000000us"),
        ("ttft=0.4,tpot=0.2,k=5", "ttft < max(0.4 s, 5 x prefill), tpot < 0.2 s"),
        (None, "real-time: TTFT < max(400 ms, 5 x prefill), TPOT < 200 ms"),
    ],
)
def test_both_spellings_are_one_run(short, long):
    ours, theirs = simulated(short), simulated(long)
    for name in ("requests", "steps", "gaps"):
        pd.testing.assert_frame_equal(
            getattr(ours.rows, name), getattr(theirs.rows, name), check_exact=True
        )
    assert ours.summary == theirs.summary
    assert ours.rows.requests["slo_ttft_s"].notna().any()


@pytest.mark.slow
def test_a_percentile_changes_the_verdict_and_not_the_run():
    plain = simulated("ttft < 1 s, tpot < 50 ms")
    judged = simulated("ttft p90 < 1 s, tpot mean < 50 ms")
    pd.testing.assert_frame_equal(plain.rows.requests, judged.rows.requests, check_exact=True)
    more = {"objectives", "objectives_met"}
    assert set(judged.summary) - set(plain.summary) == more
    assert {k: v for k, v in judged.summary.items() if k not in more} == plain.summary


OBJECTIVES = st.lists(
    st.builds(
        Objective,
        st.sampled_from(["rt", "be"]),
        st.sampled_from(["ttft", "tpot", "e2el"]),
        st.integers(1, 10**6).map(lambda us: us / 1e6),
        st.just(0.0),
        st.sampled_from([None, "mean", "p50", "p99", "p99.9"]),
    ),
    min_size=1,
    unique_by=lambda o: (o.service_class, o.metric),
)


def test_the_statistic_may_come_first():
    assert parse_objectives("p95 ttft < 2 s; be: mean tpot < 40 ms") == parse_objectives(
        "ttft p95 < 2 s; be: tpot mean < 40 ms"
    )


@given(OBJECTIVES)
def test_what_an_objective_says_of_itself_is_read_as_that_objective(objectives):
    text = "; ".join(map(str, objectives))
    assert list(parse_objectives(text)) == objectives


@given(st.integers(1, 10**9), st.sampled_from([("s", 1), ("ms", 10**3), ("us", 10**6)]))
def test_a_bound_is_the_nearest_number_of_seconds(value, unit):
    name, per_second = unit
    if value / per_second < 1e6:
        (objective,) = parse_objectives(f"ttft < {value} {name}")
        assert objective.bound_s == float(Fraction(value, per_second))


@pytest.mark.slow
def test_classes_have_objectives_of_their_own_and_the_pool_too():
    result = simulated("rt: ttft < 1 s; be: ttft < 2 s, tpot p50 < 30 ms, e2el < 9 s")
    requests = result.rows.requests
    be = requests[requests["service_class"] == "be"]
    assert (be["group"] == POOL_GROUP).all() and len(be)
    assert (be["slo_ttft_s"] == 2.0).all() and (be["slo_tpot_s"] == 0.03).all()
    rt = requests[requests["service_class"] == "rt"]
    assert (rt["slo_ttft_s"] == 1.0).all() and rt["slo_tpot_s"].isna().all()
    classes = result.summary["classes"]
    assert classes["be"]["slo_attainment"] is not None and "e2el_attainment" in classes["be"]
    assert "e2el_attainment" not in classes["rt"]
    listed = resolve(SimulationConfig(**TRAFFIC)).workload
    again = as_workload(result, listed)  # what is exported has them
    assert np.nanmax(again.slo_ttft_s[again.service_class == 1]) == 2.0


@pytest.mark.slow
def test_the_settings_of_a_run_give_the_same_run_again(capsys, tmp_path):
    slo = "rt: ttft p90 < 1 s, e2el < 10 s; be: tpot < 1 s"
    flags = ("--trace", "poisson", "--rate", 20, "--requests", 20, "--pool", 2, "-q")
    code, _, err = run(capsys, simulate_main, *flags, "--slo", slo, "--out", tmp_path / "one")
    assert code == 0, err
    code, _, err = run(
        capsys, simulate_main, "--config", tmp_path / "one/run.json", "-q", "--out",
        tmp_path / "two",
    )  # fmt: skip
    assert code == 0, err
    one, two = ((tmp_path / name / "summary.json").read_bytes() for name in ("one", "two"))
    assert one == two
    said = json.loads((tmp_path / "one/run.json").read_text())
    assert said["config"]["slo"] == slo
    assert read_options(said).objectives == parse_objectives(slo)


# -- verdicts --------------------------------------------------------------------------------------
def test_a_percentile_is_the_share_that_must_keep_the_bound():
    # TTFT 0.4, 1.0, 0.2 against 0.5; E2E 1.0, 1.0, 2.0
    ninety = Objective("rt", "ttft", 0.5, statistic="p90")
    half = Objective("rt", "tpot", 0.2, statistic="p50")  # 0.2, a single token, 0.9
    whole = Objective("rt", "e2el", 1.0, statistic="p66")
    found = verdicts(rows_of(THREE), ninety, half, whole)
    assert [v["share"] for v in found] == pytest.approx([2 / 3] * 3)
    assert [v["met"] for v in found] == [False, True, True]
    first = {"class": "rt", "metric": "ttft", "statistic": "p90", "bound_s": 0.5}
    assert first.items() <= found[0].items() and "value_s" not in found[0]
    summary = summarise(rows_of(THREE), MetricsOptions(objectives=(half, whole)))
    assert summary["objectives_met"] is True
    assert (
        summarise(rows_of(THREE), MetricsOptions(objectives=(ninety, half)))["objectives_met"]
        is False
    )


def test_a_share_that_is_just_there_is_there():
    """999 of 1,000 are 99.9 %, whatever floats make of that."""
    slo = {"slo_ttft_s": 1.0}
    kept = [request(f"r{i}", 0.0, 0.0, 0.5, 1.0, 10, 2, **slo) for i in range(999)]
    for n_missed, met in ((1, True), (2, False)):
        missed = [request(f"m{i}", 0.0, 0.0, 5.0, 6.0, 10, 2, **slo) for i in range(n_missed)]
        (found,) = verdicts(rows_of(kept + missed), Objective("rt", "ttft", 1.0, statistic="p99.9"))
        assert found["met"] is met


def test_starving_does_not_pay():
    """Without its first token, not at its end, or given up: it has missed, also a mean of none."""
    slo = {"slo_ttft_s": 0.5, "slo_tpot_s": 0.2}
    starved = request("d", 12.5, NAN, NAN, NAN, 40, 0, finished=False, **slo)
    cut = request("e", 12.5, 12.5, 12.6, 13.0, 40, 9, finished=False, **slo)
    for metric, bound in (("ttft", 0.5), ("tpot", 0.2), ("e2el", 1.0)):
        for lost in (starved, cut):
            objective = Objective("rt", metric, bound, statistic="p50")
            (alone,) = verdicts(rows_of([lost]), objective)
            assert (alone["share"], alone["met"]) == (0.0, False)
            (found,) = verdicts(rows_of([*THREE, lost]), objective)
            assert found["share"] == pytest.approx(2 / 4)
            (mean,) = verdicts(rows_of([lost]), Objective("rt", metric, bound, statistic="mean"))
            assert (mean["value_s"], mean["met"]) == (None, False)


@pytest.mark.slow
@given(seed=st.integers(0, 100), bound=st.floats(0.01, 3), percentile=st.integers(1, 99))
def test_who_all_completed_keeps_it_where_the_quantile_does(seed, bound, percentile):
    """Of n completed requests the k-th fastest decides, k the least number that is NN %."""
    rows = toy_rows(60, seed)
    rt = rows.requests["service_class"] == "rt"
    rows.requests["slo_ttft_s"] = np.where(rt, bound, np.nan)
    values = np.sort(latencies(rows.requests)["ttft_s"][rt])
    rank = -(-len(values) * percentile // 100)
    (found,) = verdicts(rows, Objective("rt", "ttft", bound, statistic=f"p{percentile}"))
    assert found["met"] == (values[rank - 1] <= bound)
    attained = summarise(rows)["classes"]["rt"]["ttft_attainment"]
    assert found["share"] == pytest.approx(attained)


def test_a_mean_is_that_of_the_summary():
    rows = toy_rows()
    rt = summarise(rows)["classes"]["rt"]
    for metric in ("ttft", "tpot", "e2el"):
        value = rt[f"mean_{metric}_ms"] / 1000
        for bound in (value * 1.01, value * 0.99):
            (found,) = verdicts(rows, Objective("rt", metric, bound, statistic="mean"))
            assert found["value_s"] == pytest.approx(value) and found["met"] == (bound > value)


def test_a_class_without_requests_has_no_verdict():
    both = (
        Objective("be", "ttft", 1.0, statistic="p50"),
        Objective("be", "e2el", 1.0, statistic="mean"),
    )
    summary = summarise(rows_of(THREE), MetricsOptions(objectives=both))
    assert [v["met"] for v in summary["objectives"]] == [None, None]
    assert summary["objectives_met"] is None


def test_an_objective_end_to_end_counts_for_attainment():
    bound = MetricsOptions(objectives=(Objective("rt", "e2el", 1.5),))
    rt = summarise(rows_of(THREE), bound)["classes"]["rt"]
    assert rt["e2el_attainment"] == pytest.approx(2 / 3)  # c takes 2 s
    assert rt["slo_attainment"] == pytest.approx(1 / 3)  # b is late, c is slow
    free = [r | {"slo_ttft_s": NAN, "slo_tpot_s": NAN} for r in THREE]
    rt = summarise(rows_of(free), bound)["classes"]["rt"]
    assert rt["slo_attainment"] == rt["e2el_attainment"] == pytest.approx(2 / 3)
    assert "objectives" not in summarise(rows_of(THREE), bound)


def test_the_table_says_kept_and_missed():
    objectives = (
        Objective("rt", "ttft", 0.5, statistic="p90"),
        Objective("rt", "e2el", 9.0, statistic="p90"),
        Objective("rt", "tpot", 0.02, statistic="mean"),
        Objective("be", "ttft", 1.0, statistic="p90"),
    )
    text = render_table({"a": summarise(rows_of(THREE), MetricsOptions(objectives=objectives))})
    shown = {" ".join(line.split()) for line in text.splitlines()}
    assert "rt: TTFT p90 < 500 ms missed (66.7 %)" in shown
    assert "rt: E2E p90 < 9 s kept" in shown
    assert "rt: TPOT mean < 20 ms missed (550 ms)" in shown
    assert "be: TTFT p90 < 1 s -" in shown
    assert "Objectives" not in render_table({"a": summarise(rows_of(THREE))})


@pytest.mark.slow
def test_what_is_missed_by_a_hair_does_not_read_as_kept():
    slo = {"slo_ttft_s": 1.0}
    kept = [request(f"r{i}", 0.0, 0.0, 0.5, 1.0, 10, 2, **slo) for i in range(8999)]
    missed = [request(f"m{i}", 0.0, 0.0, 5.0, 6.0, 10, 2, **slo) for i in range(1001)]
    options = MetricsOptions(objectives=(Objective("rt", "ttft", 1.0, statistic="p90"),))
    text = render_table({"a": summarise(rows_of(kept + missed), options)})
    assert "missed (90.0 %)" not in text and "missed (" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.5 s"), (0.05, "50 ms"), (2e-5, "20 us"), (60.0, "60 s")]
)
def test_a_bound_is_said_in_the_unit_that_fits(seconds, text):
    assert spoken(seconds) == text


# -- what is wrong ---------------------------------------------------------------------------------
WRONG = [
    ("rr: ttft < 1 s", "'rr': no class of that name; did you mean rt?; write rt or be"),
    ("online: ttft < 1 s", "'online': no class of that name"),
    ("rt: tttf < 1 s", "no metric 'tttf'; did you mean ttft?"),
    ("itl < 1 s", "no metric 'itl'; did you mean tpot?"),
    ("ttft < 1", "'ttft < 1': 1 has no unit; write 1 s, ms or us"),
    ("ttft < 1 min", "no unit 'min'; there are s, ms and us"),
    ("ttft < fast", "'fast' is no time"),
    ("ttft <", "'' is no time"),
    ("ttft < 0 s", "'ttft < 0 s': 0 s can never be kept or missed"),
    ("ttft < -1 s", "can never be kept"),
    ("ttft < 1e9 s", "below 1e6 s"),
    (
        "ttft median < 1 s",
        "no statistic 'median'; write a percentile, p90, or mean; the median is p50",
    ),
    ("ttft p0 < 1 s", "p0 is no percentile; it must lie between 0 and 100"),
    ("ttft p100 < 1 s", "p100 is no percentile"),
    ("ttft p-5 < 1 s", "p-5 is no percentile"),
    ("ttft p9.9.9 < 1 s", "no statistic 'p9.9.9'"),
    ("ttft p90 p99 < 1 s", "write METRIC [pNN or mean] < VALUE UNIT"),
    ("ttft < 1 s, be: ttft < 2 s", "'ttft < 1 s, be': write ; between the objectives of two"),
    ("ttft < 1 s; rt: ttft p90 < 2 s", "'ttft p90 < 2 s': ttft of rt is given twice"),
    ("e2e < 1 s, e2el < 2 s", "e2el of rt is given twice"),
    ("ttft=1, tpot < 50 ms", "'ttft=1': NAME=SECONDS and NAME < VALUE UNIT do not go together"),
    ("tpot < 50 ms, k=5", "'k=5': NAME=SECONDS"),
    ("rt: ttft", "'ttft': has no <; write"),
    ("ttft > 1 s", "has no <"),
    ("ttft < 1 s;", "no objective is there"),
    ("rt:", "no objective is there"),
    ("ttft:500 tpot:50", "NAME:MILLISECONDS is what --goodput takes"),
    ("ttft < max(1 s)", "write the bound as max(0.4 s, 5 x prefill)"),
    ("ttft < max(1 s, 0 x prefill)", "write the bound as"),
    ("ttft < max(1, 5 x prefill)", "1 has no unit"),
    ("tpot < max(1 s, 5 x prefill)", "only ttft grows with the prompt"),
    ("ttft mean < max(1 s, 5 x prefill)", "a mean needs one bound for all"),
    ("ttft 1 s", "is not understood"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[text for text, _ in WRONG])
def test_what_is_wrong_is_one_line_with_the_offending_part(text, said):
    with pytest.raises(SettingsError) as error:
        parse_objectives(text)
    line = str(error.value)
    assert line.startswith("--slo ") and said in line and "\n" not in line


def test_a_pool_has_no_objective_that_grows_with_prompts():
    with pytest.raises(SettingsError, match="grows with the prompt, which requests of --pool"):
        simulated("be: ttft < max(1 s, 5 x prefill)")


@pytest.mark.parametrize("given", ["ttft=500", "ttft<500", "rt: ttft < 1 s"])
def test_words_of_slo_are_sent_from_goodput_to_it(capsys, given):
    code, out, err = run(capsys, simulate_main, "-t", "poisson", "-q", "--goodput", given)
    assert (code, out, err.count("\n")) == (2, "", 1) and "--slo" in err
