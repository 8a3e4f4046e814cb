"""Justitia's figures, small: every table and plot is made, and what must hold of any workload holds."""

import numpy as np
import pandas as pd
import pytest
from study_checks import check_figures, quick_run, table
from twinserve.experiments.justitia import STUDY
from twinserve.experiments.justitia_runs import SHAPES, compare, resized
from twinserve.experiments.justitia_tables import against, neutral, plain
from twinserve.traces.apps import applications
from twinserve.traces.apps_classes import draw

POLICIES = {"justitia", "srjf", "vllm-sjf", "vtc", "parrot", "vllm", "vllm-v0", "justitia:cost=compute"}


out = quick_run(STUDY)


def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    check_figures(STUDY, out, said=lambda claim: True)  # so few applications decide nothing


def test_fair_sharing_of_memory_is_slower(out):
    found = table(out, "fig3").set_index("policy")
    assert found.loc["kv-share", "mean_s"] > found.loc["justitia", "mean_s"]
    assert found.loc["kv-share", "over_justitia"] > found.loc["justitia", "over_justitia"] == 1


def test_the_two_mergers_share_the_pool_or_do_not(out):
    points = pd.read_csv(out / "fig3" / "points.csv")
    fair, sequential = (points[points.policy == p] for p in ("kv-share", "justitia"))
    both = (fair["first"] > 0) & (fair.second > 0)
    assert both.any() and (fair.loc[both, ["first", "second"]].max(axis=None) <= 459 // 2)
    assert sequential["first"].max() > 459 // 2
    assert (points["first"] + points.second).max() <= 459


def test_lengths_fill_their_buckets(out):
    found = table(out, "fig4")
    assert np.allclose(found.groupby(["kind", "what"]).share.sum(), 1.0)
    prompts = found[(found.kind == "FV") & (found.what == "prompt")]
    assert prompts.least.min() >= 360 and prompts.most.max() <= 380


@pytest.mark.parametrize("name", ["fig8", "fig9"])
def test_completion_times_of_every_policy(out, name):
    found = table(out, name)
    assert (POLICIES if name == "fig8" else POLICIES - {"vllm-v0", "justitia:cost=compute"}) == set(found.policy)
    assert (found.p90_s >= found.mean_s * 0.5).all() and (found.mean_s > 0).all()
    assert np.allclose(found[found.policy == "vtc"].vs_vtc, 0)
    assert np.allclose(found[found.policy == "vtc"].not_delayed, 1)


def test_a_smaller_pool_is_more_heavily_loaded(out):
    found = table(out, "fig8")
    load = found[found.policy == "justitia"].set_index(["pool", "density"]).load
    assert (load["459"] > load["profile"]).all() and len(load) == 4
    assert np.isclose(load["459", "all"], load["459"].drop("all").mean())


def test_ratios_grow_with_their_quantile(out):
    found = table(out, "fig10")
    ratios = found[[c for c in found if c.startswith("ratio_") and not c.endswith("_ci")]]
    assert (ratios.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert np.allclose(ratios.iloc[:, -1], found.worst)


def test_no_elephant_is_faster_for_company(out):
    for _, rows in table(out, "fig11").groupby(["crowd", "policy"]):
        alone, crowded = rows.sort_values("mice").elephant_s
        assert crowded >= alone > 0


def test_what_is_known_is_predicted_and_errors_are_as_large_as_asked_for(out):
    found = table(out, "table2").groupby("predictor").error.first()
    assert found["perfect"] == 0 < found["class mean"]
    assert 0.3 < found["error 53 %"] < 0.8 and found["error 452 %"] > 1


def test_a_decision_takes_some_time(out):
    assert (table(out, "table3").plan_ms > 0).all()


def test_variants_differ_from_the_base_in_what_they_change(out):
    found = table(out, "causes").set_index(["change", "policy"])
    base, smaller = "as drawn, pool of the profile", "459 blocks (Fig. 3)"
    assert found.loc[(smaller, "vtc"), "load"] > found.loc[(base, "vtc"), "load"]
    assert set(found.index.get_level_values("policy")) == {"justitia", "justitia:cost=compute", "vtc", "parrot"}
    assert np.allclose(found.xs("vtc", level="policy").vs_vtc, 0)


def test_reshaping_changes_sizes_or_shape_and_nothing_else():
    sample = draw("MRS", np.random.default_rng(0))
    sixth = resized({"large": 1 / 6})(sample)
    assert sixth.stages[0] == sample.stages[0][: round(len(sample.stages[0]) / 6)]
    assert all(sixth.stages) and len(sixth.stages) == len(sample.stages)
    assert resized({"small": 4.0})(sample) == sample
    doubled = resized({"large": 2.0})(sample)
    assert doubled.stages[-1] == sample.stages[-1] * 2
    for shape, stages in (("narrow", len(sample.requests)), ("wide", 1)):
        other = SHAPES[shape](sample)
        assert other.requests == sample.requests and len(other.stages) == stages
    plain_workload, reshaped = (applications(np.zeros(2), 0, ["CC", "EV"], reshape) for reshape in (None, SHAPES["narrow"]))
    assert plain_workload.applications == reshaped.applications
    assert reshaped.stage.max() > plain_workload.stage.max()


def test_differences_are_taken_within_a_run():
    frame = pd.DataFrame(
        {"pool": ["a"] * 4, "seed": [0, 0, 1, 1], "policy": ["vtc", "x"] * 2, "mean_s": [10.0, 5.0, 100.0, 150.0]}
    )
    assert against(frame, ["pool"], "mean_s", "vtc", "d").d.tolist() == [0, -50, 0, 50]
    assert plain("justitia:predictor=perfect,cost=compute") == "justitia:cost=compute" and plain("srjf:predictor=mlp") == "srjf"


def test_no_effect_is_none_of_a_change_one_of_a_ratio_and_unknown_of_an_amount():
    assert [neutral(name) for name in ("vs_vtc", "p90_vs_justitia", "over_justitia", "mean_s")] == [0.0, 0.0, 1.0, None]


def test_the_same_point_gives_the_same_rows():
    arguments = {"policies": ["justitia:predictor=perfect", "vtc"], "seed": 3, "count": 8, "offline": True, "rate_scale": 2.0}
    assert compare(**arguments) == compare(**arguments)
