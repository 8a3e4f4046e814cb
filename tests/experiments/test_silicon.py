"""Measured closed loops of real GPUs, and the same loops simulated."""

from dataclasses import replace

import pytest

pytest.importorskip("aiconfigurator_core")

from twinserve.experiments.silicon.loops import simulate, workload  # noqa: E402
from twinserve.experiments.silicon.points import INFERENCEMAX, read_points  # noqa: E402

POINTS = {point.name: point for point in read_points()}


def _points(model: str, gpu: str, **fields) -> list:
    given = {"model": model, "gpu": gpu, **fields}
    return [p for p in POINTS.values() if all(getattr(p, k) == v for k, v in given.items())]


def test_the_points_are_those_of_known_engines():
    assert len(POINTS) == 599
    assert len(_points("qwen3-32b", "h100")) == 90
    for point in POINTS.values():
        assert point.tp >= 1 and point.concurrency >= 1 and point.ep in (1, point.tp)
        assert 1e-3 < point.tpot_s < 1 and point.ttft_s > point.tpot_s / 10


def test_a_loop_has_the_stated_lengths_and_starts_as_said():
    point = _points("qwen3-32b", "h100", tp=4, input=1024, output=512, concurrency=8)[0]
    at_once, one_by_one = workload(point, "all at once"), workload(point, "staggered")
    assert len(at_once) == 80 and set(at_once.prompt_tokens) == {1024}
    assert at_once.arrival_s.max() == 0 and at_once.concurrency == 8
    took = point.ttft_s + 512 * point.tpot_s
    assert one_by_one.arrival_s[7] == pytest.approx(7 / 8 * took)
    drawn = workload(replace(point, client=INFERENCEMAX), "staggered")
    assert 819 <= drawn.prompt_tokens.min() < drawn.prompt_tokens.max() <= 1024


@pytest.mark.slow
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
    (point,) = _points(model, gpu, tp=tp, concurrency=concurrency, input=1024, output=1024)
    found = {start: simulate(point, form, start) for start in ("all at once", "staggered")}
    for row in found.values():
        assert abs(row["TPOT"]) < 0.25 and abs(row["throughput"]) < 0.3
        assert row["preemptions"] == 0
    assert found["staggered"]["ours_TTFT"] < found["all at once"]["ours_TTFT"]
