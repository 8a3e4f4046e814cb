"""The LayerKV study: every figure at its smallest size, the testbed and the comparison with vLLM by
hand."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.study_checks import (
    all_differ,
    check_figures,
    check_one_figure,
    measured,
    quick_run,
    table,
)
from twinserve.experiments.layerkv import claims, points
from twinserve.experiments.layerkv.claims import TIMES, VALUES, beside_vllm
from twinserve.experiments.layerkv.main import STUDY
from twinserve.experiments.layerkv.runs import NO_SLO, SAVABLE, VLLM, testbed
from twinserve.experiments.study.study import Scale

testbed.__test__ = False  # the name of a function of the study, not a test


out = quick_run(STUDY)


@pytest.mark.slow
def test_one_figure_has_its_table_its_plot_and_its_claims(tmp_path):
    check_one_figure(STUDY, "contention", tmp_path)


@pytest.mark.nightly
def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    check_figures(STUDY, out, claims=False)


@pytest.mark.nightly
def test_ttft_has_two_parts_and_violations_two_causes(out):
    for figure in STUDY.figures:
        found = table(out, figure.name)
        assert np.allclose(found.queueing_s + found.prefill_s, found.ttft_s)
        assert (found.queueing_s >= 0).all() and (found.prefill_s > 0).all()
        assert (found.violations <= found.ttft_violations + found.tpot_violations + 1e-9).all()
        assert (
            found.violations >= found[["ttft_violations", "tpot_violations"]].max(axis=1) - 1e-9
        ).all()
        vllm = found[found["variant" if "variant" in found else "policy"].isin([VLLM, "vLLM"])]
        assert (
            (vllm.ttft_gain == 1).all()
            and (vllm.throughput_change == 0).all()
            and (vllm.fewer_violations == 0).all()
        )


@pytest.mark.nightly
def test_nothing_changes_while_nothing_binds_and_long_prompts_begin_earlier(out):
    found = table(out, "fig4").set_index(["context", "policy"])
    for name in TIMES:
        for policy in ("layerkv", SAVABLE):
            assert found[name][(128, policy)] == found[name][(128, VLLM)]
    assert found.queueing_s[(8192, SAVABLE)] < found.queueing_s[(8192, VLLM)]
    assert found.recomputes[(8192, SAVABLE)] == 0


def test_the_testbed_is_the_papers():
    short, long = testbed("llama-2-7b", 1, 4096), testbed("llama-2-7b", 1, 16896)
    assert long.num_gpu_blocks < short.num_gpu_blocks and long.max_model_len == 16896
    # two GPUs share a link
    assert testbed("yi-34b-200k", 2, 4096).pcie_bytes_per_s == short.pcie_bytes_per_s
    # the longest configured input is one step of vLLM 0.5
    assert long.max_num_batched_tokens == 16896


def test_runs_are_those_that_the_full_study_names():
    found = pd.DataFrame([p.arguments for p in points.BY_CONTEXT(Scale())])
    assert not found.duplicated().any() and len(found) == (7 + 5 + 5) * 7 * len(Scale().seeds)
    assert {p.arguments["tp"] for p in points.BY_DEGREE(Scale())} == {2, 4, 8}


def test_gains_are_seed_by_seed():
    rows = []
    for seed, (theirs, ours) in enumerate(((8.0, 2.0), (9.0, 1.0))):
        for policy, ttft in ((VLLM, theirs), ("layerkv", ours)):
            same = dict.fromkeys(VALUES, 1.0)
            rows.append(
                {
                    "rate": 6.0, "policy": policy, "seed": seed, **same, "ttft_s": ttft,
                    "violations": ttft / 10,
                }
            )  # fmt: skip
    found = beside_vllm("rate", "policy")(pd.DataFrame(rows)).set_index("policy").loc["layerkv"]
    assert found.ttft_gain == pytest.approx((4 + 9) / 2) and found.ttft_gain_ci > 0
    assert found.fewer_violations == pytest.approx((0.6 + 0.8) / 2) and found.throughput_change == 0


def _points(axis, at, **values):
    """Points of vLLM and LayerKV along an axis, one for each of `at` and each seed; values:
    NAME=[of each seed: [of each]], LayerKV's; vLLM's are 1."""
    rows = []
    for seed in (0, 1):
        for i, where in enumerate(at):
            same = {"model": "llama-2-7b", "seed": seed, axis: where} | dict.fromkeys(VALUES, 1.0)
            rows += [
                {**same, "policy": VLLM},
                {**same, "policy": "layerkv"} | {k: v[seed][i] for k, v in values.items()},
            ]
    return pd.DataFrame(rows)


def test_what_is_said_along_an_axis_is_of_each_seed():
    along = beside_vllm("model", "tp", "policy", narrowed=claims.narrowed)
    found = along(
        _points("tp", (2, 4, 8), tokens_per_s=[[1.1, 0.95, 1.0], [0.8, 0.9, 0.8]])
    ).set_index(["policy", "tp"])
    assert np.isnan(found.narrowed["layerkv", 2])
    assert found.narrowed["layerkv", 4] == pytest.approx(((0.1 - 0.05) + (0.2 - 0.1)) / 2)
    assert (
        found.narrowed["layerkv", 8] == pytest.approx((0.05 - 0.1) / 2)
        and found.narrowed_ci["layerkv", 8] > 0.9
    )
    along = claims.BY_RATE
    found = along(
        _points("rate", (4.0, 6.0, 8.0), violations=[[0.0, 0.2, 0.3], [0.0, 0.05, 0.3]])
    ).set_index("policy")
    assert (found.onset["layerkv"] == 7.0).all() and (found.onset[VLLM] == 4.0).all()
    along = claims.BY_CONTEXT
    values = {
        "ttft_s": [[1.0, 8.0], [2.0, 8.0]],
        "tpot_s": [[1.0, 2.0], [1.0, 2.0]],
        "queueing_s": [[0.5, 6.0], [1.0, 2.0]],
    }
    found = along(_points("context", (128, 1024), **values)).set_index(["policy", "context"])
    assert (
        found.growth["layerkv", 1024] == (8 / 2 + 4 / 2) / 2
        and found.queued_part["layerkv", 1024] == (0.75 + 0.25) / 2
    )


POLICIES = (VLLM, "layerkv", SAVABLE, NO_SLO)


def _everybody(axis, at, **values):
    return measured(
        {"model": "llama-2-7b", "policy": policy, axis: where} | values
        for policy in POLICIES
        for where in at
    )


def test_claims_of_contexts_can_differ():
    found = _everybody(
        "context", (128, 1024, 8192), queued_part=0.1, growth=1.0, ttft_s=1.0, tpot_s=1.0
    )
    all_differ(claims.breakdown_claims(found))
    all_differ(
        claims.context_claims(
            _everybody("context", (128, 1024), ttft_gain=0.5, throughput_change=-0.2)
        )
    )


def test_claims_of_rates_can_differ():
    found = _everybody("rate", (4.0, 8.0), ttft_gain=0.5, p99_gain=0.9, throughput_change=-0.2)
    all_differ(claims.rate_claims(found))
    all_differ(claims.tail_claims(found))
    low = {"onset": 3.0, "violations": 0.5, "tpot_violations": 0.1, "more_tpot_violations": 0.0}
    found = claims.violation_claims(
        _everybody("rate", (4.0, 5.5, 8.0), fewer_violations=-0.1, **low)
    )
    all_differ(found[:3])
    # without Algorithm 1 it is not worse than vLLM
    all_differ(
        claims.violation_claims(_everybody("rate", (4.0, 5.5, 8.0), fewer_violations=0.1, **low))[
            3:
        ]
    )


def _degrees(gains, narrowed, half):
    changes = (0.06, -0.06, -0.07)
    return measured(
        (
            {
                "context": 1024, "policy": policy, "tp": tp, "ttft_gain": gain,
                "throughput_change": change, "narrowed": less,
            }
            for policy in POLICIES
            for tp, gain, change, less in zip(
                (2, 4, 8), gains, changes, (np.nan, *narrowed), strict=True
            )
        ),
        half,
    )  # fmt: skip


def test_at_every_degree_is_at_all_of_them():
    all_differ(claims.degree_claims(_degrees((2.9, 0.34, 0.44), (0.0, -0.01), 0.001)))
    # one degree that differs is enough, and one that is not told is not told
    all_differ(claims.degree_claims(_degrees((2.9, 1.5, 0.9), (0.05, -0.01), 0.001)))
    told = [
        claim.verdict for claim in claims.degree_claims(_degrees((2.9, 1.5, 1.1), (0.5, 0.1), 0.2))
    ]
    assert set(told) == {"not significant"}
    told = [
        claim.verdict for claim in claims.degree_claims(_degrees((2.9, 1.5, 1.1), (0.5, 0.1), 0.01))
    ]
    assert set(told) == {"agrees"}


def test_an_interval_that_holds_no_effect_tells_nothing():
    found = measured(
        [
            {"model": "m", "policy": p, "rate": 6.0, "p99_gain": 24.6, "p99_gain_ci": 29.0}
            for p in POLICIES
        ]
    )
    assert {claim.verdict for claim in claims.tail_claims(found)} == {"not significant"}
