"""Justitia's figures, small: every table and plot is made, and what must hold of any workload
holds."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.study_checks import check_figures, check_one_figure, quick_run, table
from twinserve.experiments.justitia.main import POLICIES as ALL
from twinserve.experiments.justitia.main import STUDY
from twinserve.experiments.justitia.overhead import ClassErrors, Known, SortedQueue
from twinserve.experiments.justitia.runs import compare, plain, resized
from twinserve.experiments.justitia.tables import beside_others
from twinserve.policies.justitia.queues import RankedQueue
from twinserve.policies.parts.predictors import kv_token_time
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import Application
from twinserve.traces.apps.classes import draw
from twinserve.traces.apps.generate import applications

POLICIES = set(ALL)


out = quick_run(STUDY)


@pytest.mark.slow
def test_one_figure_has_its_table_its_plot_and_its_claims(tmp_path):
    check_one_figure(STUDY, "fig4", tmp_path)


@pytest.mark.nightly
def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    check_figures(STUDY, out, claims=False)


@pytest.mark.nightly
def test_fair_sharing_of_memory_is_slower(out):
    found = table(out, "fig3").set_index("policy")
    assert found.loc["kv-share", "mean_s"] > found.loc["justitia", "mean_s"]
    assert found.loc["kv-share", "over_justitia"] > found.loc["justitia", "over_justitia"] == 1


@pytest.mark.nightly
def test_the_two_mergers_share_the_pool_or_do_not(out):
    points = pd.read_csv(out / "fig3" / "points.csv")
    fair, sequential = (points[points.policy == p] for p in ("kv-share", "justitia"))
    both = (fair["first"] > 0) & (fair.second > 0)
    assert both.any() and (fair.loc[both, ["first", "second"]].max(axis=None) <= 459 // 2)
    assert sequential["first"].max() > 459 // 2
    assert (points["first"] + points.second).max() <= 459


@pytest.mark.nightly
def test_lengths_fill_their_buckets(out):
    found = table(out, "fig4")
    assert np.allclose(found.groupby(["kind", "what"]).share.sum(), 1.0)
    prompts = found[(found.kind == "FV") & (found.what == "prompt")]
    assert prompts.least.min() >= 360 and prompts.most.max() <= 380


def above_vtc(found: pd.DataFrame, by: list[str]) -> bool:
    """`vs_vtc` is by how many per cent a mean is above VTC's in the same setting; of one seed."""
    settings = [rows.set_index("policy") for _, rows in found.groupby(by)]
    return all(
        np.allclose(rows.vs_vtc, 100 * (rows.mean_s / rows.mean_s["vtc"] - 1)) for rows in settings
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fig8", "fig9"])
def test_completion_times_of_every_policy(out, name):
    found = table(out, name)
    assert (POLICIES if name == "fig8" else POLICIES - {"justitia:cost=compute"}) == set(
        found.policy
    )
    assert (found.p90_s >= found.mean_s * 0.5).all() and (found.mean_s > 0).all()
    assert above_vtc(found, ["density", "pool"])
    assert ((found.worst > 1) == (found.not_delayed < 1)).all() and (found.not_delayed < 1).any()


@pytest.mark.nightly
def test_a_smaller_pool_is_more_heavily_loaded(out):
    found = table(out, "fig8")
    load = found[found.policy == "justitia"].set_index(["pool", "density"]).load
    assert (load["459"] > load["profile"]).all() and len(load) == 4
    assert np.isclose(load["459", "all"], load["459"].drop("all").mean())


@pytest.mark.nightly
def test_ratios_grow_with_their_quantile(out):
    found = table(out, "fig10")
    ratios = found[[c for c in found if c.startswith("ratio_") and not c.endswith("_ci")]]
    assert (ratios.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert np.allclose(ratios.iloc[:, -1], found.worst)


@pytest.mark.nightly
def test_no_elephant_is_faster_for_company(out):
    for _, rows in table(out, "fig11").groupby(["crowd", "policy"]):
        alone, crowded = rows.sort_values("mice").elephant_s
        assert crowded >= alone > 0


@pytest.mark.nightly
def test_what_is_known_is_predicted_and_errors_are_as_large_as_asked_for(out):
    found = table(out, "table2").groupby("predictor").error.first()
    assert found["perfect"] == 0 < found["class mean"]
    assert 0.3 < found["error 53 %"] < 0.8 and found["error 452 %"] > 1


@pytest.mark.nightly
def test_a_sorted_queue_decides_as_often_and_more_applications_take_more_decisions(out):
    plans = table(out, "table3").pivot(index="a_minute", columns="queue", values="plans")
    assert plans["heap"].is_monotonic_increasing and plans["heap"].is_unique
    both = plans.dropna()
    assert len(both) == 2 and (both.nunique(axis=1) == 1).all()


def test_reshaping_changes_sizes_and_nothing_else():
    sample = draw("MRS", np.random.default_rng(0))
    sixth = resized({"large": 1 / 6})(sample)
    assert sixth.stages[0] == sample.stages[0][: round(len(sample.stages[0]) / 6)]
    assert all(sixth.stages) and len(sixth.stages) == len(sample.stages)
    assert resized({"small": 4.0})(sample) == sample
    doubled = resized({"large": 2.0})(sample)
    assert doubled.stages[-1] == sample.stages[-1] * 2
    plain_workload, reshaped = (
        applications(np.zeros(2), 0, ["MRS", "EV"], reshape)
        for reshape in (None, resized({"large": 1 / 6}))
    )
    assert plain_workload.applications == reshaped.applications
    assert len(reshaped) < len(plain_workload)


def test_differences_are_taken_within_a_run():
    frame = pd.DataFrame(
        {
            "pool": ["a"] * 4,
            "seed": [0, 0, 1, 1],
            "policy": ["vtc", "x"] * 2,
            "mean_s": [10.0, 5.0, 100.0, 150.0],
        }
    )
    assert beside_others("pool").compared(frame).vs_vtc.tolist() == [0, -50, 0, 50]
    assert (
        plain("justitia:predictor=perfect,cost=compute") == "justitia:cost=compute"
        and plain("srjf:predictor=mlp") == "srjf"
    )


@pytest.mark.nightly
def test_the_same_point_gives_the_same_rows():
    arguments = {
        "policies": ["justitia:predictor=perfect", "vtc"],
        "seed": 3,
        "count": 8,
        "offline": True,
    }
    assert compare(**arguments) == compare(**arguments)


def test_errors_of_a_class_are_the_same_for_all_of_it():
    options = parse_policy("justitia").policy.Options(predictor="perfect", error=4.52)
    predictor = ClassErrors(options)
    samples = [draw("CC", np.random.default_rng(seed)) for seed in (0, 1)]
    predictor.truth = Known([sample.requests for sample in samples])
    said = [
        predictor.application(Application(i, f"a{i}", 0.0, "CC", ""), kv_token_time) for i in (0, 1)
    ]
    true = [sum(kv_token_time(p, d) for p, d in sample.requests) for sample in samples]
    assert np.isclose(said[0] / true[0], said[1] / true[1], rtol=1e-3) and not np.isclose(
        said[0], true[0], rtol=1e-2
    )


def test_a_sorted_queue_gives_the_same_order_as_a_heap():
    heap, sorting = RankedQueue(), SortedQueue()
    for queue in (heap, sorting):
        for row, rank in enumerate((5, 1, 4, 1, 3)):
            queue.add(row, (rank,))
        queue.remove(3)
    orders = []
    for queue in (heap, sorting):
        order = []
        while len(queue):
            order.append(queue.peek())
            queue.remove(order[-1])
        orders.append(order)
    assert orders[0] == orders[1] == [1, 4, 2, 0]
