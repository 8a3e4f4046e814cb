"""How sure step times are: the stored errors are those of the marks, and what is expected of a
profile is what was measured nearest to it, or says that nothing was."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parameters import each
from tests.truth import truth
from twinserve.experiments.validation import evidence as made
from twinserve.profiles.catalog import find_model
from twinserve.profiles.evidence import (
    ENOUGH,
    KINDS,
    describe_step_times,
    expected_errors,
    kind_of_model,
    marks,
    own_errors,
)
from twinserve.profiles.names import list_profiles
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.step_times import choose

# Of the errors as they are written (4 places), and of fits on another machine.
PLACES = 2e-4
NAMES = [*list_profiles(), "qwen3-8b@l40s:tp2", "llama-2-7b@h100", "llama-3.1-8b@v100-16g:tp2"]


def test_the_stored_errors_of_the_public_marks_are_those_of_the_profiles():
    stored = [mark for mark in marks() if mark.source == "marks"]
    again = made.public_marks(left_out=False)
    assert len(stored) == len(again) == 17
    for mark, found in zip(stored, again, strict=True):
        told = (mark.engine, mark.kind, mark.size, mark.measured_ms)
        assert told == (found.engine, found.kind, found.size, pytest.approx(found.measured_ms))
        assert mark.errors == pytest.approx(found.errors, abs=PLACES)


@pytest.mark.nightly
@pytest.mark.traces
def test_the_stored_file_is_what_the_script_makes():
    folder = truth("vllm_runs").parent
    if find_spec("aiconfigurator_core") is None:
        pytest.skip("the fits without an engine's marks need aiconfigurator-core")
    file = Path(__file__).parents[2] / "profiles" / "data" / "evidence.json"
    stored, again = json.loads(file.read_text()), json.loads(made.text(made.everything(folder)))
    assert stored["sources"] == again["sources"]
    for mark, found in zip(stored["marks"], again["marks"], strict=True):
        for name in ("errors", "unseen_engine", "unseen_gpu"):
            assert mark.pop(name) == pytest.approx(found.pop(name), abs=PLACES)
        assert mark == found


def test_the_page_has_the_errors_of_all_engines():
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
    assert "\n".join(made.table()) in page


def test_every_mark_says_what_it_is_of():
    sources = json.loads(
        (Path(__file__).parents[2] / "profiles" / "data" / "evidence.json").read_text()
    )["sources"]
    for mark in marks():
        assert mark.kind in KINDS and mark.source in sources and mark.errors
        llm = load_profile(mark.engine).llm
        assert mark.model_kind == kind_of_model(llm)
        assert mark.unseen_engine.keys() <= mark.errors.keys()


def test_models_are_told_apart_by_what_a_step_reads():
    kinds = {name: kind_of_model(find_model(name)) for name in ("llama-2-7b", "llama-3.1-8b")}
    assert kinds == {"llama-2-7b": "dense MHA", "llama-3.1-8b": "dense GQA"}
    assert kind_of_model(find_model("mixtral-8x7b")) == "MoE"


def test_an_engine_with_marks_enough_is_judged_by_its_own():
    profile = load_profile("llama-2-70b@h100:tp4")
    mine = [m for m in marks() if m.is_of(profile) and m.kind == "decode_large"]
    assert len(mine) >= ENOUGH
    found = expected_errors(profile).decode_large
    assert found.error == max(abs(mark.errors["roofline"]) for mark in mine)
    assert found.known and f"{len(mine)} marks of this engine" in found.source


def test_another_engine_of_that_gpu_is_less_sure_than_those_that_a_fit_has_seen():
    other = expected_errors(load_profile("llama-3.1-8b@h100:tp4"))
    seen = [abs(m.errors["roofline"]) for m in marks() if m.gpu == "h100" and m.kind != "prefill"]
    assert other.decode.known and "marks on h100" in other.decode.source
    assert other.decode.error >= max(seen)


@pytest.mark.parametrize("name", ["llama-2-7b@l20", "llama-13b@v100-16g:tp4"])
def test_a_gpu_whose_constants_are_borrowed_has_the_error_of_borrowed_constants(name):
    found = expected_errors(load_profile(name))
    assert not found.decode.known and found.decode.error == pytest.approx(0.47, abs=0.01)
    assert "not known, taken as 47% (the largest seen" in describe_step_times(
        load_profile(name), "as shipped"
    )


@pytest.mark.parametrize("name", ["mixtral-8x7b@h100:tp2", "qwen3-30b-a3b@h200"])
def test_dense_models_say_nothing_of_mixtures_of_experts(name):
    found = expected_errors(load_profile(name))
    assert not (found.decode.known or found.prefill.known)


def test_one_rank_says_nothing_of_what_many_exchange():
    assert expected_errors(load_profile("llama-3.1-8b@l40s")).decode.known
    assert not expected_errors(load_profile("llama-3.1-70b@l40s:tp8")).decode.known


@pytest.mark.parametrize("form", ["", "/operators"])
def test_long_prompts_on_h100_are_said_to_be_hardly_measured(form):
    found = expected_errors(load_profile(f"llama-3.1-8b@h100{form}")).prefill
    assert found.error > 0.18 and "none above 577 tokens" in found.source


@each("name", NAMES)
def test_every_profile_has_an_error_for_each_kind_of_step_in_one_line(name):
    profile = load_profile(name)
    found = expected_errors(profile)
    for kind in KINDS:
        one = getattr(found, kind)
        assert 0 < one.error < 1 and one.source
    assert found.decode.error in (found.decode_small.error, found.decode_large.error)
    assert "\n" not in describe_step_times(profile, "as shipped")


def test_an_engine_without_marks_is_no_surer_than_those_with_some_on_its_gpu():
    """Of the same form: a further engine is not known better than those that were measured."""
    for name in NAMES:
        profile = load_profile(name)
        form = profile.step_model.form
        if own_errors(profile):
            continue
        for kind in KINDS:
            there = [
                abs(mark.errors[form])
                for mark in marks()
                if mark.gpu == profile.gpu.name and mark.kind == kind and form in mark.errors
                if (mark.model_kind == "MoE") == bool(profile.llm.experts)
            ]
            assert getattr(expected_errors(profile), kind).error >= max(there, default=0), name


def test_a_fit_to_the_engines_own_steps_counts_before_all_marks():
    base = load_profile("llama-3.1-8b@h100")
    fitted = base.with_host_terms(1e-4, 0.0, fit_error=0.017)
    found = expected_errors(fitted)
    assert found.decode.error == 0.017 and "left out" in found.decode.source
    assert found.prefill == expected_errors(base).prefill


def test_what_is_off_on_purpose_says_so():
    profile = load_profile("llama-3.1-8b@h100").scaled(decode=1.1)
    assert expected_errors(profile) == expected_errors(load_profile("llama-3.1-8b@h100"))
    assert "then decode x 1.1" in describe_step_times(profile, "as shipped")


def test_a_model_of_ones_own_on_a_measured_gpu_finds_the_marks_of_that_gpu():
    mine = replace(find_model("llama-3.1-8b"), name="mine", layers=40)
    found = expected_errors(derive_profile(mine, "h100"))
    assert found.decode.known and "marks on h100" in found.decode.source


def test_fit_errors_are_named_as_such_only_where_steps_of_the_engine_gave_them():
    base = load_profile("llama-3.1-8b@h100")
    assert base.fit_error is not None and "error" not in base.describe()
    fitted = base.with_host_terms(1e-4, 0.0, fit_error=0.017)
    assert "fit error 1.7% on steps left out" in fitted.describe()


def test_a_form_that_is_surer_of_an_engine_without_tables_is_named():
    """On the RTX PRO 6000 operators met all marks better; elsewhere neither form is the better one
    of decodes and prompts both."""
    said = choose("llama-3.1-70b@rtxpro6000:tp4").why
    assert "--step-times operators is surer" in said
    roofline = expected_errors(load_profile("llama-3.1-70b@rtxpro6000:tp4"))
    operators = expected_errors(load_profile("llama-3.1-70b@rtxpro6000:tp4"), "operators")
    assert operators.decode.error < roofline.decode.error
    assert operators.prefill.error < roofline.prefill.error
    for name in ("qwen2.5-14b@a100-80g", "qwen3-14b@l40s", "llama-3.1-8b@rtx4090", "qwen3-8b@l20"):
        assert "surer" not in choose(name).why


@each("name", list_profiles())
def test_asking_for_a_profiles_own_form_changes_nothing(name):
    profile = load_profile(name)
    assert expected_errors(profile, profile.step_model.form) == expected_errors(profile)
