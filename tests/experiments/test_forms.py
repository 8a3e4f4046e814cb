"""The comparison of forms of step times: how far each is off."""

import pandas as pd
import pytest

from tests.profiles.recorded_steps import write_steps
from twinserve.experiments.forms import accuracy as forms_accuracy
from twinserve.experiments.forms import main as forms
from twinserve.experiments.forms.accuracy import (
    KINDS,
    LABELS,
    drawn_steps,
    on_a_profile,
    on_recorded_steps,
)
from twinserve.experiments.study.command import GridOptions
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
    model = load_profile("llama-3.1-8b@l40s/operators").model()
    file = folder / "h100_vllm_steps.csv.gz"
    write_steps(file, lambda work: 1.1 * model.step_seconds(work), ["it"] * 60)
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
    rows = forms.table(pd.DataFrame([*forms.errors(str(tmp_path), 0), *forms.errors(None, 5)]))
    text = forms.TEXT(rows)
    assert "| operators as shipped | 9.1% |  |  |  |" in text and "recorded steps, it" in text


@pytest.mark.slow
def test_the_study_says_when_there_are_no_recorded_steps(tmp_path, monkeypatch):
    monkeypatch.delenv("TWINSERVE_TRUTH", raising=False)
    forms.STUDY.command((), GridOptions(quick=True, workers=1, out=tmp_path))
    said = (tmp_path / "tables.md").read_text()
    assert "profile, mixed" in said and "recorded steps, " not in said
    assert all(f"| {LABELS[form]} |" in said for form in FORMS)
