"""What Justitia's study claims of tables that are made by hand."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.justitia import claims, tables
from twinserve.experiments.justitia.claims import QUEUES, RIVALS, judge_close, judge_up_to
from twinserve.experiments.justitia.runs import fair_end
from twinserve.experiments.justitia.tables import COMPLETION, MEASURES
from twinserve.policies.parts.predictors import kv_token_time
from twinserve.traces.apps.generate import applications


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
