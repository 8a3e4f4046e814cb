"""Echo's toolkit: the smallest hardware that keeps online objectives, the offline work beside it,
predicted memory."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.policies.echo.forecast import MemoryForecast
from twinserve.policies.registry import parse_policy
from twinserve.profiles.specs import ProfileError
from twinserve.sim.plan.capacity import (
    WhileOnline,
    gpu_ladder,
    memory_prediction,
    offline_throughput,
    peak_window,
    predicted_memory,
    size_of,
    smallest_resources,
)
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.synth import synth
from twinserve.traces.generators.tidal import tidal
from twinserve.traces.transform import merge, set_class, set_slo
from twinserve.traces.workload import BestEffortPool, Workload, WorkloadError

A100 = {"profile": "llama-3.1-8b@a100-40g", "policy": ("echo",)}


POOLS = '{"pools": [{"replicas": 2}]}'


def at_once(n: int, output: int = 100, ttft: float = 0.25) -> Workload:
    """`n` online requests at time 0."""
    return set_slo(Workload.build(np.zeros(n), np.full(n, 16), np.full(n, output)), ttft)


def seats(numbers, **settings) -> list[SimulationConfig]:
    return [SimulationConfig(**A100, max_num_seqs=n, **settings) for n in numbers]


# -- step 1 ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ten_requests_at_once_need_as_many_seats_as_shall_be_in_time():
    """A seat is free again after 100 tokens of some ten milliseconds: too late for a first token
    within 0.25 s."""
    found = smallest_resources(at_once(10), seats(range(1, 13)))
    assert found.config.max_num_seqs == 9
    assert [t.attained for t in found.trials] == [k / 10 for k in range(1, 10)]
    assert (
        smallest_resources(at_once(10), seats(range(1, 13)), attainment=0.45).config.max_num_seqs
        == 5
    )
    assert (
        smallest_resources(at_once(10), seats(range(1, 13)), attainment=1.0).config.max_num_seqs
        == 10
    )
    nobody = smallest_resources(at_once(10), seats([3, 2]))
    assert nobody.config is None and [t.attained for t in nobody.trials] == [0.2, 0.3]


@examples(12)
@given(
    numbers=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    more=st.lists(st.integers(1, 8), max_size=3),
    low=st.floats(0.05, 1.0),
    high=st.floats(0.05, 1.0),
    n=st.integers(1, 8),
)
def test_what_is_found_is_the_smallest_that_is_enough(numbers, more, low, high, n):
    load = at_once(n, output=30, ttft=0.1)
    low, high = sorted((low, high))
    found = smallest_resources(load, seats(numbers), attainment=low)
    sizes = [size_of(t.config) for t in found.trials]
    assert sizes == sorted(sizes)
    assert all(t.attained < low for t in found.trials[:-1])
    assert found.config is None or (
        found.config is found.trials[-1].config and found.trials[-1].attained >= low
    )
    # in any order, the same; more to choose from or a lower aim is never larger
    again = smallest_resources(load, seats(numbers[::-1]), attainment=low)
    assert (again.config, [t.attained for t in again.trials]) == (
        found.config,
        [t.attained for t in found.trials],
    )
    wider = smallest_resources(load, seats(numbers + more), attainment=low)
    stricter = smallest_resources(load, seats(numbers), attainment=high)
    for smaller, larger in ((wider, found), (found, stricter)):
        if larger.config is not None:
            assert size_of(smaller.config) <= size_of(larger.config)


def test_size_counts_gpus_then_memory_then_tokens_then_seats():
    base = SimulationConfig(**A100)
    twice = base.model_copy(update={"replicas": 2})
    pair = base.model_copy(update={"profile": "llama-3.1-8b@a100-40g:tp2"})
    fewer = base.model_copy(update={"num_blocks": 1000})
    tokens = base.model_copy(update={"max_num_batched_tokens": 512, "max_num_seqs": 999})
    narrow = base.model_copy(update={"max_num_seqs": 8})
    order = [fewer, tokens, narrow, base, twice, pair]
    # two GPUs in one replica hold the weights once: more KV
    assert sorted(reversed(order), key=size_of) == order
    assert size_of(fewer) == (1, 16_000, 2048, 256)


def test_a_price_of_ones_own_decides_the_order():
    order = smallest_resources(
        at_once(1), seats([4, 2, 3]), size=lambda config: -config.max_num_seqs
    )
    assert order.config.max_num_seqs == 4 and len(order.trials) == 1


def test_what_is_too_small_to_run_is_named_and_not_chosen():
    models = gpu_ladder("llama-3.1-70b", "a100-40g", tp=(2, 4), replicas=(1,), policy=("echo",))
    found = smallest_resources(at_once(2, ttft=1.0), models)
    assert [t.attained for t in found.trials] == [None, 1.0] and found.config is models[1]
    assert "leaves no KV memory" in found.trials[0].refused
    with pytest.raises(ProfileError, match="leaves no KV memory"):
        smallest_resources(at_once(2), models[:1])
    short = [SimulationConfig(**A100, num_blocks=n) for n in (5, 50)]
    found = smallest_resources(at_once(2), short)
    assert found.config is short[1] and "over the limit of 80" in found.trials[0].refused


def test_a_ladder_has_every_number_of_gpus_and_replicas():
    ladder = gpu_ladder("llama-3.1-8b", "a100-40g", tp=(1, 2), replicas=(1, 3), max_num_seqs=8)
    assert [(size_of(c)[0], c.replicas, c.max_num_seqs) for c in ladder] == [
        (1, 1, 8),
        (3, 3, 8),
        (2, 1, 8),
        (6, 3, 8),
    ]


# -- the peak --------------------------------------------------------------------------------------
def test_the_peak_is_where_most_tokens_arrive():
    w = Workload.build([0, 1, 2, 50, 55, 59, 90], [10, 10, 10, 10, 10, 10, 39], [1] * 7)
    assert peak_window(w, 10) == (90.0, 100.0)  # 40 tokens beat 33
    # of two equal ones the first
    assert peak_window(replace(w, prompt_tokens=np.full(7, 10)), 10) == (0.0, 10.0)
    assert peak_window(replace(w, prompt_tokens=np.full(7, 10)), 9.5) == (0.0, 9.5)
    assert peak_window(w, 1000) == (0.0, 1000.0)


@examples(50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=20),
    st.integers(1, 30),
)
def test_no_window_holds_more_than_the_peak(rows, seconds):
    at, prompt = np.array(sorted(rows)).T
    w = Workload.build(at, prompt, np.ones(len(at)))

    def tokens(start):
        return int((prompt + 1)[(at >= start) & (at < start + seconds)].sum())

    start, end = peak_window(w, seconds)
    assert end == start + seconds and tokens(start) == max(tokens(s) for s in range(-seconds, 101))


@pytest.mark.slow
def test_only_the_peak_is_simulated():
    """A lone request before dawn and ten at noon."""
    noon = at_once(10)
    arrival = np.concatenate([[0.0], np.full(10, 43_200.0)])
    w = set_slo(Workload.build(arrival, np.full(11, 16), np.full(11, 100)), 0.25)
    found = smallest_resources(w, seats(range(1, 13)))
    assert found.peak_s == (43_200.0, 43_500.0)
    assert (
        found.trials[0].attained == smallest_resources(noon, seats([1])).trials[0].attained == 0.1
    )


# -- step 2 ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def online():
    w = synth("sharegpt", rate=2.0, duration_s=60.0, seed=1)
    return set_slo(w, 1.0, 0.05)


@pytest.mark.slow
def test_what_ended_beside_the_online_load_is_counted(online):
    config = SimulationConfig(**A100)
    found = offline_throughput(
        online, longdoc("toolbench", requests=3000, seed=2), config, history_s=30, ahead_s=5
    )
    requests = found.result.rows.requests
    be = requests[
        (requests.service_class == "be")
        & requests.finished
        & (requests.last_token_s <= online.last_arrival_s)
    ]
    assert found.window_s == pytest.approx(online.span_s, abs=1.0) and 100 < len(be) < 3000
    assert found.requests_per_s == pytest.approx(len(be) / found.window_s)
    assert found.tokens_per_s == pytest.approx(
        (be.prompt_tokens + be.output_tokens).sum() / found.window_s
    )
    assert found.output_tokens_per_s == pytest.approx(be.output_tokens.sum() / found.window_s)
    assert found.exhausted_s is None and not requests[requests.service_class == "be"].finished.all()
    assert requests[requests.service_class == "rt"].finished.all()
    assert (
        found.memory.samples > 20 and found.memory.total_blocks == found.result.rows.kv_total_blocks
    )


def test_a_pool_that_is_too_small_is_noticed(online):
    found = offline_throughput(
        online, longdoc("toolbench", requests=20, seed=2), SimulationConfig(**A100)
    )
    assert 0 < found.exhausted_s < 30 and found.memory is None
    assert found.requests_per_s == pytest.approx(20 / found.window_s)


@pytest.mark.slow
def test_a_closed_loop_never_ends_and_more_hardware_does_more(online):
    pool = BestEffortPool(64, output_tokens=(8, 32))
    found = [
        offline_throughput(online, pool, SimulationConfig(**{**A100, **more}))
        for more in ({}, {"replicas": 2})
    ]
    assert all(f.exhausted_s is None for f in found)
    assert found[0].tokens_per_s < found[1].tokens_per_s and found[0].attained <= found[1].attained


def test_online_requests_are_waited_for_and_sessions_too():
    w = Workload.build(
        [0.0, 5.0, np.nan],
        [16] * 3,
        [5] * 3,
        group=np.array([-1, 0, 0]),
        stage=np.array([0, 0, 1]),
        delay_s=np.array([0, 0, 300.0]),
        group_names=["s0"],
    )
    found = offline_throughput(
        set_slo(w, 1.0), longdoc("toolbench", requests=5), SimulationConfig(**A100)
    )
    requests = found.result.rows.requests
    assert (
        requests[requests.service_class == "rt"].finished.all() and requests.arrival_s.max() > 305
    )


@pytest.mark.parametrize(("policy", "said"), [("layerkv", 1), ("layerkv:predictor=history", 0)])
def test_a_predictor_that_nothing_has_trained_is_said(policy, said):
    online = set_slo(Workload.build([0.0, 1.0], [16] * 2, [5] * 2), 1.0)
    config = SimulationConfig(
        profile="llama-3.1-8b@a100-40g", policy=(policy,), async_scheduling=False
    )
    found = offline_throughput(online, longdoc("toolbench", requests=2), config)
    notices = found.result.config["notices"]
    assert len(notices) == said and all("learns from requests that end" in n for n in notices)


@pytest.mark.parametrize("first_s", [None, 5.1])
def test_a_run_while_online_requests_last_is_watched_slice_by_slice(first_s):
    """Two of them, the later at 5 s, when the first has long ended; and offline requests that take
    far longer."""
    load = merge(
        Workload.build([0.0, 5.0], [16, 16], [5, 50]), longdoc("toolbench", requests=400, seed=2)
    )
    config = SimulationConfig(**A100)
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy("echo"),), ())
    looks = []
    run = WhileOnline(
        inputs,
        inputs.policies[0],
        slice_s=0.25,
        first_s=first_s,
        watch=lambda of: looks.append(of.clock.now),
    )
    run.run()
    assert looks == pytest.approx([(first_s or 0.25) + 0.25 * i for i in range(len(looks))])
    requests = run.rows().requests
    online = requests[requests.service_class == "rt"]
    assert online.finished.all() and not requests.finished.all()
    assert 5 < looks[-2] < online.last_token_s.max() <= looks[-1] == run.clock.now


# -- memory ----------------------------------------------------------------------------------------
def steps_of(held, seconds: float = 1.0) -> pd.DataFrame:
    """A step of `seconds` for each number of blocks that online requests hold."""
    start = np.arange(len(held)) * seconds
    return pd.DataFrame(
        {
            "replica": 0,
            "start_s": start,
            "end_s": start + seconds,
            "kv_rt_blocks": np.array(held, np.int64),
        }
    )


def rows_of(held) -> RunRows:
    return RunRows(pd.DataFrame(), steps_of(held), pd.DataFrame(), 100)


def test_a_prediction_by_hand():
    """History of four: 2, 4, 4, 6 have mu 4 and sigma sqrt(2), so mu + 2 sigma is 6.83 and 7 blocks
    are kept."""
    predicted, held = predicted_memory(steps_of([2, 4, 4, 6, 9, 5]), 2.0, 4.0, 1.0, 1.0)
    assert predicted.tolist() == [7, 10] and held.tolist() == [9, 5]  # 4, 4, 6, 9: 5.75 + 2 * 2.05
    found = memory_prediction(rows_of([2, 4, 4, 6, 9, 5]), history_s=4, ahead_s=1)
    assert (found.samples, found.exceeded, found.under_blocks, found.over_blocks) == (
        2,
        0.5,
        2.0,
        2.5,
    )
    assert found.held_blocks == 7 and found.total_blocks == 100


@examples(40)
@given(
    held=st.lists(st.integers(0, 500_000), min_size=3, max_size=60),
    history=st.integers(1, 10),
    ahead=st.integers(1, 3),
    sigmas=st.sampled_from([0.0, 1.0, 2.0, 3.5]),
)
def test_it_is_the_prediction_of_the_policy(held, history, ahead, sigmas):
    forecast = MemoryForecast(sigmas, float(history), 1.0)
    blocks = []
    for now, value in enumerate(held):
        forecast.observe(float(now), value)
        blocks.append(forecast.blocks)
    predicted, later = predicted_memory(steps_of(held), sigmas, history, 1.0, ahead)
    # the last bit before rounding up
    assert np.abs(predicted - blocks[history - 1 : len(held) - ahead]).max(initial=0) <= 1
    assert later.tolist() == held[history - 1 + ahead :]


def test_a_steady_load_is_predicted_exactly():
    found = memory_prediction(rows_of([70] * 50), history_s=10, ahead_s=5)
    assert (found.exceeded, found.over_blocks, found.under_blocks) == (0.0, 0.0, 0.0)


def test_more_sigmas_are_exceeded_less_and_keep_more():
    rng = np.random.default_rng(0)
    rows = rows_of(rng.normal(1000, 100, 4000).astype(int))
    found = [memory_prediction(rows, sigmas=s, history_s=600, ahead_s=60) for s in (0, 1, 2, 3)]
    assert [f.exceeded for f in found] == sorted((f.exceeded for f in found), reverse=True)
    assert [f.over_blocks for f in found] == sorted(f.over_blocks for f in found)
    # of a normal distribution 2.3 % lie above mu + 2 sigma
    assert found[2].exceeded == pytest.approx(0.023, abs=0.01)


def test_nothing_is_held_while_nothing_runs():
    steps = steps_of([5, 5])
    steps.loc[1, ["start_s", "end_s"]] = [3.0, 4.5]  # idle from 1 to 3 s
    predicted, held = predicted_memory(steps, 0.0, 1.0, 1.0, 1.0)
    assert predicted.tolist() == [5, 0, 0, 5] and held.tolist() == [0, 0, 5, 5]


# -- what cannot be asked --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda w, c: smallest_resources(w, []), SettingsError, "no resources"),
        (lambda w, c: smallest_resources(w, [c], attainment=0), SettingsError, "attainment of 0"),
        (lambda w, c: smallest_resources(w, [c], peak_s=0), SettingsError, "peak of 0"),
        (lambda w, c: smallest_resources(set_class(w, "be"), [c]), WorkloadError, "class rt"),
        (
            lambda w, c: smallest_resources(synth("fixed:9,9", rate=1.0, count=3), [c]),
            WorkloadError,
            "no online request has",
        ),
        (
            lambda w, c: smallest_resources(w, [c.model_copy(update={"fleet": POOLS})]),
            SettingsError,
            "--fleet: resources are replicas of one kind",
        ),
        (
            lambda w, c: offline_throughput(
                w, BestEffortPool(4), c.model_copy(update={"fleet": POOLS})
            ),
            SettingsError,
            "--fleet: resources are replicas of one kind",
        ),
        (lambda w, c: offline_throughput(w, w, c), WorkloadError, "class be"),
        (
            lambda w, c: offline_throughput(at_once(3), BestEffortPool(4), c),
            WorkloadError,
            "arrive at once",
        ),
        (
            lambda w, c: offline_throughput(
                w, BestEffortPool(4), c.model_copy(update={"policy": ("echo", "vllm")})
            ),
            SettingsError,
            "one policy decides",
        ),
        (lambda w, c: memory_prediction(rows_of([1] * 5)), SettingsError, "shorter than 3660 s"),
        (
            lambda w, c: memory_prediction(rows_of([1] * 5), ahead_s=0.1),
            SettingsError,
            "one sample",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(online, ask, error, says):
    with pytest.raises(error, match=says) as caught:
        ask(online, SimulationConfig(**A100))
    assert "\n" not in str(caught.value)


NO_SECONDS = (float("nan"), float("inf"), -5.0, 0)


@pytest.mark.parametrize(
    ("ask", "name", "values"),
    [
        (
            lambda w, n: gpu_ladder("llama-3.1-8b", "h100", tp=(1, n)),
            "tp",
            (0, -2, 1.5, float("nan")),
        ),
        (
            lambda w, n: gpu_ladder("llama-3.1-8b", "h100", replicas=(1, n)),
            "replicas",
            (0, -2, 1.5, float("nan")),
        ),
        (lambda w, s: peak_window(w, s), "peak", NO_SECONDS),
        (
            lambda w, s: smallest_resources(w, [SimulationConfig(**A100)], peak_s=s),
            "peak",
            NO_SECONDS,
        ),
        *(
            (lambda w, v, ask=ask, name=name: ask(w, **{name: v}), name, values)
            for ask in (
                lambda w, **how: offline_throughput(
                    w, BestEffortPool(4), SimulationConfig(**A100), **how
                ),
                lambda w, **how: memory_prediction(rows_of([1] * 5), **how),
            )
            for name, values in (
                ("sigmas", (float("nan"), float("inf"), -1.0)),
                ("history_s", NO_SECONDS),
                ("ahead_s", NO_SECONDS),
            )
        ),
        (lambda w, s: memory_prediction(rows_of([1] * 5), sample_s=s), "sample_s", NO_SECONDS),
    ],
)
def test_a_number_that_makes_no_sense_is_named(online, ask, name, values):
    for value in values:
        with pytest.raises(SettingsError, match=f"{name} of {value} ") as caught:
            ask(online, value)
        assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_a_day_with_its_peak():
    """Both steps on a tide, pressed into twenty minutes: memory for the peak, and offline work in
    the trough."""
    day = set_slo(tidal(peak_rate=6.0, duration_s=1200.0, seed=1), 1.0, 0.05)
    sizes = [SimulationConfig(**A100, num_blocks=n) for n in (500, 1000, 2000)]
    found = smallest_resources(day, sizes, peak_s=60)
    assert found.config is sizes[1]
    beside = offline_throughput(day, BestEffortPool(64), found.config, history_s=60, ahead_s=5)
    assert beside.tokens_per_s > 1000 and beside.attained > 0.8
