"""Generated workloads: their moments, their arrivals, and that a seed fixes them."""

import numpy as np
import pytest
from scipy import special

from tests.traces.workload_strategies import assert_same
from twinserve.traces.generators import synth as module
from twinserve.traces.generators.synth import SHAPES, parameters, synth
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.workload import WorkloadError


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_have_the_published_mean_and_deviation(name):
    w = synth(name, rate=10, count=100_000, seed=1)
    check_workload(w)
    for values, shape in zip((w.prompt_tokens, w.output_tokens), SHAPES[name], strict=True):
        assert values.mean() == pytest.approx(shape.mean, rel=0.02)
        assert values.std() == pytest.approx(shape.std, rel=0.02)
        assert values.min() >= shape.low and values.max() <= shape.high


@pytest.mark.parametrize("shape", [s for pair in SHAPES.values() for s in pair])
def test_parameters_solve_for_the_clipped_moments(shape):
    # Against a log-normal distribution, integrated numerically over its quantiles.
    mu, sigma = parameters(shape)
    assert (mu, sigma) == pytest.approx(module._solved(shape), rel=1e-12)
    u = (np.arange(200_000) + 0.5) / 200_000
    x = np.clip(np.exp(mu + sigma * special.ndtri(u)), shape.low, shape.high)
    assert x.mean() == pytest.approx(shape.mean, rel=1e-4)
    assert x.std() == pytest.approx(shape.std, rel=1e-3)


def test_arrivals_are_poisson():
    w = synth("fixed:10,5", rate=4.0, count=20_000, seed=2)
    gaps = np.diff(w.arrival_s, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    # Kolmogorov-Smirnov, with its limit for many draws
    expected, ranks = -np.expm1(-4.0 * np.sort(gaps)), np.arange(len(gaps) + 1) / len(gaps)
    off = max((ranks[1:] - expected).max(), (expected - ranks[:-1]).max())
    assert special.kolmogorov(np.sqrt(len(gaps)) * off) > 0.01


def test_count_and_duration_cut_the_same_process():
    by_count = synth("sharegpt", rate=3, count=50, seed=5)
    longer = synth("sharegpt", rate=3, count=80, seed=5)
    assert by_count.prompt_tokens.tolist() == longer.prompt_tokens[:50].tolist()
    assert by_count.arrival_s.tolist() == longer.arrival_s[:50].tolist()
    until = float(longer.arrival_s[60])
    timed = synth("sharegpt", rate=3, duration_s=until, seed=5)
    assert len(timed) == 60 and timed.arrival_s.max() < until
    assert timed.output_tokens.tolist() == longer.output_tokens[:60].tolist()
    assert len(synth("sharegpt", rate=3, count=20, duration_s=until, seed=5)) == 20
    assert 1600 < len(synth("poisson", rate=3)) < 2000  # 600 s by default


def test_a_seed_fixes_everything():
    assert_same(synth("lmsys", count=100, seed=9), synth("lmsys", count=100, seed=9))
    other = synth("lmsys", count=100, seed=10)
    assert synth("lmsys", count=100, seed=9).arrival_s.tolist() != other.arrival_s.tolist()


def test_fixed_lengths_and_provenance():
    w = synth("fixed:512,128", rate=2, count=3)
    assert set(w.prompt_tokens) == {512} and set(w.output_tokens) == {128}
    assert w.provenance.transforms == ("synth(fixed:512,128, rate=2, count=3, seed=0)",)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lengths": "fixed:1"},
        {"lengths": "fixed:0,5"},
        {"lengths": "fixed:5,-1"},
        {"lengths": "fixed:1,99999999999999999999"},
        {"lengths": "gpt"},
        {"rate": 0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"count": 0},
        {"duration_s": -1},
        {"rate": 1e9},
        {"seed": -1},
        {"rate": 1e-9, "duration_s": 1},
    ],
)
def test_impossible_requests_are_one_line(arguments):
    with pytest.raises(WorkloadError) as e:
        synth(**arguments)
    assert "\n" not in str(e.value)


def test_a_shape_that_cannot_be_met_is_an_error():
    with pytest.raises(WorkloadError, match="has the spread of"):
        parameters(module.LengthShape(mean=100, std=5000, low=1, high=200))
