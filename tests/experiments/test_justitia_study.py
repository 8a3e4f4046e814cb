"""Justitia's figures, small: every table and plot is made, and what must hold of any workload
holds."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.study_checks import check_figures, check_one_figure, quick_run, table
from twinserve.experiments.justitia import claims, tables
from twinserve.experiments.justitia.claims import QUEUES, RIVALS, judge_close, judge_up_to
from twinserve.experiments.justitia.main import POLICIES as ALL
from twinserve.experiments.justitia.main import STUDY
from twinserve.experiments.justitia.overhead import ClassErrors, Known, SortedQueue
from twinserve.experiments.justitia.runs import compare, fair_end, plain, resized
from twinserve.experiments.justitia.tables import COMPLETION, MEASURES, beside_others
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


# -- what Justitia's study claims of tables that are made by hand ----------------------------------
def rows(*records: dict) -> pd.DataFrame:
    """A table: pairs are a mean and the half width of its interval."""
    found = []
    for record in records:
        pairs = {name: value for name, value in record.items() if isinstance(value, tuple)}
        plain_values = {name: value for name, value in record.items() if name not in pairs}
        means = {name: value[0] for name, value in pairs.items()}
        found.append(
            plain_values | means | {f"{name}_ci": value[1] for name, value in pairs.items()}
        )
    return pd.DataFrame(found)


def verdicts(found) -> list[str]:
    assert all(claim.verdict == "agrees" or len(claim.why) > 20 for claim in found), found
    return [claim.verdict for claim in found]


def test_mergers_that_gain_nothing_and_delay_somebody_differ():
    def table_of(ratio, mean_s, delayed):
        values = {"size": "ours", "over_justitia": ratio, "delayed": delayed}
        return rows(*({"policy": p, "mean_s": mean_s} | values for p in ("kv-share", "justitia")))

    assert verdicts(claims.FIG3(table_of((0.8, 0.1), (500.0, 20.0), (1.0, 0.0)))) == ["differs"] * 4
    assert (
        verdicts(claims.FIG3(table_of((1.25, 0.05), (190.0, 30.0), (0.0, 0.0)))) == ["agrees"] * 4
    )
    assert (
        verdicts(claims.FIG3(table_of((1.25, 0.4), (190.0, 90.0), (1 / 3, 1.4))))
        == ["not significant"] * 4
    )


def test_lengths_outside_of_the_papers_differ():
    table = pd.DataFrame({"kind": ["FV"], "what": ["prompt"], "least": [350.0], "most": [380.0]})
    assert verdicts(claims.fig4(table)) == ["differs"]
    assert verdicts(claims.fig4(table.assign(least=360.0))) == ["agrees"]


def test_completion_times_that_are_not_lower_differ():
    def claims_of(vs_vtc, vs_parrot, srjf):
        both = {"density": "all", "pool": "profile"}
        ours = both | {
            "policy": "justitia",
            "vs_vtc": vs_vtc,
            "vs_parrot": vs_parrot,
            "vs_justitia": (0.0, 0.0),
        }
        other = both | {
            "policy": "srjf",
            "vs_vtc": vs_vtc,
            "vs_parrot": vs_parrot,
            "vs_justitia": srjf,
        }
        return verdicts(claims.jct("Fig. 8", "Llama-7B", claims.TEXTS.FIG8)(rows(ours, other)))

    assert claims_of((5.0, 2.0), (9.0, 3.0), (25.0, 5.0)) == ["differs"] * 3
    assert claims_of((-57.0, 5.0), (-30.0, 9.0), (9.0, 3.0)) == [
        "agrees",
        "direction only",
        "not significant",
    ]


def test_a_worst_delay_that_is_not_half_of_the_others_differs():
    def claims_of(share, worst, half_delay):
        values = {"pool": "459", "not_delayed": share, "worst": worst, "half_delay": half_delay}
        names = ("justitia", *RIVALS)
        return verdicts(claims.fig10(rows(*({"policy": name} | values for name in names))))

    assert claims_of((0.5, 0.1), (2.5, 0.3), (-0.2, 0.1)) == ["differs"] * 7
    assert (
        claims_of((0.9, 0.02), (1.27, 0.03), (0.2, 0.3)) == ["agrees"] * 2 + ["not significant"] * 5
    )


def test_a_cost_in_computation_that_helps_or_hurts_more_than_up_to_differs():
    def claims_of(change):
        values = {"pool": "profile", "density": "2x", "policy": "justitia:cost=compute"}
        return verdicts(
            claims.fig12(rows(values | {"vs_justitia": change, "p90_vs_justitia": change}))
        )

    assert claims_of((-12.0, 2.1)) == claims_of((488.0, 129.0)) == ["differs"] * 2
    assert claims_of((-2.3, 2.1)) == ["no effect"] * 2
    assert claims_of((40.0, 8.0)) == ["agrees"] * 2
    assert claims_of((18.0, 13.0)) == ["direction only"] * 2
    assert claims_of((30.0, 77.0)) == ["not significant"] * 2


def test_an_elephant_that_srjf_does_not_delay_or_justitia_does_differs():
    def claims_of(srjf, justitia):
        common = {"crowd": "as drawn, profile", "gps_s": (300.0, 1.0), "bound_s": (400.0, 1.0)}
        grown = {"srjf": srjf, "justitia": justitia}
        records = (
            {"policy": p, "mice": m, "elephant_s": (100.0, 1.0), "grown": grown[p]}
            for p in grown
            for m in (400, 600)
        )
        return verdicts(claims.fig11(rows(*(common | record for record in records))))

    assert claims_of((0.0, 0.0), (0.0, 0.0)) == claims_of((40.0, 3.0), (40.0, 3.0)) == ["differs"]
    assert claims_of((40.0, 3.0), (0.0, 0.0)) == ["agrees"]
    assert claims_of((40.0, 3.0), (10.0, 30.0)) == ["not significant"]


def test_the_elephants_growth_is_paired_by_seed():
    counts = {0: [100.0, 150.0], 1: [300.0, 450.0]}
    frame = pd.DataFrame(
        {
            "crowd": "x", "mice": m, "seed": seed, "policy": "srjf", "elephant_s": s, "mice_s": 1.0,
            "gps_s": 1.0, "bound_s": 1.0,
        }
        for seed, values in counts.items()
        for m, s in zip((0, 6), values, strict=True)
    )  # fmt: skip
    found = tables.ELEPHANTS(frame).set_index("mice")
    assert (
        np.isnan(found.grown[0])
        and np.isclose(found.grown[6], 50)
        and np.isclose(found.grown_ci[6], 0)
    )


def test_what_fair_sharing_owes_an_application_alone():
    """GPS gives it all M: C / M iterations; bound 2 adds its critical path, C / M and a longest
    request a stage and once."""
    workload = applications(np.zeros(1), 0, ["KBQAV"])
    C = sum(
        kv_token_time(p, d)
        for p, d in zip(
            workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True
        )
    )
    ends_s = np.arange(1, 100_001) / 100
    gps_s, bound_s = fair_end(workload, ends_s, 1000)
    assert gps_s == np.ceil(C / 1000) / 100
    longest = pd.Series(workload.output_tokens).groupby(workload.stage).max()
    assert np.isclose(
        bound_s,
        np.ceil(2 * C / 1000 + longest.sum() + (len(longest) + 1) * longest.max()) / 100,
        atol=0.02,
    )
    beyond_s, _ = fair_end(workload, ends_s[:10], 1000)
    assert np.isclose(beyond_s, C / 1000 / 100)


def test_errors_that_cost_nothing_and_other_amounts_differ():
    def claims_of(mlp, right, wrong, vs_53):
        kinds = {
            "mlp": mlp,
            "error 53 %": right,
            "error 452 %": wrong,
            "class error 53 %": right,
            "class error 452 %": wrong,
        }
        common = {
            "pool": "profile",
            "vs_53": vs_53,
            "error": mlp,
            "predict_ms": mlp,
            "train_s": mlp,
        }
        return verdicts(
            claims.TABLE2(
                rows(
                    *(
                        common | {"predictor": name, "mean_s": value}
                        for name, value in kinds.items()
                    )
                )
            )
        )

    assert claims_of((0.2, 0.01), (60.0, 5.0), (60.0, 5.0), (-5.0, 3.0)) == ["differs"] * 9
    found = claims_of((0.55, 0.05), (150.0, 9.0), (350.0, 50.0), (60.0, 26.0))
    assert found == ["agrees", "differs", "differs"] + ["agrees", "agrees", "direction only"] * 2


def test_errors_are_compared_within_a_seed_and_a_draw():
    frame = pd.DataFrame(
        {"predictor": name, "pool": "459", "seed": seed, "draw": draw, "mean_s": s, "p90_s": 1.0}
        | dict.fromkeys(("error", "predict_ms", "train_s"), 1.0)
        for name, factor in (
            ("perfect", 1.0),
            ("class error 53 %", 2.0),
            ("class error 452 %", 6.0),
        )
        for seed in (0, 1)
        for draw in range(1 if name == "perfect" else 2)
        for s in [factor * (seed + 1) * 10.0]
    )
    found = tables.errors(frame).set_index("predictor")
    assert found.vs_53["class error 452 %"] == 200 and found.vs_perfect["class error 452 %"] == 500
    assert (
        found.vs_53_ci["class error 452 %"] == 0
        and (found.seeds == 2).all()
        and np.isnan(found.vs_53["perfect"])
    )


def test_decisions_that_are_much_faster_or_do_not_grow_differ():
    def claims_of(plan_ms, over_least):
        plans = [
            {"queue": queue, "a_minute": rate} for queue, rates in QUEUES.items() for rate in rates
        ]
        return verdicts(
            claims.table3(
                rows(*(plan | {"plan_ms": plan_ms, "over_least": over_least} for plan in plans))
            )
        )

    assert (
        claims_of((0.34, 0.05), (1.1, 0.3))
        == ["differs"] * 5 + ["agrees"] + ["not significant"] * 2
    )
    assert claims_of((12.0, 1.0), (10.0, 1.0)) == ["differs"] * 6 + ["agrees"] * 2
    assert claims_of((0.8, 0.05), (3.0, 1.0))[::5] == ["agrees", "agrees"]


def test_up_to_and_very_close():
    assert judge_up_to(488.0, 129.0, 42.3) == "differs" and judge_up_to(45.0, 5.0, 42.3) == "agrees"
    assert [judge_close(change, 3.0) for change in (2.0, -20.0, 9.0)] == [
        "agrees",
        "differs",
        "not significant",
    ]


def fair_points(*rows) -> pd.DataFrame:
    """Of seeds 0, 1, ..: (justitia, srjf) of every measure."""
    names = (*MEASURES, *COMPLETION)
    return pd.DataFrame(
        {"density": "1x", "pool": "459", "seed": seed, "policy": policy}
        | dict.fromkeys(names, value)
        for seed, both in enumerate(rows)
        for policy, value in zip(("justitia", "srjf"), both, strict=True)
    )


def test_fairness_is_paired_by_seed_and_less_delay_is_fairer():
    """A share of 0.9 against 0.8 is ten points fairer; a worst ratio of 0.9 against 0.8 less so."""
    found = tables.fairness(fair_points((0.9, 0.8), (0.5, 0.5), (0.7, 0.5)))
    row = found[found.density == "1x"].iloc[0]
    assert row.not_delayed_gain == pytest.approx(10.0) and row.worst_gain == pytest.approx(-0.1)
    assert row.not_delayed_wins == pytest.approx(2.5 / 3)
    assert row.worst_wins == pytest.approx(0.5 / 3)
    assert row.mean_s_above == pytest.approx(100 * (0.125 + 0.0 + 0.4) / 3)


def test_who_is_fairer_is_told_only_beyond_the_spread():
    def told(*rows):
        return {c.what.split(": ")[1].split(";")[0]: c.verdict for c in claims_of(*rows)}

    def claims_of(*rows):
        return claims.fairness(tables.fairness(fair_points(*rows)))

    better = told((0.9, 0.5), (0.8, 0.4), (0.91, 0.5))
    assert better["no later than under VTC"] == "agrees"
    assert better["worst ratio to VTC"] == "differs"  # the larger one is the less fair
    wide = told((0.9, 0.5), (0.4, 0.8), (0.5, 0.5))
    assert set(wide.values()) == {"not significant"}
