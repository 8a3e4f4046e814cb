"""Moves by kind: what a run asked for, what its decision log keeps of that, and what is said of
those that no engine makes."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.moves import IN, OUT
from twinserve.backends.counts import kind_of, not_made, not_made_lines
from twinserve.policies.plan import KvMove
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import State
from twinserve.sim.cli.live import locked_lines, locked_summary
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import blank_settings, live_settings
from twinserve.sim.twin.replay import LockedReplay
from twinserve.sim.twin.validate import Validation
from twinserve.sim.twin.validate_report import metric_lines, page

# Prompts of 512 tokens, and memory for three of eight.
CROWDED = {
    "trace": "fixed:512,60", "rate": 30.0, "requests": 6, "num_blocks": 104, "host_blocks": 400,
    "slo": "none",
}  # fmt: skip


def inputs_for(policy: str, **changes):
    return resolve(
        SimulationConfig(
            **{**CROWDED, "policy": (policy,), "profile": "llama-3.1-8b@a100-80g", **changes}
        )
    )


def logged(policy: str, **changes):
    inputs = inputs_for(policy, **changes)
    result = run_policy(inputs, inputs.policies[0], decisions=True)
    return parse_log(result.decisions), result


@pytest.mark.parametrize(
    "places, state, swapped_in, layered, kind",
    [
        (OUT, State.SWAPPED, (), False, "requests"),
        (OUT, State.SWAPPED, (), True, "requests"),  # what layers it still had
        (OUT, State.RUNNING, (), True, "layers"),
        (OUT, State.RUNNING, (), False, "parts"),
        (IN, State.RUNNING, (3,), False, "requests"),
        (IN, State.RUNNING, (3,), True, "requests"),
        (IN, State.RUNNING, (4,), False, "parts"),
        (IN, State.RUNNING, (), True, "layers"),
    ],
)
def test_kinds(places, state, swapped_in, layered, kind):
    assert kind_of(KvMove(3, *places, 8), state, swapped_in, layered) == kind


def test_a_swapped_request_is_made_and_nothing_is_said():
    log, result = logged("vllm-v0:preemption_mode=swap")
    assert set(log.moved) == {"requests"}
    assert log.moved["requests"]["to_host_bytes"] == result.rows.steps["to_host_bytes"].sum() > 0
    assert not_made(log.moved, physical=False) == {} and not_made_lines({}) == []


@pytest.mark.slow
def test_slots_of_bros_are_made_on_a_physical_layout_only():
    log, _ = logged("bros", pool=4, num_blocks=120, slo="ttft=0.2,tpot=0.1")
    assert log.moved["parts"]["to_host_bytes"] + log.moved["parts"]["to_device_bytes"] > 0
    assert set(not_made(log.moved, physical=False)) == {"parts"}
    assert not_made(log.moved, physical=True) == {}


def test_a_locked_replay_names_what_it_did_not_make():
    log, _ = logged("layerkv:x=0,slo_aware=false")
    steps = {"predicted_s": [0.1], "measured_s": [0.1], "drift": [False], "moved": [False]}
    steps |= {"planned_free_blocks": [1], "live_free_blocks": [1]}
    found = LockedReplay(pd.DataFrame(steps), {}, "", 0, [])
    counts = log.moved["layers"]
    assert locked_summary(found, log, "0.0")["not_made"] == {"layers": counts}
    said = dict(locked_lines(found, log))["not made: moves of layers"]
    assert said.startswith(
        f"{counts['moves']:,}, {counts['to_host_bytes'] / 1e6:,.1f} MB to the host and "
    )
    assert "vLLM keeps all layers of a block together" in said
    assert not any(
        name.startswith("not made") for name, _ in locked_lines(found, replace(log, moved={}))
    )


def test_a_validation_names_them_too():
    log, result = logged("layerkv:x=0,slo_aware=false")
    rows = {
        "predicted_s": [0.1, 0.2],
        "measured_s": [0.1, 0.2],
        "drift": [False] * 2,
        "moved": [False] * 2,
    }
    found = not_made(log.moved, physical=False)
    live = replace(result, config={**result.config, "live": {"not_made": found}})
    spec = parse_policy("layerkv:x=0,slo_aware=false")
    validation = Validation(
        spec, result, LockedReplay(pd.DataFrame(rows), {}, "", 0, []), [live], 0, found
    )
    assert (
        validation.summary()["locked"]["not_made"]
        == found
        == validation.summary()["free"]["not_made"][0]
    )
    (said,) = (
        text for name, text in metric_lines(validation) if name == "not made: moves of layers"
    )
    assert f"Not made: moves of layers: {said}.\n\n" in page([validation], "0.0")
    plain = replace(validation, not_made={})
    assert "ot made" not in page([plain], "0.0") and "not made: moves of layers" not in dict(
        metric_lines(plain)
    )


def test_a_physical_layout_is_refused_where_a_ledger_has_none():
    settings = replace(blank_settings(), physical=True, model=Path())
    paged = inputs_for("vllm")
    with pytest.raises(SettingsError, match="runs on paged: drop it"):
        live_settings(paged, paged.policies[0], settings)
