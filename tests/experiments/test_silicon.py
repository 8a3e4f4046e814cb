"""Measured closed loops of real GPUs, and the same loops simulated."""

from dataclasses import replace

import pandas as pd
import pytest

pytest.importorskip("aiconfigurator_core")

from twinserve.experiments.measured.points import read_loops  # noqa: E402
from twinserve.experiments.silicon import main  # noqa: E402
from twinserve.experiments.silicon.main import (  # noqa: E402
    ERRORS,  # noqa: E402
    FORMS,
    loop,
    settings,
    workload,
)
from twinserve.experiments.study.study import Scale  # noqa: E402
from twinserve.profiles.profile import load_profile  # noqa: E402

POINTS = {point.name: point for point in read_loops()}


def _points(model: str, gpu: str, **fields) -> list:
    given = {"model": model, "gpu": gpu, **fields}
    return [p for p in POINTS.values() if all(getattr(p, k) == v for k, v in given.items())]


def test_the_points_are_those_of_known_engines():
    assert len(POINTS) == 599
    assert len(_points("qwen3-32b", "h100")) == 90
    for point in POINTS.values():
        assert point.tp >= 1 and point.concurrency >= 1 and point.ep in (1, point.tp)
        assert 1e-3 < point.seconds < 1 and point.ttft_s > point.seconds / 10


def test_a_loop_has_the_stated_lengths_and_starts_as_said():
    point = _points("qwen3-32b", "h100", tp=4, isl=1024, osl=512, concurrency=8)[0]
    at_once, one_by_one = workload(point, "all at once"), workload(point, "staggered")
    assert len(at_once) == 80 and set(at_once.prompt_tokens) == {1024}
    assert at_once.arrival_s.max() == 0 and at_once.concurrency == 8
    took = point.ttft_s + 512 * point.seconds
    assert one_by_one.arrival_s[7] == pytest.approx(7 / 8 * took)
    drawn = workload(replace(point, shortest=0.8), "staggered")
    assert 819 <= drawn.prompt_tokens.min() < drawn.prompt_tokens.max() <= 1024


def test_experts_that_lie_whole_on_ranks_do_so_here():
    """Six points of the file have as many ranks of experts (`moe_ep_size`) as ranks."""
    whole = [point for point in POINTS.values() if point.ep > 1]
    assert len(whole) == 6
    for point in whole:
        config = settings(point, "roofline")
        profile = load_profile(config.profile)
        assert (profile.tp, profile.ep) == (point.ep, True)
    assert not any(p.profile.endswith(":ep") for p in POINTS.values() if p not in whole)


def test_a_form_without_step_times_has_rows_that_say_why():
    (point,) = [p for p in POINTS.values() if p.ep == 4]
    row = loop(point.name, "0", "operators", "staggered", 0)
    assert "ranks that share experts" in row["why"] and row["concurrency"] == point.concurrency


def test_rows_of_fewer_requests_name_the_published_point():
    point = _points("qwen3-32b", "h100", tp=4, isl=1024, osl=512, concurrency=8)[0]
    row = loop(point.name, "0", "roofline", "all at once", rounds=3, fewer=2)
    assert (row["concurrency"], row["under_way"]) == (8, 4)


def test_the_errors_go_to_a_table(tmp_path):
    only = ("model=qwen3-32b", "concurrency=8")
    main.STUDY.run(("errors",), Scale(quick=True, seeds=(0,)), tmp_path, 1, only=only)
    table = pd.read_csv(tmp_path / "errors" / "table.csv")
    assert len(table) == 4 and [*table.columns] == ERRORS
    report = (tmp_path / "tables.md").read_text()
    assert f"| {100 * table.TPOT[0]:+.0f} (" in report and report.count("### ") == len(main.KINDS)


@pytest.mark.slow
def test_kernel_tables_of_gpt_oss_meet_it_better_than_specifications():
    """Experts of MXFP4, in a fast and in a full loop."""
    for tp, concurrency in ((8, 4), (1, 16)):
        load = {"concurrency": concurrency, "isl": 1024, "osl": 1024}
        point, *_ = _points("gpt-oss-120b", "h200", tp=tp, **load)
        tables, derived = (loop(point.name, "0", f, "all at once", rounds=3) for f in FORMS)
        assert abs(tables["TPOT"]) < 0.12 and abs(derived["TPOT"]) < 0.25


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "gpu", "tp", "concurrency", "form"),
    [
        ("qwen3-32b", "h100", 2, 16, "operators"),
        ("qwen3-32b", "h100", 4, 64, "roofline"),
        ("llama-3.1-70b-fp8", "h200", 4, 16, "roofline"),
        ("llama-3.1-70b-fp8", "h100", 8, 32, "roofline"),
    ],
)
def test_dense_engines_are_met_within_a_quarter(model, gpu, tp, concurrency, form):
    """A token and the throughput; the first token hangs on how clients start."""
    (point,) = _points(model, gpu, tp=tp, concurrency=concurrency, isl=1024, osl=1024)
    found = {start: loop(point.name, "0", form, start) for start in ("all at once", "staggered")}
    for row in found.values():
        assert abs(row["TPOT"]) < 0.25 and abs(row["throughput"]) < 0.3
        assert row["preemptions"] == 0
    assert found["staggered"]["ours_TTFT"] < found["all at once"]["ours_TTFT"]
