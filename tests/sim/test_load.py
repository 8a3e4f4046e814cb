"""Arrivals stay as the user gave them: a load applies where it is asked for, and whatever is
changed is said."""

import json

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.sim.cli.simulate import headline
from twinserve.sim.results.files import present_run
from twinserve.sim.setup.config import GENERATED_RATE, SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import offered_load
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import simulate
from twinserve.traces.catalog import ALIASES, BY_NAME, SYNTHETIC
from twinserve.traces.load import load_trace
from twinserve.traces.workload import Workload, WorkloadError
from twinserve.traces.write import write_trace

_SYNTHETIC = ("fixed:300,20" if "," in name else name for name in SYNTHETIC)
NAMES = list(dict.fromkeys([*ALIASES, *BY_NAME, *_SYNTHETIC]))
OTHER = {"replicas": 4, "profile": "qwen2.5-14b@a100-40g:tp2", "max_num_seqs": 8}


# `.ci/run` has one of each kind
@pytest.fixture(params=mostly_nightly(NAMES, *NAMES[::4]))
def trace(request):
    """A named trace that is at hand without a network."""
    try:
        load_trace(request.param, offline=True)
    except WorkloadError as error:
        assert "not at hand" in str(error)
        pytest.skip("has no embedded replica")
    return request.param


# -- as recorded -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_named_trace_keeps_its_arrivals_on_any_hardware(trace):
    """And runs on all of it, since over-long rows are cut."""
    given = load_trace(
        trace, offline=True, **({"rate": GENERATED_RATE} if generated(trace) else {})
    )
    for other in ({}, OTHER):
        got = resolve(SimulationConfig(trace=trace, offline=True, slo="none", **other))
        assert np.array_equal(got.workload.arrival_s, given.arrival_s, equal_nan=True)
        assert got.workload.longest <= got.hardware.limits.max_model_len


def generated(trace: str) -> bool:
    return trace in ("poisson", "sharegpt", "lmsys") or trace.startswith("fixed:")


@pytest.mark.slow
def test_four_replicas_serve_the_same_arrivals_sooner():
    same = {
        "trace": "sharegpt",
        "rate": 40.0,
        "requests": 400,
        "profile": "qwen2.5-14b@a100-40g:tp2",
    }
    one, four = (
        simulate(SimulationConfig(replicas=n, **same))["vllm"].summary["mean_ttft_ms"]
        for n in (1, 4)
    )
    assert four < 0.5 * one


def test_a_rate_that_nobody_gave_is_said():
    inputs = resolve(SimulationConfig(trace="sharegpt", requests=50))
    assert inputs.notices[-1].startswith("rate 10 requests/s, the default (--rate or --load")
    assert not resolve(SimulationConfig(trace="sharegpt", requests=50, rate=10.0)).notices


@pytest.mark.nightly
def test_the_default_run_is_neither_idle_nor_saturated():
    """Capacity by its own definition: how long the same requests take when they all come at
    once."""
    as_is = simulate(SimulationConfig(offline=True))["vllm"].rows.requests
    at_once = simulate(SimulationConfig(offline=True, rate_scale=1e4))["vllm"].rows.requests
    busy = at_once.last_token_s.max() - at_once.arrival_s.min()
    span = as_is.arrival_s.max() - as_is.arrival_s.min()
    assert 0.6 <= busy / span <= 0.75


# -- a load that is asked for ----------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("trace", ["mooncake", "azure-2023:conv", "sharegpt"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_load_is_of_all_replicas(trace, replicas):
    given = SimulationConfig(trace=trace, load=0.5, replicas=replicas, offline=True)
    inputs = resolve(given)
    found = offered_load(inputs.workload, inputs.hardware, replicas)
    # a generated trace is a sample: its lengths and its span differ from run to run
    assert found == pytest.approx(0.5, rel=0.1 if trace == "sharegpt" else 0.01)
    assert f"about {found:.0%} of estimated capacity" in headline(inputs)
    assert "--load 0.5 of estimated capacity" in inputs.notices[-1]


def test_a_load_of_requests_that_come_all_at_once_is_refused(tmp_path):
    w = Workload.build(np.full(5, 7.0), np.full(5, 90), np.full(5, 5))
    path = write_trace(w, tmp_path / "burst.jsonl")
    for trace in (str(path), "longdoc:toolbench"):
        with pytest.raises(SettingsError, match="--load 0.5: .* arrive at once.*; drop it"):
            resolve(SimulationConfig(trace=trace, load=0.5))
    said = headline(resolve(SimulationConfig(trace=str(path))))
    assert "5 requests all at once" in said and "capacity" not in said


def test_a_former_run_keeps_the_load_that_it_meant(tmp_path):
    """Before version 3, no setting meant a load of 0.7 for traces that go by a name."""
    path = tmp_path / "run.json"
    for trace, meant in (("mooncake", 0.7), ("lmsys", 0.7), ("tidal", None), ("x.jsonl", None)):
        for more in ({}, {"rate_scale": 2.0}, {"load": 0.4}, {"rate": 3.0}):
            settings = SimulationConfig(trace=trace, **more).model_dump(mode="json")
            for version in (1, 2):
                path.write_text(json.dumps({"version": version, "config": settings}))
                wanted = settings["load"] if more else meant
                assert from_file(path)["load"] == wanted, (trace, more)
            now = {"version": 3, "config": settings}
            assert present_run(now, path, ValueError)["config"] == settings


# -- rows that are too long ------------------------------------------------------------------------
@pytest.mark.slow
def test_over_long_rows_of_a_named_trace_are_cut_and_that_is_said(tmp_path):
    small = {"num_blocks": 2000, "offline": True}
    inputs = resolve(SimulationConfig(trace="mooncake", **small))
    limit = inputs.hardware.limits.max_model_len
    whole = load_trace("mooncake", offline=True)
    over = int((whole.prompt_tokens + whole.output_tokens > limit).sum())
    assert over > 0 and len(inputs.workload) == len(whole) and inputs.workload.longest == limit
    (said,) = [line for line in inputs.notices if "cut to that length" in line]
    assert said.startswith(f"{over:,} of {len(whole):,} requests are longer than the {limit:,} ")
    assert any("cap-length" in done for done in inputs.workload.provenance.transforms)
    # the same rows in a file of the user's own
    path = write_trace(whole, tmp_path / "mine.jsonl")
    with pytest.raises(WorkloadError, match=f"over the limit of {limit}.*--cap-length {limit}"):
        resolve(SimulationConfig(trace=str(path), **small))
    cut = resolve(SimulationConfig(trace=str(path), cap_length=limit, **small))
    assert np.array_equal(cut.workload.prompt_tokens, inputs.workload.prompt_tokens)
