"""Specs, profile names and profile files: facts, round trips, and one clear line for everything
that is wrong."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parameters import each
from tests.profiles import configs
from twinserve.profiles.catalog import GPUS, find_gpu, find_model
from twinserve.profiles.composition import decode_work
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.forms.echo import EchoModel
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.models.config import read_config
from twinserve.profiles.names import list_profiles
from twinserve.profiles.operators import shipped as shipped_operators
from twinserve.profiles.profile import Profile, derive_profile, load_profile, save_profile
from twinserve.profiles.shipped import REPLACED, SHIPPED, shipped_profile, write_shipped
from twinserve.profiles.specs import ProfileError


def test_kv_bytes():
    """Published ones: test_catalogue.py. DeepSeek-V3's are what every rank holds."""
    latent = find_model("deepseek-v3")
    assert latent.rank_kv_bytes_per_token(8) == latent.kv_bytes_per_token
    spec = find_model("llama-3.1-70b")
    assert spec.rank_kv_bytes_per_token(4) * 4 == spec.kv_bytes_per_token
    # 16 ranks hold 8 KV heads twice
    assert spec.rank_kv_bytes_per_token(16) * 16 == 2 * spec.kv_bytes_per_token


CATALOGUED = ("qwen2.5-14b", "qwen3-14b", "opt-13b", "mixtral-8x7b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", CATALOGUED)
def test_a_config_json_gives_the_catalogued_spec(name):
    file = Path(configs.__file__).with_name(f"{name}.json")
    assert read_config(file, name) == find_model(name)


def test_shipped_roofline_files_are_what_the_code_computes(tmp_path):
    keys = [key for key in SHIPPED if key not in REPLACED]
    for key in keys:
        computed = shipped_profile(*key)
        assert computed.name in list_profiles()
        assert load_profile(computed.name) == computed
    paths = write_shipped(tmp_path)
    assert len(paths) == len(keys) and load_profile(paths[0]) == shipped_profile(*keys[0])


def test_every_name_has_one_file():
    rooflines = [shipped_profile(*key).name for key in SHIPPED if key not in REPLACED]
    assert sorted(rooflines + shipped_operators.names()) == list_profiles()
    for key in SHIPPED:  # what was a name once stays one
        assert shipped_profile(*key).name in list_profiles()
    assert {load_profile(name).step_model.form for name in shipped_operators.names()} == {
        "operators"
    }


@each("name", list_profiles())
def test_every_shipped_profile_is_whole(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.max_model_len <= profile.kv_capacity_tokens
    assert profile.max_model_len <= profile.llm.max_positions
    assert profile.block_tokens == 16 and profile.host_swap_bytes > profile.block_bytes
    seconds = profile.model().step_seconds(decode_work(8, 500))
    assert 0.001 < seconds < 0.2
    assert "\n" not in profile.describe() and name in profile.describe()
    weights = profile.llm.weight_bytes / (2 if name.endswith("/ep2") else profile.tp)
    pool = profile.num_gpu_blocks * profile.block_bytes / profile.tp
    assert weights + pool < profile.gpu.memory_bytes


def test_names():
    assert load_profile("Llama-3.1-8B@A100").name == "llama-3.1-8b@a100-80g"
    assert load_profile("llama-3.1-8b@h100:tp1").name == "llama-3.1-8b@h100"
    assert load_profile("llama-3.1-8b@a100-40g-pcie").gpu.nvlink_bytes_per_s is None
    assert load_profile("qwen3-8b@l40s:tp2").tp == 2  # not shipped: derived
    assert "qwen3-8b@l40s:tp2" not in list_profiles()
    assert load_profile("Llama-3.1-8B@H100/operators").step_model.form == "operators"
    assert load_profile("llama-3.1-8b@h100").step_model.form == "roofline"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_any_degree_can_be_derived(tp):
    profile = derive_profile("llama-3.1-8b", "h200", tp)
    assert profile.kv_bytes_per_token == 131072
    assert profile.pcie_bytes_per_s == pytest.approx(tp * 51.2e9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3.1-8b@h10", "unknown GPU 'h10'; nearest: h100"),
        ("lama-3.1-8b@h100", "unknown model 'lama-3.1-8b'; nearest: llama-3.1-8b"),
        ("llama-3.1-8b-h100", "nearest: llama-3.1-8b@h100"),
        ("llama-3.1-8b@h100:2", "MODEL@GPU:tpN"),
        ("llama-3.1-8b@h100:tp0", "MODEL@GPU:tpN"),
        ("llama-3.1-70b@h100", "use tp=2"),
        ("llama-2-70b@v100-16g", "no tp up to 8"),
        ("llama-3.1-8b@h100:tp3", "tp=3"),
        (
            "qwen3-8b@l40s/operators",
            "no shipped profile 'qwen3-8b@l40s/operators'; nearest: llama-3.1-8b@l40s/operators",
        ),
        ("nowhere/profile.json", "nowhere/profile.json: cannot be read"),
    ],
)
def test_a_wrong_name_is_one_clear_line(name, words):
    with pytest.raises(ProfileError) as raised:
        load_profile(name)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_impossible_settings_are_refused():
    with pytest.raises(ProfileError, match="exceeds"):
        derive_profile("llama-3.1-8b", "rtx4090", max_model_len=131072)
    with pytest.raises(ProfileError, match="max_num_seqs"):
        derive_profile("llama-3.1-8b", "h100", max_num_seqs=0)


@cache
def _forms() -> dict:
    truth = load_profile("llama-3.1-8b@h100").model()
    works = [decode_work(n, c) for n in (1, 4, 32, 128) for c in (16, 512, 2048)]
    return {
        "roofline": load_profile("llama-3.1-8b@h100").step_model,
        "bros": BrosLinearModel.fit(truth),
        "echo": EchoModel.fit(truth),
        "table": TableModel.fit(works, [truth.step_seconds(w) for w in works]),
        "operators": load_profile("llama-3.1-8b@l40s/operators").step_model,
    }


@pytest.mark.parametrize("form", ["roofline", "bros", "echo", "table", "operators"])
def test_a_saved_profile_loads_as_it_was(tmp_path, form):
    profile = load_profile("llama-3.1-8b@h100").model_copy(
        update={"step_model": _forms()[form], "name": "mine", "source": "measured"}
    )
    path = tmp_path / "deep" / "mine.json"
    save_profile(profile, path)
    again = load_profile(path)
    assert again == profile and again == load_profile(str(path))
    assert json.loads(path.read_text())["step_model"]["form"] == form
    ours, theirs = (p.model().decode_run_seconds(7, 5000, 900, 9) for p in (profile, again))
    assert ours.tobytes() == theirs.tobytes() and np.all(ours > 0)
    assert os.listdir(path.parent) == ["mine.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    profile = load_profile("llama-3.1-8b@h100")
    save_profile(profile, path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_profile(profile.model_copy(update={"name": "other"}), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["p.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("num_gpu_blocks"), "num_gpu_blocks: Field required"),
        (lambda d: d.update(num_gpu_blocks=0), "num_gpu_blocks"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(spare=1), "spare"),
        (lambda d: d.update(source="guessed"), "source"),
        (lambda d: d["gpu"].update(peak_flops=-1), "gpu.peak_flops"),
        (lambda d: d["llm"].update(kv_heads=5), "multiple"),
        (lambda d: d["step_model"].update(form="magic"), "step_model"),
        (lambda d: d["step_model"]["efficiency"].update(gemm_mfu=7), "gemm_mfu"),
        (lambda d: d["step_model"]["efficiency"].update(gemm_mfu=float("nan")), "gemm_mfu"),
        (lambda d: d.update(tp=3), "tp=3"),
    ],
)
def test_a_bad_file_is_one_line_with_file_and_field(tmp_path, change, words):
    data = load_profile("llama-3.1-8b@h100").model_dump(mode="json")
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as raised:
        load_profile(path)
    message = str(raised.value)
    assert message.startswith(str(path)) and words in message and "\n" not in message


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "list")])
def test_a_file_that_is_no_profile(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=words):
        load_profile(path)


def test_gpu_facts():
    assert find_gpu("h200").memory_bytes_per_s == 4.8e12
    assert find_gpu("a100-40g").link_bytes_per_s == 300e9
    assert find_gpu("l40s").link_bytes_per_s == 32e9
    assert {gpu.name for gpu in GPUS.values()} == set(GPUS)
    assert isinstance(load_profile("llama-3.1-8b@h100"), Profile)
