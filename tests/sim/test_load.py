"""Arrivals stay as the user gave them: a load applies where it is asked for, and whatever is
changed is said."""

import json

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.policies.layerkv.lengths import LengthRange
from twinserve.policies.requests import RequestTable
from twinserve.sim.cli.simulate import headline
from twinserve.sim.results.files import present_run
from twinserve.sim.setup.config import (
    GENERATED_RATE,
    PRESETS,
    SettingsError,
    SimulationConfig,
    parse_slo,
)
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import offered_load
from twinserve.sim.setup.presets import from_file, with_defaults
from twinserve.sim.setup.run import Simulation, simulate
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


# Flags win over a former run's file, which wins over a preset; what does not fit the trace that
# is named goes.
HYBRID = PRESETS["bros-hybrid"]


def stored(tmp_path, **settings):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"config": SimulationConfig(**settings).model_dump(mode="json")}))
    return path


def test_flags_then_the_file_then_the_preset(tmp_path):
    assert with_defaults(SimulationConfig(), "bros-hybrid") == SimulationConfig(**HYBRID)
    assert with_defaults(SimulationConfig(pool=3), "bros-hybrid").pool == 3
    file = stored(tmp_path, seed=4, trace="lmsys", rate=2.0)
    got = with_defaults(SimulationConfig(seed=5), "bros-hybrid", file)
    assert (got.seed, got.trace, got.rate, got.pool) == (5, "lmsys", 2.0, 0)


@pytest.mark.parametrize("flags", [{}, {"rate_scale": 2.0}, {"load": 0.5}, {"window": (0.0, 60.0)}])
def test_a_recorded_trace_leaves_out_the_presets_rate(flags):
    got = with_defaults(SimulationConfig(trace="mooncake", **flags), "bros-hybrid")
    assert got.rate is None and got.duration is None
    assert (got.pool, got.slo, got.profile) == (HYBRID["pool"], HYBRID["slo"], HYBRID["profile"])
    assert {name: getattr(got, name) for name in flags} == flags


def test_a_generated_one_keeps_it():
    got = with_defaults(SimulationConfig(trace="lmsys"), "bros-hybrid")
    assert (got.trace, got.rate, got.duration) == ("lmsys", HYBRID["rate"], HYBRID["duration"])


def test_a_generated_trace_leaves_out_what_a_file_says_of_a_recorded_one(tmp_path):
    file = stored(
        tmp_path, trace="a.csv", format="azure", rate_scale=2.0, window=(0, 60),
        raw_arrivals=True, requests=9,
    )  # fmt: skip
    got = with_defaults(SimulationConfig(trace="lmsys"), file=file)
    assert got == SimulationConfig(trace="lmsys", requests=9)
    assert with_defaults(SimulationConfig(trace="b.jsonl"), file=file).format is None
    assert with_defaults(SimulationConfig(), file=file).window == (0.0, 60.0)


@pytest.mark.parametrize("flag", [{"load": 0.5}, {"rate": 3.0}])
def test_one_way_to_set_the_rate_replaces_another(flag):
    assert (
        with_defaults(SimulationConfig(**flag), "bros-hybrid").model_dump()[next(iter(flag))]
        == flag[next(iter(flag))]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("{", "this is not a run.json"),
        ('{"config": []}', "this is not a run.json"),
        ('{"config": {"colour": 1}}', "unknown setting 'colour'"),
    ],
)
def test_a_file_that_is_no_run_is_a_settings_error(tmp_path, text, said):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        with_defaults(SimulationConfig(), file=path)
    with pytest.raises(SettingsError, match="there is: bros-hybrid"):
        with_defaults(SimulationConfig(), "bros-hybird")


@pytest.mark.parametrize("text", ["ttft=0,tpot=1", "ttft=1,ttft=2", "ttft=1", "tpot=x"])
def test_objectives_that_make_no_sense_are_a_settings_error(text):
    with pytest.raises(SettingsError, match="--slo"):
        parse_slo(text)


# What predictors learn from before a run: requests of the same trace, none of which is served.
SETTINGS = {"offline": True, "profile": "llama-3.1-8b@h100", "async_scheduling": True}


def inputs(policy: str = "layerkv", **settings):
    return resolve(SimulationConfig(policy=(policy,), **(SETTINGS | settings)))


@pytest.fixture(scope="module")
def file_of_200(tmp_path_factory):
    """Arrivals a second apart; prompts 1000, 1001, .., so that each row can be told."""
    file = tmp_path_factory.mktemp("trace") / "own.csv"
    rows = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d},{1000 + i},{10 + i}" for i in range(200)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(file)


def test_of_a_recorded_trace_no_request_is_both_served_and_learned_from(file_of_200):
    found = inputs(trace=file_of_200, requests=80)
    served, learned = found.workload.prompt_tokens, found.earlier.prompt_tokens
    assert len(served) == 80 and len(learned) == 120
    assert not set(served.tolist()) & set(learned.tolist())
    assert (found.earlier.output_tokens == learned - 990).all()


def test_where_too_few_are_left_it_is_said(file_of_200):
    found = inputs(trace=file_of_200, requests=190)
    assert found.earlier is None
    assert sum("too few requests" in line for line in found.notices) == 1


def test_of_a_generated_trace_it_is_another_draw_of_the_same_kind():
    found = inputs(trace="sharegpt", rate=2.0, requests=300, seed=3)
    assert len(found.earlier.prompt_tokens) == 1000
    served = found.workload.prompt_tokens
    assert not np.array_equal(found.earlier.prompt_tokens[:300], served)
    assert found.earlier.prompt_tokens.mean() == pytest.approx(served.mean(), rel=0.4)
    fixed = inputs(trace="fixed:2048,512", rate=1.0, requests=10).earlier
    assert set(fixed.prompt_tokens) == {2048} and set(fixed.output_tokens) == {512}


def test_only_who_asks_for_it_gets_it():
    for policy in ("vllm", "layerkv:predictor=history", "layerkv:predictor=oracle-length"):
        assert inputs(policy, trace="fixed:64,8", rate=1.0, requests=5).earlier is None


def test_the_predictor_knows_before_the_first_request():
    found = inputs(trace="fixed:2048,512", rate=1.0, requests=10)
    policy = Simulation(found, found.policies[0]).engines[0].core.policy
    table = RequestTable()
    table.submit("r0", prompt_tokens=2048)
    assert policy.predictor.predict(0, table) == LengthRange(512, 512, 512)
