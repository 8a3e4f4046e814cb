"""Flags win over a former run's file, which wins over a preset; what does not fit the trace that is
named goes."""

import json

import pytest

from twinserve.sim.setup.config import PRESETS, SettingsError, SimulationConfig, parse_slo
from twinserve.sim.setup.presets import with_defaults

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
