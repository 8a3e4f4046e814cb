"""The comparison of forms of step times: accuracies, and what a policy pays for deciding with
each."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.forms import accuracy as forms_accuracy
from twinserve.experiments.forms import main as forms
from twinserve.experiments.forms.accuracy import KINDS, drawn_steps, on_a_profile, on_recorded_steps
from twinserve.experiments.forms.main import (
    CASES,
    accuracy_markdown,
    costs,
    costs_markdown,
    inputs_of,
    points,
    run_point,
)
from twinserve.experiments.study.command import GridOptions
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.estimates import FORMS
from twinserve.profiles.profile import load_profile


def test_the_drawn_steps_are_what_they_are_called():
    steps = drawn_steps(0, 50)
    for kind, works in steps.items():
        assert len(works) == 50 and all(
            (w.decode_requests > 0) == (kind != "prompts") for w in works
        )
        assert all((len(w.prefill_new) > 0) == (kind != "decodes") for w in works)
        assert all(
            w.decode_context_max
            <= w.decode_context
            <= w.decode_requests * max(w.decode_context_max, 1)
            for w in works
        )
    again = drawn_steps(0, 50)["mixed"]
    assert [w.new_tokens for w in again] == [w.new_tokens for w in steps["mixed"]]


def test_each_form_is_held_against_the_profile_that_it_was_fitted_to():
    table = on_a_profile(load_profile("llama-3.1-8b@l40s"), each=60)
    assert list(table.form.unique()) == list(FORMS) and set(table.kind) == set(KINDS)
    of = table.set_index(["form", "kind"])
    # the profile is the roofline itself, and its decodes are linear in what echo-total knows
    exact = [("echo-total", "decodes"), *(("roofline", kind) for kind in KINDS)]
    assert of.error[exact].max() < 1e-12 and of.error.drop(exact).min() > 0.01
    assert (of.error >= of.bias.abs() - 1e-12).all()
    assert of.error["bros", "decodes"] < of.error["echo", "decodes"]  # eq. 7 knows no batch size


def test_forms_on_recorded_steps(tmp_path, monkeypatch):
    folder = tmp_path / "steps"
    folder.mkdir()
    profile, rows, rng = load_profile("llama-3.1-8b@l40s/operators"), [], np.random.default_rng(0)
    for _ in range(60):
        n, c, new = (
            int(rng.integers(1, 100)),
            int(rng.integers(100, 2000)),
            int(rng.integers(0, 2)) * 200,
        )
        work = StepComposition(n, n * c, c, np.array([new][:new], int), np.array([0][:new], int))
        rows.append((1.1 * profile.model().step_seconds(work), n, n * c, c, new, "it"))
    columns = [
        "seconds",
        "decode_requests",
        "decode_context",
        "decode_context_max",
        "prefill_tokens",
        "model",
    ]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "h100_vllm_steps.csv.gz", index=False)
    monkeypatch.setattr(forms_accuracy, "STEPS", (("it", "llama-3.1-8b@l40s/operators"),))
    table = on_recorded_steps(tmp_path).set_index("form")
    assert (table.steps == 60).all()
    assert (
        table.left_out["profile as it is"]
        == pytest.approx(1 - 1 / 1.1)
        == table.error["profile as it is"]
    )
    assert (
        table.left_out["profile + host"] < 0.05
        and table.left_out["bros"] >= 0.5 * table.error["bros"] > 0
    )
    text = accuracy_markdown(table.reset_index(), on_a_profile(profile, each=5))
    assert "| operators as shipped | 9.1% |  |  |  |" in text and "recorded steps, it" in text


def test_costs_by_hand():
    rows = []
    for estimator, latency, kept in (
        ("perfect", (100.0, 200.0), (1.0, 0.9)),
        ("bros", (110.0, 240.0), (0.9, 0.9)),
    ):
        for seed in range(2):
            row = {
                m.name: (kept if m.share else latency)[seed] for m in CASES["bros, 20/s"].metrics
            }
            rows.append({"case": "bros, 20/s", "estimator": estimator, "seed": seed, **row})
    table = costs(pd.DataFrame(rows))
    mine = table[table.estimator == "bros"].set_index("metric")
    assert (
        mine.change["TTFT mean, ms"] == pytest.approx(0.15) and mine.value["TTFT mean, ms"] == 175.0
    )
    assert mine.change_ci["TTFT mean, ms"] == pytest.approx(12.706 * 0.05, rel=1e-3)
    assert mine.change["objectives kept"] == pytest.approx(-0.05)
    text = costs_markdown(table)
    assert "| `perfect` | 95.0 ± 63.5 % | 150.0 ± 635.3 |" in text
    assert "| `bros` | -5.0 ± 63.5 points | +15.0 ± 63.5 % |" in text


def test_one_request_list_and_one_truth_for_all_beliefs():
    believed = [inputs_of("echo", estimator, 1, True) for estimator in ("perfect", "roofline")]
    first, second = (inputs.workload for inputs in believed)
    assert np.array_equal(first.arrival_s, second.arrival_s) and np.array_equal(
        first.prompt_tokens, second.prompt_tokens
    )
    work = StepComposition(9, 900, 100)
    assert believed[0].hardware.model.step_seconds(work) == believed[1].hardware.model.step_seconds(
        work
    )
    assert believed[1].estimator.model.step_seconds(work) != believed[
        1
    ].hardware.model.step_seconds(work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.nightly if i else ()) for i, c in enumerate(CASES)]
)
def test_a_small_run_of_each_case(case):
    estimator = CASES[case].estimators[1]
    found = run_point(case, estimator, 0, True)
    assert (
        found.keys() == {metric.name for metric in CASES[case].metrics}
        and np.isfinite([*found.values()]).all()
    )
    assert run_point(case, estimator, 0, True) == found


def test_every_case_starts_from_true_step_times():
    grid = pd.DataFrame([point.axes for point in points(False, 2)])
    assert all(case.estimators[0] == "perfect" for case in CASES.values())
    assert len(grid) == 2 * sum(len(case.estimators) for case in CASES.values())


@pytest.mark.nightly
def test_the_command_writes_everything(tmp_path, monkeypatch):
    monkeypatch.delenv("TWINSERVE_TRUTH", raising=False)
    monkeypatch.setattr(forms, "on_a_profile", lambda profile: on_a_profile(profile, each=20))
    said = forms.STUDY.command((), GridOptions(quick=True, seeds=1, workers=1, out=tmp_path))
    assert "names no recorded steps" in said and all(f"**{case}**" in said for case in CASES)
    wanted = {"report.md", "points.csv", "costs.csv", "profile_errors.csv", "forms.png"}
    assert {path.name for path in tmp_path.iterdir()} >= wanted
