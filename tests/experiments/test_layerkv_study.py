"""The LayerKV study: every figure at its smallest size, the testbed and the comparison with vLLM by hand."""

import numpy as np
import pandas as pd
import pytest
from study_checks import check_figures, quick_run, table
from twinserve.experiments import layerkv_points as points
from twinserve.experiments.layerkv import STUDY
from twinserve.experiments.layerkv_claims import TIMES, VALUES, beside_vllm
from twinserve.experiments.layerkv_runs import SAVABLE, VLLM, testbed
from twinserve.experiments.study import Scale

testbed.__test__ = False  # the name of a function of the study, not a test


out = quick_run(STUDY)


def test_every_figure_has_its_table_its_plot_and_its_claims(out):
    check_figures(STUDY, out, claims=False)


def test_ttft_has_two_parts_and_violations_two_causes(out):
    for figure in STUDY.figures:
        found = table(out, figure.name)
        assert np.allclose(found.queueing_s + found.prefill_s, found.ttft_s)
        assert (found.queueing_s >= 0).all() and (found.prefill_s > 0).all()
        assert (found.violations <= found.ttft_violations + found.tpot_violations + 1e-9).all()
        assert (found.violations >= found[["ttft_violations", "tpot_violations"]].max(axis=1) - 1e-9).all()
        vllm = found[found[found.columns[1] if "variant" in found else "policy"].isin([VLLM, "vLLM"])]
        assert (vllm.ttft_gain == 1).all() and (vllm.throughput_change == 0).all() and (vllm.fewer_violations == 0).all()


def test_nothing_changes_while_nothing_binds_and_long_prompts_begin_earlier(out):
    found = table(out, "fig4").set_index(["context", "policy"])
    for name in TIMES:
        for policy in ("layerkv", SAVABLE):
            assert found[name][(128, policy)] == found[name][(128, VLLM)]
    assert found.queueing_s[(8192, SAVABLE)] < found.queueing_s[(8192, VLLM)]
    assert found.recomputes[(8192, SAVABLE)] == 0


def test_more_memory_does_not_queue_longer(out):
    varied = table(out, "settings").set_index(["varied", "value", "policy"])
    roomy = varied.loc[("factor on KV blocks, 4,096 tokens", 4.0, VLLM)]
    plain = varied.loc[("requests/s, 4,096 tokens", 1.0, VLLM)]
    assert roomy.kv_blocks == 4 * plain.kv_blocks and roomy.queueing_s <= plain.queueing_s


def test_the_testbed_is_the_papers():
    short, long = testbed("llama-2-7b", 1, 4096), testbed("llama-2-7b", 1, 16896)
    assert long.num_gpu_blocks < short.num_gpu_blocks and long.max_model_len == 16896
    alone, shared = testbed("yi-34b-200k", 2, 4096, link=1.0), testbed("yi-34b-200k", 2, 4096)
    assert shared.pcie_bytes_per_s == alone.pcie_bytes_per_s / 2 and shared.num_gpu_blocks == alone.num_gpu_blocks
    # the longest configured input is one step of vLLM 0.5
    assert long.max_num_batched_tokens == 16896


def test_runs_are_those_that_the_full_study_names():
    found = pd.DataFrame([p.arguments for p in points.contexts(Scale())])
    assert not found.duplicated().any() and len(found) == 3 * 7 * 3 * 3
    assert {p.arguments["tp"] for p in points.degrees(Scale())} == {2, 4, 8}
    varied = [p for p in points.varied(Scale()) if p.axes["varied"].startswith("TPOT")]
    assert {(p.axes["value"], p.arguments.get("tpot_s", 0.2)) for p in varied} == {(v, v) for v in (0.1, 0.2, 0.4)}


def test_gains_are_seed_by_seed():
    rows = []
    for seed, (theirs, ours) in enumerate(((8.0, 2.0), (9.0, 1.0))):
        for policy, ttft in ((VLLM, theirs), ("layerkv", ours)):
            same = dict.fromkeys(VALUES, 1.0)
            rows.append({"rate": 6.0, "policy": policy, "seed": seed, **same, "ttft_s": ttft, "violations": ttft / 10})
    found = beside_vllm(["rate", "policy"])(pd.DataFrame(rows)).set_index("policy").loc["layerkv"]
    assert found.ttft_gain == pytest.approx((4 + 9) / 2) and found.ttft_gain_ci > 0
    assert found.fewer_violations == pytest.approx((0.6 + 0.8) / 2) and found.throughput_change == 0
