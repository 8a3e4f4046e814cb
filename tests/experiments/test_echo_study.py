"""The Echo study: every figure at its smallest size, the minutes of a day and the tables by hand."""

import numpy as np
import pandas as pd
import pytest
from study_checks import check_figures, quick_run, reasoned, table
from twinserve.experiments import echo_points as points
from twinserve.experiments.echo import STUDY
from twinserve.experiments.echo_runs import LADDER, PEAK_RATE, POOLS, TPOT_S, TTFT_S, day, foretold_arrivals, offline
from twinserve.experiments.echo_tables import ONLINE, SHOWN, beside_bs, of_memory, of_series
from twinserve.experiments.study import Scale
from twinserve.traces.tidal import tidal, tide

out = quick_run(STUDY)


def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    check_figures(STUDY, out, said=lambda claim: reasoned(claim) or claim["why"] == "variant")


def test_bs_is_its_own_measure_and_objectives_are_shares(out):
    for name in ("fig6", "settings"):
        found = table(out, name)
        bs = found[found.policy == "echo-bs"]
        assert (bs.speedup == 1).all() and (bs.speedup_rps == 1).all() and (found.offline_tps > 0).all()
        assert ((found[list(ONLINE)] >= 0) & (found[list(ONLINE)] <= 1)).all(axis=None)
        assert (found.attainment <= found[["ttft_attainment", "tpot_attainment"]].min(axis=1) + 1e-9).all()


def test_known_step_times_keep_the_objective_as_printed(out):
    found = table(out, "fig6")
    exact = found[(found.estimator == "perfect") & (found.policy != "echo-bs")]
    assert len(exact) and (exact.in_time == 1).all() and (exact.ttft_attainment == 1).all()


def test_shared_documents_are_found_in_the_cache_and_chats_are_not(out):
    found = table(out, "fig6").set_index(["pool", "estimator", "policy"]).hit_rate
    assert found[("loogle-short", "paper", "echo")] >= found[("loogle-short", "paper", "echo-bs")]
    assert found[("loogle-short", "paper", "echo")] > 0.5 and found[("sharegpt", "paper", "echo")] < 0.01


def test_quantiles_rise_and_online_requests_alone_are_in_time(out):
    found = table(out, "fig7")
    for _, part in found.groupby(["estimator", "policy"]):
        assert part.ttft_s.is_monotonic_increasing and part.tpot_s.is_monotonic_increasing
    alone = found[found.policy == "online alone"]
    assert (alone.attainment == 1).all()
    beside = found[(found.policy == "echo-bs") & (found.estimator == "paper")]
    assert (alone.ttft_s.to_numpy() < beside.ttft_s.to_numpy()).all()


def test_memory_is_all_of_it_by_kind(out):
    series = pd.read_csv(out / "fig10" / "points.csv")
    kinds = series[["online_used", "offline_used", "online_cached", "offline_cached"]]
    # a cached block of a ledger that tells kinds apart is one or the other; blocks shared by both classes count once
    assert (kinds >= 0).all(axis=None) and (kinds.sum(axis=1) <= 1 + 1e-9).all()
    assert series.hit_tokens.sum() <= series.prompt_tokens.sum()


def test_minutes_of_a_day_are_those_of_the_whole_day():
    found, whole = day(12, 3), tidal(peak_rate=PEAK_RATE, seed=3)
    for part in range(12):
        start = (part * 120 + 60) * 60.0
        theirs = whole.arrival_s[(whole.arrival_s >= start) & (whole.arrival_s < start + 60)] - start
        ours = found.arrival_s[(found.arrival_s >= 60 * part) & (found.arrival_s < 60 * part + 60)] - 60 * part
        assert np.allclose(ours, theirs)
    assert (found.slo_ttft_s == TTFT_S).all() and (found.slo_tpot_s == TPOT_S).all()
    assert tide(np.array([5.0, 13.0]) * 3600) == pytest.approx([1 / 6, 1.0])


def test_pools_are_submitted_at_once():
    for name in POOLS:
        pool = offline(name, 1, 50)
        assert len(pool) == 50 and not pool.arrival_s.any() and (pool.klass == 1).all()


def test_expected_arrivals_look_at_what_was():
    found = pd.DataFrame(foretold_arrivals(seed=1, burstiness=0.0))
    expected = found.actual.rolling(15).mean().shift(1)
    assert np.allclose(found["mean"][15:], expected[15:])
    assert (found.high >= found["mean"]).all()


def test_speedups_are_seed_by_seed():
    rows = []
    for seed, (bs, echo) in enumerate(((100.0, 300.0), (200.0, 400.0))):
        for policy, tps in ((LADDER[0], bs), (LADDER[-1], echo)):
            same = dict.fromkeys(SHOWN, 1.0)
            rows.append({"pool": "p", "estimator": "paper", "policy": policy, "seed": seed, **same, "offline_tps": tps})
    found = beside_bs(["pool", "estimator", "policy"])(pd.DataFrame(rows)).set_index("policy")
    assert found.speedup["echo"] == pytest.approx((3 + 2) / 2) and found.speedup_rps["echo"] == 1


def test_what_the_series_amount_to_by_hand():
    names = ("online_used", "offline_used", "online_cached", "offline_cached", "steps_half_full", "steps")
    rows = [
        {"online": 1, "offline": 9, "tide": 0.2, "prompt_tokens": 100, "hit_tokens": 80},
        {"online": 2, "offline": 7, "tide": 0.5, "prompt_tokens": 0, "hit_tokens": 0},
        {"online": 3, "offline": 5, "tide": 1.0, "prompt_tokens": 300, "hit_tokens": 150},
    ]
    same = dict.fromkeys(names, 0.5) | {"policy": "echo", "estimator": "paper", "memory": "all", "seed": 0}
    same |= {"steps_half_full": 3, "steps": 4}
    found = of_series(pd.DataFrame([{**same, **row} for row in rows])).iloc[0]
    assert found.correlation == pytest.approx(-1) and found.half_full == 0.75
    assert (found.hit_rate, found.hit_rate_trough, found.hit_rate_peak) == (230 / 400, 0.8, 0.5)
    held = pd.DataFrame({"burstiness": 0.3, "seed": 0, "predicted": [0.4, 0.4], "held": [0.5, 0.2]})
    memory = of_memory(held).iloc[0]
    assert memory.exceeded == 0.5 and memory.spare == pytest.approx(0.1)


def test_the_full_study_runs_what_it_names():
    found = [p.arguments for p in points.throughput(Scale())]
    assert {a["pool"] for a in found} == set(POOLS) and {a["seed"] for a in found} == {0, 1, 2}
    # BS asks no estimator: its run is the same for both
    assert all("estimator" not in a for a in found if a["policy"] == "echo-bs")
    changes = {p.axes["change"] for p in points.varied(Scale())}
    assert changes == set(points.VARIANTS)
