"""The sensitivity experiment: what is perturbed, what counts as a lead, and a small run of all of
it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.sensitivity import main as sensitivity
from twinserve.experiments.sensitivity.main import (
    METRICS,
    SETTINGS,
    beliefs_markdown,
    changes,
    conclusions,
    grid,
    markdown,
)
from twinserve.experiments.study.command import GridOptions
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.runs import PARTS, BelievingInputs, misjudging, perturbed, run
from twinserve.experiments.study.runs import inputs_of as of_settings
from twinserve.experiments.study.study import Scale
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.registry import parse_policy, policy_class
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import kinds, make_policy

BROS = policy_class("bros")
QUICK = Scale(quick=True, seeds=(0,))


def small(setting: str, scale: Scale = QUICK) -> Iterator[Point]:
    """The points of a setting at its smallest, all parts that are off."""
    few = {
        name: n
        for name, n in grid(setting).few.items()
        if name not in ("setting", ("part", "factor"))
    }
    yield from replace(grid(setting), few=few)(scale)


def inputs_of(setting: str) -> Inputs:
    """Of all policies of a setting, with the profile as it is."""
    *_, last = small(setting)
    found = of_settings({**last.arguments["settings"], "off": None})
    return replace(
        found, policies=tuple(parse_policy(text) for text in SETTINGS[setting]["policies"])
    )


def runs_off(setting: str, part: str, factor: float) -> pd.DataFrame:
    """A row for each policy of the setting at its smallest."""
    asked = [p for p in small(setting) if p.axes["part"] == "none"]
    rows = {
        point.axes["policy"]: run(
            {**point.arguments["settings"], "off": [part, factor]}, point.arguments["columns"]
        )
        for point in asked
    }
    return pd.DataFrame(rows).T


def rows(values: dict) -> pd.DataFrame:
    """(part, factor) -> policy -> numbers of seeds 0, 1, ..; `KEPT` and a latency of setting
    memory."""
    metrics = {name: METRICS[name] for name in SETTINGS["memory"]["metrics"]}
    found = []
    for (part, factor), policies in values.items():
        for policy, numbers in policies.items():
            for seed, number in enumerate(numbers):
                row = {
                    "setting": "memory",
                    "part": part,
                    "factor": factor,
                    "seed": seed,
                    "policy": policy,
                }
                found.append(
                    row | {name: number / 100 if m.share else number for name, m in metrics.items()}
                )
    return pd.DataFrame(found)


def test_a_lead_by_hand():
    table = conclusions(
        rows(
            {
                ("none", 1.0): {"a": [50.0, 60.0], "b": [100.0, 100.0], "c": [90.0, 110.0]},
                ("step", 1.1): {"a": [120.0, 130.0], "b": [100.0, 100.0], "c": [150.0, 150.0]},
            }
        )
    )
    assert list(table.setting.unique()) == ["memory"]
    latency = table[table.metric == "TTFT mean, ms"].set_index("part")
    # by geometric means c (99.5) is next, before b (100): sqrt(50 * 60) of sqrt(90 * 110)
    assert latency.leader.unique().tolist() == ["a"] and latency.best.tolist() == ["a", "b"]
    assert latency.second.tolist() == ["c", "b"]
    assert latency.lead["none"] == pytest.approx(1 - np.sqrt(50 * 60 / (90 * 110)))
    assert latency.lead["step"] == pytest.approx(1 - np.sqrt(1.2 * 1.3))
    # t of two values is 12.706; their half difference in logarithms is the standard error
    error = abs(np.log(120 / 100) - np.log(130 / 100)) / 2
    low, high = (1 - np.exp(np.log(1.2 * 1.3) / 2 + s * 12.7062 * error) for s in (1, -1))
    assert (latency.lead_low["step"], latency.lead_high["step"]) == pytest.approx(
        (low, high), rel=1e-4
    )
    speed = table[table.metric == "all tok/s"].set_index("part")
    assert speed.leader["none"] == "b" and speed.lead["none"] == pytest.approx(
        100 / np.sqrt(90 * 110) - 1
    )


def test_shares_are_compared_in_points_and_a_tie_takes_nothing_away():
    table = conclusions(
        rows(
            {
                ("none", 1.0): {"a": [50.0, 60.0], "b": [90.0, 95.0]},
                ("kv", 0.9): {"a": [80.0, 80.0], "b": [80.0, 80.0]},
            }
        )
    )
    kept = table[table.metric == "objectives kept"].set_index("part")
    assert kept.leader.tolist() == ["b", "b"] == kept.best.tolist()
    assert (
        kept.lead["none"] == pytest.approx(0.375)
        and kept.lead["kv"] == 0.0
        and kept.second["kv"] == "a"
    )


def test_changes_are_paired_by_seed():
    table = changes(rows({("none", 1.0): {"a": [50.0, 100.0]}, ("kv", 0.9): {"a": [60.0, 120.0]}}))
    mine = table.set_index("metric").loc["TTFT mean, ms"]
    assert (
        mine.change == pytest.approx(0.2)
        and mine.change_ci == pytest.approx(0.0, abs=1e-9)
        and mine.seeds == 2
    )
    assert table.set_index("metric").change["objectives kept"] == pytest.approx(0.15)


def test_the_text_says_who_takes_the_lead_away():
    table = conclusions(
        rows(
            {
                ("none", 1.0): {"a": [50.0, 51.0], "b": [100.0, 101.0]},
                ("decode", 0.9): {"a": [200.0, 202.0], "b": [100.0, 101.0]},
                ("kv", 1.1): {"a": [20.0, 20.0], "b": [100.0, 100.0]},
            }
        )
    )
    text = markdown(table[table.metric == "TPOT mean, ms"])
    assert "| TPOT mean, ms | `a` | `b` | +50 (+4" in text and "decode x 0.9: b (-100 (" in text
    assert "-100 % (decode x 0.9)" in text and "+80 % (kv x 1.1)" in text
    assert "best in 1 of 2 comparisons" in text and "in 1 of 2.\n" in text


def test_the_text_says_what_wrong_beliefs_do_and_to_whom():
    table = changes(
        rows(
            {
                ("none", 1.0): {"a": [50.0, 50.0], "b": [50.0, 100.0]},
                ("belief", 0.9): {"a": [50.0, 50.0], "b": [60.0, 120.0]},
                ("belief", 1.1): {"a": [50.0, 50.0], "b": [50.0, 100.0]},
                ("kv", 1.1): {"a": [20.0, 20.0], "b": [70.0, 100.0]},
            }
        )
    )
    text = beliefs_markdown(table)
    # a share is a hundredth here: 10 and 20 points more; t of two values is 12.706, their half
    # difference 5 points
    assert (
        "| memory | `b` | belief x 0.9 | +15.0 ± 63.5 points | +20.0 ± 0.0 % | +20.0 ± 0.0 % |"
        in text
    )
    assert (
        "| memory | `b` | belief x 1.1 | +0.0 ± 0.0 points |" in text
        and "`a`" not in text
        and "kv" not in text
    )


@pytest.fixture(scope="module")
def hybrid():
    return inputs_of("hybrid")


@pytest.mark.parametrize("part", PARTS)
def test_one_part_is_off_and_the_requests_are_the_same(part, hybrid):
    off, was = perturbed(hybrid, part, 1.1), hybrid.hardware
    assert off.workload is hybrid.workload and off.policies == hybrid.policies
    now = off.hardware
    assert (now.num_blocks == was.num_blocks) == (part != "kv")
    assert (now.profile.pcie_bytes_per_s == was.profile.pcie_bytes_per_s) == (part != "pcie")
    slower = (
        now.model.decode_run_seconds(8, 8000, 1000, 1)[0]
        / was.model.decode_run_seconds(8, 8000, 1000, 1)[0]
    )
    if part == "step":
        assert slower == pytest.approx(1.1)
    else:
        assert (slower > 1.0) == (part in ("decode", "host")) and slower < 1.1
    estimate = (
        off.estimator_for(BROS).model.decode.beta / hybrid.estimator_for(BROS).model.decode.beta
    )
    if part == "belief":
        # what is believed is off, what is true is not
        assert isinstance(off, BelievingInputs) and now is was and estimate == pytest.approx(1.1)
        assert isinstance(off.estimator, LinearEstimator) and off.estimator.model.decode.beta > 0
    else:
        assert (estimate > 1.001) == (part in ("step", "decode", "host"))


def test_a_factor_of_one_is_the_profile_as_it_is(hybrid):
    assert perturbed(hybrid, "step", 1.0) is hybrid


@pytest.mark.parametrize("setting", ["echo", "echo-exact"])
def test_what_echo_believes_is_off_and_its_memory_stays_what_was_set(setting):
    inputs = inputs_of(setting)
    assert len(inputs.workload) > 100 and inputs.hardware.num_blocks == 10_000
    spec = next(spec for spec in inputs.policies if spec.name == "echo")
    off = perturbed(inputs, "belief", 1.1)
    batch = ([(512, 0)], 20, 20_000, 2_000)
    was, now = (make_policy(i, spec).cost.seconds(*batch) for i in (inputs, off))
    assert now == pytest.approx(1.1 * was, rel=1e-3) and off.hardware is inputs.hardware
    truth = inputs.hardware.model.decode_run_seconds(20, 20_000, 2_000, 1)[0]
    believed = make_policy(inputs, spec).cost.decode_run(20, 20_000, 2_000, 1)[0]
    assert (believed == truth) == (setting == "echo-exact")
    assert perturbed(inputs, "kv", 0.9).hardware.num_blocks == pytest.approx(9_000, abs=1)
    assert perturbed(inputs, "step", 0.9).hardware.num_blocks == 10_000


def test_predictors_are_trained_on_the_same_requests_whatever_is_believed():
    inputs = inputs_of("memory")
    off = perturbed(inputs, "belief", 1.1)
    assert inputs.earlier is not None and off.earlier is inputs.earlier
    assert [kind.spec for spec in off.policies for kind, _ in kinds(off, spec)] == [*off.policies]


@pytest.mark.nightly
def test_who_believes_nothing_is_as_before():
    base, off = (runs_off("echo", "belief", factor) for factor in (1.0, 0.8))
    same = (base == off).all(axis=1)
    assert set(same[same].index) == {"vllm", "echo-bs"}


@pytest.mark.parametrize(("part", "factors"), [("belief", (1.1, 1.1)), ("demand", (1 / 1.1, 1.1))])
def test_applications_seem_to_need_more_or_less(part, factors, hybrid):
    spec = misjudging(parse_policy("justitia:predictor=class-mean"), part, 1.1)
    for number, factor in enumerate(factors):
        policy = spec.build(hybrid.hardware.limits)
        policy.begins(number, 10_000, 0.0)
        assert policy.F[number] == round(10_000 * factor)
    fcfs = parse_policy("vtc")
    assert misjudging(fcfs, part, 1.1) is fcfs


@pytest.mark.slow
def test_the_applications_policies_get_wrong_demands():
    inputs = inputs_of("apps")
    off = perturbed(inputs, "demand", 1.1)
    assert [mine is not was for mine, was in zip(off.policies, inputs.policies, strict=True)] == [
        False,
        False,
        True,
    ]
    assert off.hardware is inputs.hardware and off.workload is inputs.workload


@pytest.mark.nightly
def test_slower_steps_make_every_policy_slower():
    base, slow = (runs_off("hybrid", "step", factor) for factor in (1.0, 2.0))
    # not so the TTFT and TPOT of BROS, which takes fewer best-effort requests along instead
    assert (slow["all tok/s"] < 0.8 * base["all tok/s"]).all()
    assert set(base.index) == set(SETTINGS["hybrid"]["policies"])


def test_every_part_and_both_directions_are_run():
    for name, of in SETTINGS.items():
        policies = of["policies"]
        mine = pd.DataFrame([point.axes for point in grid(name)(Scale(seeds=(0, 1, 2)))])
        parts = {"belief"} if name == "echo-exact" else {*PARTS}
        parts |= {"demand"} if name == "apps" else set()
        assert set(mine.part) == {"none", *parts} and set(mine.policy) == set(policies)
        assert len(mine) == 3 * len(policies) * (1 + 2 * len(parts))


@pytest.mark.nightly
def test_the_command_writes_everything_and_goes_on_where_it_was(tmp_path, monkeypatch):
    options = GridOptions(quick=True, seeds=1, workers=1, out=tmp_path)
    sensitivity.STUDY.command((), options)
    said = (tmp_path / "tables.md").read_text()
    assert "**mooncake**" in said and "nan" not in said
    files = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*.csv"))}
    assert len(files) == 4 and all(len(content) > 500 for content in files.values())

    def never(*_):
        raise AssertionError("a point was run again")

    monkeypatch.setattr("twinserve.experiments.study.runs.inputs_of", never)
    sensitivity.STUDY.command((), replace(options, any_version=True))
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.slow
def test_the_latencies_are_finite():
    assert np.isfinite(runs_off("memory", "kv", 0.9).to_numpy(float)).all()
