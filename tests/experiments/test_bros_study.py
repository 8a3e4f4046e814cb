"""The BROS study: every figure at its smallest size, and the arithmetic of its averages by hand."""

import pandas as pd
import pytest

from tests.experiments.study_checks import check_figures, check_one_figure, quick_run, table
from twinserve.experiments.bros.headline import ACM, OPT, TGI, headline, nobody_in_time
from twinserve.experiments.bros.main import (
    BI_CACHE,
    CACHED,
    CACHES,
    COLUMNS,
    PURE,
    REAL_TIME_ONLY,
    STUDY,
)
from twinserve.experiments.study.study import Scale

out = quick_run(STUDY)


@pytest.mark.slow
def test_one_figure_has_its_table_its_plot_and_its_claims(tmp_path):
    check_one_figure(STUDY, "fig13", tmp_path)


@pytest.mark.nightly
def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    tables_only = {figure.name for figure in STUDY.figures if figure.plot is None}
    assert tables_only == {"hybrid", "acm", "lmsys", "pure"}
    check_figures(STUDY, out, tables_only=tables_only, claims=False)


@pytest.mark.nightly
def test_shares_are_shares_and_figures_of_the_same_runs_agree(out):
    hybrid = table(out, "fig9")
    pd.testing.assert_frame_equal(hybrid, table(out, "fig10"))
    for name in ("fig2", "fig9", "fig11", "fig12", "parts"):
        found = table(out, name)
        for share in (
            "ttft_attainment",
            "tpot_attainment",
            "token_attainment",
            "queueing",
            "kv_peak",
            "saturated",
            "unclear",
        ):
            assert found[share].between(0, 1).all(), (name, share)
    assert (hybrid.be_rps > 0).all() and (table(out, "fig11").be_rps == 0).all()


@pytest.mark.nightly
def test_first_come_first_served_is_its_own_measure(out):
    found = table(out, "fig2").set_index(["rate", "policy"])
    assert (
        found.xs("vllm-v0", level="policy")[["normalized_ms_lower", "queueing_lower"]] == 0
    ).all(axis=None)
    first, preempting = found.loc[(24.0, "vllm-v0")], found.loc[(24.0, "preemptive-wait")]
    assert preempting.normalized_ms_lower == pytest.approx(
        first.normalized_ms - preempting.normalized_ms
    )


@pytest.mark.nightly
def test_only_without_swap_and_bi_cache_is_anything_recomputed(out):
    found = table(out, "fig12").set_index("cache").recomputes
    assert found["bi-cache"] == found["paged, swap"] == 0 < found["paged, recompute"]


def test_what_bi_cache_gains_is_the_mean_of_ratios_of_the_same_seed():
    rows = []
    for seed, (with_it, without) in enumerate(((0.9, 0.3), (0.8, 0.4))):
        for cache, share in (("bi-cache", with_it), ("paged, recompute", without)):
            where = {"profile": OPT[0], "cache": cache, "seed": seed}
            rows.append(where | dict.fromkeys(COLUMNS, 1.0) | {"ttft_attainment": share})
    found = BI_CACHE(pd.DataFrame(rows)).set_index("cache").loc["paged, recompute"]
    assert found.ttft_attainment_gain == pytest.approx((3 + 2) / 2)
    assert found.tpot_attainment_gain == 1


def test_runs_are_those_that_the_full_study_names():
    figures, full = {figure.name: figure for figure in STUDY.figures}, Scale()
    runs = [p for name in ("hybrid", "acm", "lmsys") for p in figures[name].points(full)]
    settings = pd.DataFrame([p.arguments["settings"] for p in runs])
    assert not settings.duplicated().any() and settings.duration.eq(600.0).all()  # as printed
    # two models and three, three more with other lengths; three rates, three seeds
    assert settings.groupby("policy").size().to_dict() == dict.fromkeys(
        ("vllm-v0", "round-robin", "bros"), 8 * 3 * 3
    )
    assert set(settings.profile[settings.trace == "lmsys"]) == set(ACM)
    assert set(settings.profile[settings.cap_length == 2048]) == set(OPT)
    alone = [(p.axes["policy"], p.arguments["settings"]["policy"]) for p in PURE(full)]
    assert dict(alone) == {p: p for p in ("vllm-v0", "vllm", *TGI)} | {"bros": REAL_TIME_ONLY}
    assert {p.arguments["settings"]["policy"] for p in CACHED(full)} == set(CACHES.values())


def made_up() -> pd.DataFrame:
    """Two settings of a model, two seeds; BROS always 0.8 and 0.6, vLLM 0.4 and 0 (seed 0), 0.2 and
    0.1 (seed 1)."""
    theirs = {(0, 3.0): 0.4, (0, 6.0): 0.0, (1, 3.0): 0.2, (1, 6.0): 0.1}
    rows = []
    for (seed, rate), value in theirs.items():
        for policy, share in (("bros", 0.8 if rate == 3.0 else 0.6), ("vllm-v0", value)):
            same = dict.fromkeys(COLUMNS, 1.0) | {"saturated": float(share != 0.8)}
            where = {
                "profile": OPT[0],
                "lengths": "sharegpt",
                "rate": rate,
                "policy": policy,
                "seed": seed,
            }
            rows.append(where | same | {"ttft_attainment": share})
    return pd.DataFrame(rows)


def test_means_of_ratios_and_ratios_of_means_by_hand():
    found = headline(made_up())
    row = found[found.rates == "all"].set_index("quantity").loc["ttft_attainment"]
    # seed 0: 0.8 / 0.4, and one setting without a ratio; seed 1: mean of 0.8 / 0.2 and 0.6 / 0.1
    assert row.ratio == pytest.approx((2 + 5) / 2)
    assert row.of_means == pytest.approx((0.7 / 0.2 + 0.7 / 0.15) / 2)
    assert (
        row.left_out == pytest.approx(0.5)
        and row.best == pytest.approx((2 + 6) / 2)
        and row.settings == 2
    )
    assert row.bros == pytest.approx(0.7) and row.other == pytest.approx(0.175)
    # vLLM's queue grows in both settings, ours in one
    assert row.other_saturated == 2 and row.bros_saturated == 1
    claim = nobody_in_time(found, "not known")
    assert (claim.ours, claim.verdict) == ("ACM: 0.5 ± 6.4 of 2", "not significant")


def test_a_seed_that_lacks_a_setting_gives_no_mean_over_settings():
    points = made_up()
    points.loc[points.index[0], "every_gap_attainment"] = float("nan")  # of seed 0
    rows = headline(points)
    rows = rows[rows.rates == "all"].set_index("quantity")
    assert rows.seeds["every_gap_attainment"] == 1 and rows.ratio["every_gap_attainment"] == 1
    assert rows.seeds["tpot_attainment"] == 2
