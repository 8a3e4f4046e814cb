"""The verdict on saturation, against queues whose fate is known, and against longer runs."""

import heapq
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parameters import mostly_nightly
from tests.sim.test_queueing import Constant, PerPromptToken, run
from twinserve.sim.report.table import overloaded, render_table
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.saturation import FEWEST, saturation
from twinserve.sim.setup.config import PRESETS, SimulationConfig
from twinserve.sim.setup.run import simulate
from twinserve.traces.workload import Workload
from twinserve.traces.write import write_trace

RUNS = 40
SERVICES = {
    "exponential": lambda rng, n: rng.exponential(1, n),
    "deterministic": lambda rng, n: np.ones(n),
    "lognormal": lambda rng, n: rng.lognormal(-0.5, 1, n),
}


def served(arrival, service, servers):
    """First come, first served: when each one is scheduled, and ends."""
    free, scheduled = [0.0] * servers, np.empty(len(arrival))
    for i, (at, seconds) in enumerate(zip(arrival, service, strict=True)):
        scheduled[i] = max(at, heapq.heappop(free))
        heapq.heappush(free, scheduled[i] + seconds)
    return scheduled, scheduled + service


def queue(rng, load, n, servers=1, service="exponential"):
    """Poisson arrivals, one a second."""
    arrival = rng.exponential(1, n).cumsum()
    scheduled, ended = served(arrival, SERVICES[service](rng, n) * load * servers, servers)
    return arrival, scheduled, ended, np.zeros(n, bool)


@cache
def verdicts(load, n, servers=1, service="exponential"):
    rng = np.random.default_rng([int(100 * load), n, servers])
    return [saturation(*queue(rng, load, n, servers, service)) for _ in range(RUNS)]


def counted(*what):
    return Counter(found["verdict"] for found in verdicts(*what))


KINDS = mostly_nightly(
    [(1, "exponential"), (1, "deterministic"), (50, "exponential"), (50, "lognormal")],
    (1, "exponential"),
    (50, "lognormal"),
)


# -- queueing theory: a queue grows if and only if the load is above 1 -----------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("servers", "service"), KINDS)
@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_below_one_no_queue_is_said_to_grow(load, servers, service):
    for n in (100, 300, 1000, 3000):
        # 0.5 % at a load of one, where the queue is a random walk, and fewer below
        assert counted(load, n, servers, service)["saturated"] <= 1
    assert counted(load, 3000, servers, service)["keeps up"] >= 0.8 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "service"), KINDS)
@pytest.mark.parametrize("load", [1.3, 2.0])
def test_above_one_no_queue_is_said_to_be_steady(load, servers, service):
    for n in (100, 300, 1000, 3000):
        assert counted(load, n, servers, service)["keeps up"] <= 1
    assert counted(load, 3000, servers, service)["saturated"] == RUNS


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "service"), KINDS)
def test_a_queue_grows_at_the_rate_that_theory_says(servers, service):
    """Arrivals less what the servers can do: 1 - 1 / load a second."""
    inside = total = 0
    for load in (1.3, 2.0):
        for found in verdicts(load, 3000, servers, service):
            miss = abs(found["growth_per_s"] - (1 - 1 / load))
            inside += miss <= found["growth_range_per_s"]
            total += 1
            assert found["served_per_s"] == pytest.approx(1 / load, rel=0.15)
            assert found["arrived_per_s"] == pytest.approx(1, rel=0.15)
    assert 0.87 <= inside / total <= 1  # 95 % are meant to be


def test_near_one_much_is_unclear_and_more_requests_tell_more():
    few, many = (counted(1.1, n) for n in (300, 5000))
    assert few["unclear"] > 0.7 * RUNS
    assert many["saturated"] > 0.7 * RUNS and not few["keeps up"] > 0.1 * RUNS


# -- the simulator, and longer runs of it ----------------------------------------------------------
def engine_run(load, n, seats, seed):
    """Seats of an engine as servers: M/M/1 with one, M/M/c with more."""
    rng = np.random.default_rng(seed)
    tokens = np.ceil(rng.exponential(100, n)).astype(int)
    model = PerPromptToken() if seats == 1 else Constant(1e-3)
    rate = load * seats / (100 * 1e-3)
    arrival = rng.exponential(1 / rate, n).cumsum()
    one = np.ones(n, int)
    return run(model, arrival, *((tokens, one) if seats == 1 else (one, tokens)), seats=seats)


@pytest.mark.nightly
@pytest.mark.parametrize("seats", [1, 20])
@pytest.mark.parametrize("load", [0.5, 0.8, 1.5, 3.0])
def test_what_a_short_run_says_holds_for_one_ten_times_as_long(load, seats):
    """And only where it says that it keeps up do means not depend on the length."""
    means, said = [], []
    for n in (400, 4000):
        summary = summarise(engine_run(load, n, seats, seed=3).rows)
        means.append(summary["mean_ttft_ms"])
        said.append(summary["classes"]["rt"]["saturation"]["verdict"])
    assert said[1] == ("saturated" if load > 1 else "keeps up")
    assert said[0] in (said[1], "unclear")
    grown = means[1] / means[0]
    assert grown > 5 if load > 1 else grown < 3


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["vllm", "bros:chunk=2048", "layerkv", "justitia", "vtc"])
def test_real_profiles_agree_with_their_long_runs(policy):
    for load, wanted in ((0.5, "keeps up"), (2.0, "saturated")):
        for seconds in (60, 500):
            config = SimulationConfig(
                policy=(policy,), trace="sharegpt", profile="llama-3.1-8b@l40s", load=load,
                duration=float(seconds),
            )  # fmt: skip
            (result,) = simulate(config).values()
            found = result.summary["classes"]["rt"]["saturation"]["verdict"]
            assert found == wanted or (seconds == 60 and found == "unclear"), (load, seconds)


# -- what is not a queue ---------------------------------------------------------------------------
def test_requests_all_at_once_have_no_rate():
    at = np.zeros(80)
    assert saturation(at, at, np.arange(80.0), np.zeros(80, bool)) is None
    assert saturation(*[np.empty(0)] * 3, np.empty(0, bool)) is None


def test_few_requests_and_short_traces_are_unclear():
    rng = np.random.default_rng(1)
    found = saturation(*queue(rng, 0.5, FEWEST))
    assert (
        found["verdict"] == "unclear" and "requests after the system has filled" in found["reason"]
    )
    # 200 requests within 200 s which all take 1,000 s and do not wait: the system still fills
    arrival = rng.uniform(0, 200, 200)
    found = saturation(arrival, arrival, arrival + 1000, np.zeros(200, bool))
    assert found["verdict"] == "unclear" and "too short to judge a system" in found["reason"]
    # nor is it told with seats for 20, where most of them wait: a queue may form once, and stay
    scheduled, ended = served(np.sort(arrival), np.full(200, 1000.0), 20)
    found = saturation(np.sort(arrival), scheduled, ended, np.zeros(200, bool))
    assert found["verdict"] == "unclear"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", mostly_nightly([0, 1, 2], 0))
def test_a_queue_that_forms_at_the_start_and_stays_is_no_growth(seed):
    """Best-effort batches take the memory first: real-time requests then wait for 8 s all along."""
    for seconds, verdicts in ((20, {"unclear"}), (90, {"unclear"}), (600, {"keeps up"})):
        config = SimulationConfig(**PRESETS["bros-hybrid"] | {"duration": seconds, "seed": seed})
        (result,) = simulate(config).values()
        assert result.summary["mean_ttft_ms"] > 2000
        assert result.summary["classes"]["rt"]["saturation"]["verdict"] in verdicts


def test_requests_that_never_end_are_in_the_queue():
    arrival = np.arange(200.0)
    nan = np.full(200, np.nan)
    found = saturation(arrival, nan, nan, np.zeros(200, bool))
    assert (found["verdict"], found["in_system"], found["served_per_s"]) == ("saturated", 200, 0)


@pytest.mark.slow
def test_a_closed_loop_is_no_overload():
    """The pool sends the next batch when the last one has ended, however slow that is."""
    config = SimulationConfig(trace="sharegpt", rate=5.0, requests=300, pool=64)
    (result,) = simulate(config).values()
    classes = result.summary["classes"]
    assert classes["rt"]["saturation"]["verdict"] == "keeps up"
    assert classes["be"]["saturation"] is None


@pytest.mark.slow
def test_clients_that_give_up_are_no_growth_but_are_told():
    config = SimulationConfig(
        trace="sharegpt", rate=40.0, duration=120.0, profile="llama-3.1-8b@l40s", client_timeout=8.0
    )
    (result,) = simulate(config).values()
    found = result.summary["classes"]["rt"]["saturation"]
    assert found["verdict"] == "sheds" and 0.05 < found["lost_share"] < 1
    (note,) = overloaded(result.summary, "vllm")
    assert f"{found['lost_share']:.1%} end early" in note
    assert f"sheds {found['lost_share'] * 100:.1f} %" in render_table({"vllm": result})


def sessions(rate, n, turns=3):
    """Sessions that come at `rate` a second, of turns that wait for each other."""
    rng = np.random.default_rng(4)
    first = rng.exponential(1 / rate, n).cumsum()
    stage, group = np.divmod(np.arange(n * turns), n)
    return Workload.build(
        np.where(stage == 0, np.tile(first, turns), np.nan),
        np.full(n * turns, 2000),
        np.full(n * turns, 60),
        group=group,
        stage=stage,
        group_names=[f"s{i}" for i in range(n)],
        delay_s=np.where(stage > 0, 0.5, 0.0),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rate", "count", "verdict"), [(0.3, 300, "keeps up"), (4.0, 900, "saturated")]
)
def test_sessions_count_as_wholes(tmp_path, rate, count, verdict):
    """Their later turns come no faster than the system answers: single requests would look as if it
    kept up at any rate."""
    path = write_trace(sessions(rate, count), tmp_path / "sessions.jsonl")
    config = SimulationConfig(trace=str(path), profile="llama-3.1-8b@l40s")
    (result,) = simulate(config).values()
    found = result.summary["classes"]["rt"]["saturation"]
    assert (found["verdict"], found["groups"]) == (verdict, count)
    assert found["arrived_per_s"] == pytest.approx(rate, rel=0.3)
    said = overloaded(result.summary, "vllm")
    assert (verdict == "keeps up") == (not said) and all("sessions" in line for line in said)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", mostly_nightly(["mlfq", "vtc", "round-robin"], "mlfq"))
def test_policies_that_slice_service_are_judged_too(policy):
    """Service that others interrupt lasts longer the longer the overload does; the first requests
    tell what it takes."""
    config = SimulationConfig(
        policy=(policy,), trace="sharegpt", load=1.6, requests=2500, profile="llama-3.1-8b@l40s"
    )
    (result,) = simulate(config).values()
    assert result.summary["classes"]["rt"]["saturation"]["verdict"] == "saturated"


# -- units and order -------------------------------------------------------------------------------
@given(
    seed=st.integers(0, 999),
    load=st.sampled_from([0.5, 0.95, 1.2, 3.0]),
    scale=st.sampled_from([0.25, 8.0, 4096.0]),
    shift=st.sampled_from([0.0, 512.0]),
)
def test_neither_clock_nor_order_of_rows_matters(seed, load, scale, shift):
    rng = np.random.default_rng(seed)
    rows = queue(rng, load, 300)
    found = saturation(*rows)
    order = rng.permutation(300)
    again = saturation(*[(column[order] + shift) * scale for column in rows[:3]], rows[3])
    assert again["verdict"] == found["verdict"] and again["in_system"] == found["in_system"]
    if found["growth_per_s"] is not None:
        assert again["growth_per_s"] * scale == pytest.approx(found["growth_per_s"], abs=1e-6)


@pytest.mark.slow
def test_table_and_note_say_it():
    config = SimulationConfig(
        trace="sharegpt", rate=60.0, duration=150.0, profile="llama-3.1-8b@l40s"
    )
    (result,) = simulate(config).values()
    found = result.summary["classes"]["rt"]["saturation"]
    assert found["verdict"] == "saturated"
    (note,) = overloaded(result.summary, "vllm")
    assert note.startswith("vllm: saturated; real-time requests: ")
    assert note.endswith("means depend on the length of the trace")
    (line,) = [x for x in render_table({"vllm": result}).splitlines() if "queue" in x]
    assert line.split()[1:] == ["grows", f"{found['growth_per_s']:.1f}/s"]
    calm = simulate(config.model_copy(update={"rate": 2.0, "duration": 300.0}))["vllm"]
    assert not overloaded(calm.summary, "vllm") and "steady" in render_table({"vllm": calm})
