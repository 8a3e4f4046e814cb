"""What a plan needs no trial for, worked out by hand: the part of a trace that is its peak, and the
fewest replicas that work and memory allow."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.profiles.composition import StepComposition, isolated_prefill_seconds
from twinserve.sim.plan.peaks import Trouble, find_peak, peak_window
from twinserve.sim.plan.sizes import Size, hopeless, least_replicas
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import with_objectives
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.traces.workload import Workload


def test_the_peak_of_a_grown_trace_is_as_long_as_asked_and_its_lead_is_not_judged(tmp_path):
    """Five requests a second from 40 s to 60 s, one otherwise; twice as fast these are 10 s."""
    arrivals = [*range(40), *np.arange(40, 60, 0.2), *range(60, 101)]
    clock = [f"18:{int(at) // 60:02d}:{at % 60:010.7f}" for at in arrivals]
    rows = "".join(f"2023-11-16 {at},100,10\n" for at in clock)
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    peak = find_peak(str(trace), grow=2.0, peak_s=10.0, lead_s=5.0)
    assert peak.window_s == (pytest.approx(30, abs=0.3), pytest.approx(60, abs=0.3))
    assert len(peak.judged) == pytest.approx(100, abs=2)  # 10 more lie in the lead
    assert peak.requests_per_s == pytest.approx(10, rel=0.03)
    assert peak.since_s == pytest.approx(5, abs=0.1)
    assert peak.tokens_per_s == pytest.approx(2 * 181 * 110 / 100)
    parts = np.array(peak.load["tokens_per_s"])
    assert parts.mean() == pytest.approx(2 * 181 * 110 / 100)
    assert find_peak(str(trace), 1.0, 1e3, 0.0).window_s == (0.0, pytest.approx(100))
    failing = replace(peak, trouble=Trouble(3)).settings(2, speed=0.5)
    at_s = pytest.approx(peak.since_s / 0.5)
    assert json.loads(failing["failures"]) == [{"replica": i, "at_s": at_s} for i in range(2)]


def test_a_day_is_a_share_of_the_peaks_minute_and_goes_round(tmp_path):
    """A request a minute, ten in each of the last five minutes of the first day; the peak is an
    hour."""
    minutes = np.repeat(np.arange(1500), [10 if 1435 <= m < 1440 else 1 for m in range(1500)])
    trace = tmp_path / "t.csv"
    rows = "".join(f"{60 * m},100,10\n" for m in minutes.tolist())
    trace.write_text("at,in,out\n" + rows)
    read = {"columns": "arrival=at,prompt=in,output=out"}
    peak = find_peak(str(trace), 1.0, 3600.0, 0.0, read=read)
    at_peak = (55 + 50) / 60
    expected = [(10 + 50) / 15, 1.0, (10 + 50) / 15]
    found = peak.day[[0, 700, 1437]]
    assert len(peak.day) == 1440 and found == pytest.approx(np.array(expected) / at_peak, rel=0.02)


@pytest.mark.parametrize("trace", ["fixed:100,10", "sharegpt", "poisson"])
def test_a_stated_load_is_judged_behind_its_lead(trace):
    peak = find_peak(trace, grow=2.0, peak_s=50.0, lead_s=5.0, rate=20.0)
    assert peak.window_s == (0, pytest.approx(110, abs=1)) and peak.since_s == pytest.approx(5)
    assert peak.requests_per_s == pytest.approx(40, rel=0.1)
    assert len(peak.judged) == pytest.approx(2000, rel=0.1)
    assert (peak.judged.prompt_tokens == 100).all() == (trace == "fixed:100,10")


def test_a_recording_has_a_rate_of_its_own():
    with pytest.raises(SettingsError, match="use --grow"):
        find_peak("stages:2x60", 1.0, 50.0, 5.0, rate=20.0)


def judged(load: Workload, slo: str, **settings):
    config = SimulationConfig(profile="llama-3.1-8b@h100", **settings)
    hardware, objectives = resolve_hardware(config), parse_objectives(slo)
    return with_objectives(load, hardware, objectives), objectives, hardware


def test_memory_alone_asks_for_replicas():
    """40 requests of 1,000 prompt tokens hold them for 200 steps, which are as short as they get
    alone; the memory of one holds little more than two of them."""
    load = Workload.build(np.linspace(0, 1, 40), [1000] * 40, [200] * 40)
    found = judged(load, "ttft p99 < 1 s, tpot p99 < 10 ms", num_blocks=150)
    step_s = found[2].model.step_seconds(StepComposition(1, 1, 1))
    until_s = 1 + 1 + 200 * 0.010
    expected = 40 * (1000 + 100) * 199 * step_s / (150 * 16 * until_s)
    assert expected > 5
    least = least_replicas(*found)
    assert least == np.ceil(expected * 0.999)
    asked = "ttft p50 < 1 s, tpot p50 < 10 ms"  # perhaps of different requests
    assert least_replicas(*judged(load, asked, num_blocks=150)) == 1
    for crashes, most in ((0, least), (2, least + 2)):
        size, short = (
            Size.of(
                SimpleNamespace(hardware=found[2]),
                [SimpleNamespace(judged=load, crashes=crashes)],
                found[1],
                allowed,
            )
            for allowed in (most, most - 1)
        )
        assert size.hopeless is None and size.least == most <= size.guess
        assert f"{most} or more replicas are needed" in short.hopeless
    assert least_replicas(*judged(load, "ttft p99 < 1 s, tpot p99 < 10 ms")) < expected


@pytest.mark.parametrize(("factor", "kept"), [(0.9, False), (1.1, True)])
def test_a_prompt_alone_is_computed_in_the_quickest_way(factor, kept):
    model = resolve_hardware(SimulationConfig(profile="llama-3.1-8b@h100")).model
    alone_s = isolated_prefill_seconds(model, 10240, None)
    load = Workload.build([0.0, 1.0], [10240] * 2, [1, 1])
    assert (hopeless(*judged(load, f"ttft p99 < {factor * alone_s * 1e3:.3f} ms")) is None) is kept


def test_a_request_of_one_token_has_no_time_a_token():
    load = Workload.build([0.0, 1.0], [100] * 2, [1, 1])
    assert hopeless(*judged(load, "tpot p99 < 0.001 ms")) is None
    other = replace(load, output_tokens=np.array([1, 2]))
    assert "TPOT" in hopeless(*judged(other, "tpot p99 < 0.001 ms"))


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


def test_a_peak_without_length_is_refused():
    for seconds in (float("nan"), float("inf"), -5.0, 0):
        with pytest.raises(SettingsError, match=f"peak of {seconds} s is empty"):
            peak_window(Workload.build([0], [1], [1]), seconds)
