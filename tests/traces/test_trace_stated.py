"""Workloads stated in a line: rates over time, closed loops, shared system prompts, agents, and
the random load of vLLM's benchmark."""

import numpy as np
import pytest
from scipy import special

from tests.traces.workload_strategies import assert_same
from twinserve.traces.generators import synth as module
from twinserve.traces.generators.in_a_line import DESCRIPTIONS, KINDS
from twinserve.traces.generators.synth import SHAPES, parameters, synth
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import read_file
from twinserve.traces.transform import scale_rate, window
from twinserve.traces.verbs import describe
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_trace

NAMES = (
    "vllm:request_rate=4,num_prompts=30", "vllm:dataset_name=prefix_repetition,num_prompts=40",
    "stages:2x30/5x30", "ramp:from=1,to=10,duration=60", "diurnal:low=1,high=6,period=60",
    "bursts:base=2,peak=20,every=20,length=5,duration=60",
    "closed:concurrency=4,requests=20,stagger=8", "agents:sessions=20,rate=0.5,turns=4,groups=3",
)  # fmt: skip
FIXED = "input=10,output=5"


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_is_a_workload_that_is_written_and_read_back(name, tmp_path):
    w = load_trace(name, seed=3)
    check_workload(w)
    assert load_trace(name, seed=3).prompt_tokens.tolist() == w.prompt_tokens.tolist()
    again = read_file(write_trace(w, tmp_path / "w.jsonl"))
    assert again.arrival_s.tolist() == pytest.approx(w.arrival_s.tolist(), abs=0, nan_ok=True)
    assert (again.concurrency, again.stages_s) == (w.concurrency, w.stages_s)


def test_every_kind_is_tried_and_listed():
    kinds = {name.partition(":")[0] for name in NAMES}
    assert kinds == set(KINDS) == {name.partition(":")[0] for name in DESCRIPTIONS}


@pytest.mark.parametrize(
    ("name", "edges", "expected"),
    [
        ("stages:2x1000/10x500/1x2000", (0, 1000, 1500, 3500), (2000, 5000, 2000)),
        ("ramp:from=0,to=10,duration=1000", (0, 500, 1000), (1250, 3750)),
        # lowest at its ends: by the cosine between 1 and 9 a second
        ("diurnal:low=1,high=9,period=1000", (0, 100, 450, 550, 1000), (113, 1887, 893, 2107)),
        ("bursts:base=0,peak=10,every=60,length=5,duration=600", (0, 600), (500,)),
    ],
)
def test_arrivals_have_the_rates_of_the_line(name, edges, expected):
    w = load_trace(f"{name},{FIXED}")
    counts = np.histogram(w.arrival_s, edges)[0]
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all(), counts
    if name.startswith("bursts"):  # they end their period
        assert (w.arrival_s % 60).min() >= 55


def test_stages_keep_their_place_when_a_trace_is_changed():
    w = load_trace(f"stages:2x100/10x50,{FIXED}")
    assert w.stages_s == (0, 100, 150)
    assert scale_rate(w, 2.0).stages_s == (0, 50, 75)
    assert window(w, 90, 150).stages_s == (-90, 10, 60)


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_that_of_gamma_gaps(burstiness, cv):
    w = load_trace(f"stages:10x2000,burstiness={burstiness},{FIXED}")
    gaps = np.diff(w.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert len(w) == pytest.approx(20_000, rel=0.05)


def test_system_prompts_are_shared_by_their_groups_only():
    w = load_trace("stages:10x50,input=100,output=5,system=160x4")
    assert (w.prompt_tokens == 260).all() and w.prefix.block_tokens == 16
    heads = {tuple(w.prefix.of(row)[:10]) for row in range(len(w))}
    assert len(heads) == 4
    tails = [w.prefix.of(row)[10:] for row in range(len(w))]
    assert len(np.unique(np.concatenate(tails))) == sum(map(len, tails))


def test_a_closed_loop_starts_all_at_once_or_staggered():
    at_once = load_trace("closed:concurrency=4,requests=6,input=5,output=5")
    assert at_once.arrival_s.tolist() == [0.0] * 6 and at_once.concurrency == 4
    slow = load_trace("closed:concurrency=4,requests=6,stagger=8,input=5,output=5")
    assert slow.arrival_s.tolist() == [0, 2, 4, 6, 6, 6]
    assert "at most 4 at once" in describe(slow)


def test_a_call_of_an_agent_holds_all_that_was_said():
    w = load_trace("agents:sessions=30,turns=5,system=64,groups=2,tool=3", seed=1)
    for group in range(30):
        rows = np.flatnonzero(w.group == group)
        rows = rows[np.argsort(w.stage[rows])]
        for before, row in zip(rows, rows[1:], strict=False):
            assert w.prompt_tokens[row] > w.prompt_tokens[before] + w.output_tokens[before]
            whole = w.prompt_tokens[before] // 16
            shared = w.prefix.of(row)[:whole]
            assert shared.tolist() == w.prefix.of(before)[:whole].tolist()
    later = w.stage > 0
    assert (w.delay_s[later] > 0).all() and w.delay_s[later].mean() == pytest.approx(3, rel=0.4)
    assert len({tuple(w.prefix.of(row)[:4]) for row in range(len(w))}) == 2


def test_lengths_of_the_benchmark_lie_in_its_range():
    w = load_trace(
        "vllm:random-input-len=1000,random-output-len=100,random-range-ratio=0.2,"
        "random-prefix-len=64,num-prompts=500"
    )
    assert w.prompt_tokens.min() >= 864 and w.prompt_tokens.max() <= 1264
    assert w.output_tokens.min() >= 80 and w.output_tokens.max() <= 120
    assert len({tuple(w.prefix.of(row)[:4]) for row in range(len(w))}) == 1
    assert (w.arrival_s == 0).all()


def test_the_last_request_of_the_benchmark_comes_when_the_rate_says():
    w = load_trace("vllm:request_rate=8,num_prompts=400,burstiness=0.5")
    assert w.last_arrival_s == pytest.approx(50)
    even = load_trace("vllm:request_rate=8,num_prompts=4,burstiness=inf")
    assert even.arrival_s.tolist() == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stages:2x", "'2x' is no stage: write RATExSECONDS"),
        ("stages:0x5", "asks for 0 requests"),
        ("stages:2x5,lenghts=sharegpt", "did you mean lengths"),
        ("stages:2x5,input=5", "input and output belong together"),
        ("stages:2x5,input=5,output=5,lengths=lmsys", "drop one"),
        ("stages:2x5,system=big", "write TOKENSxGROUPS"),
        ("stages:2x5,system=\u00b2", "write TOKENSxGROUPS"),
        ("stages:2x5,system=99999999", "is too much"),
        ("stages:1e9x1e9", "change rates or times|ends after"),
        ("ramp:to=5", "duration is missing"),
        ("ramp:to=x,duration=5", "to=x is no number above 0"),
        ("ramp:to=5,to=6,duration=5", "to is given twice"),
        ("bursts:peak=5,every=5,length=5,duration=50", "length=5 is not below every=5"),
        ("closed:requests=5", "concurrency and requests are needed"),
        ("closed:concurrency=0,requests=5", "no whole number from 1"),
        ("vllm:random_range_ratio=1", "not below 1"),
        ("vllm:ramp_up_strategy=linear", "goes up from"),
        ("vllm:dataset_name=sonnet", "choose from random, prefix_repetition"),
        ("vllm:dataset_name=prefix_repetition,num_prompts=3", "below the 10 prefixes"),
        ("agents:turns=0.5", "turns=0.5 is no number from 1"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(name, says):
    with pytest.raises(WorkloadError, match=says) as e:
        load_trace(name)
    assert "\n" not in str(e.value) and f"trace '{name}'" in str(e.value)


def test_settings_of_other_traces_are_refused():
    with pytest.raises(WorkloadError, match="does not take rate"):
        load_trace("stages:2x5", rate=3.0)


# -- generated workloads: their moments, their arrivals, and that a seed fixes them ----------------
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
