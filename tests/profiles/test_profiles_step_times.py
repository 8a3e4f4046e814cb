"""`--step-times`: what it gives, what stays as it was, and what is refused."""

from __future__ import annotations

import pytest

from twinserve.profiles import step_times
from twinserve.profiles.profile import derive_profile, list_profiles, load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import choose

BOTH = "llama-3.1-8b@h100"  # shipped in both forms


@pytest.mark.parametrize("name", [*list_profiles(), "qwen3-8b@l40s:tp2"])
def test_auto_is_what_the_name_gives(name):
    chosen = choose(name)
    assert chosen.profile == load_profile(name) and chosen.why


def test_each_form_can_be_asked_for_and_nothing_but_step_times_changes():
    plain = load_profile(BOTH)
    for wanted, same_as in (("roofline", BOTH), ("operators", f"{BOTH}/operators")):
        found = choose(BOTH, wanted).profile
        assert found.step_model == load_profile(same_as).step_model
        assert found.fit_error == load_profile(same_as).fit_error
        for field in ("name", "num_gpu_blocks", "max_num_seqs", "pcie_bytes_per_s"):
            assert getattr(found, field) == getattr(plain, field)


def test_kv_room_and_limits_that_were_measured_stay():
    plain = load_profile("llama-3.1-8b@rtx4090")
    found = choose("llama-3.1-8b@rtx4090", "roofline").profile
    assert found.step_model.form == "roofline" != plain.step_model.form
    assert found.num_gpu_blocks == plain.num_gpu_blocks == 2588
    assert found.engine_version == "0.19.0" and found.num_gpu_blocks_source == "measured"


def test_a_form_that_is_there_already_is_taken_as_it_is():
    name = "qwen3-30b-a3b@rtxpro6000/ep2"
    assert choose(name, "operators").profile == load_profile(name)
    assert choose("qwen3-8b@l40s:tp2", "roofline").profile == derive_profile("qwen3-8b", "l40s", 2)


def test_what_is_off_on_purpose_stays_off(tmp_path):
    file = tmp_path / "off.json"
    save_profile(load_profile(BOTH).scaled(decode=1.3), file)
    found = choose(str(file), "operators").profile
    assert found.step_scale == load_profile(file).step_scale
    assert found.step_model.form == "operators"


def test_measured_steps_are_taken_from_a_file_that_has_them(tmp_path):
    file = tmp_path / "mine.json"
    save_profile(load_profile(BOTH).with_host_terms(1e-4, 0.0, 0.02), file)
    assert choose(str(file), "measured").profile == load_profile(file)
    assert choose(str(file)).why == "as the file has them"


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        (BOTH, "measured", "twinserve calibrate"),
        ("qwen3-8b@rtx4090", "operators", "choose --step-times roofline, or a GPU of"),
        ("qwen3-30b-a3b@h100", "roofline", "mixture of experts"),
        (f"{BOTH}/operators", "roofline", "drop /operators or --step-times"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line_that_says_what_to_do(name, wanted, said):
    with pytest.raises(ProfileError, match=said) as refused:
        choose(name, wanted)
    assert "\n" not in str(refused.value)


def test_tables_that_are_not_shipped_need_the_extra(monkeypatch):
    monkeypatch.setattr(step_times, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match=r"pip install 'twinserve\[profiles\]'"):
        choose("llama-3.1-8b@h100:tp4", "operators")


def test_the_reason_compares_both_forms_where_the_engine_has_marks():
    assert choose(BOTH).why == "nearer to its decode marks than operators, 0.8% against 1.9%"
    assert choose("qwen3-14b@h100").why.startswith("nearer to its decode marks than roofline")
    farther = "as shipped, though roofline is nearer to its marks, 3.3% against 3.5%"
    assert choose("llama-3.1-8b@a100-80g").why == farther
    assert choose("llama-3.1-70b@h100:tp4").why == "as shipped"
    assert choose("llama-2-7b@h100").why == "as no tables of it are shipped"
    assert choose("llama-3.1-70b@h100:tp4/operators").why == "as named"
