"""What `twinserve calibrate` says to wrong input, before any engine starts, and how it chooses its
points."""

import json
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest

from twinserve.backends.live import versions
from twinserve.backends.live.measure.points import ROOM, Limits, choose_points
from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.calibrate import calibrate
from twinserve.sim.results.files import ResultsError
from twinserve.sim.setup.config import SettingsError

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def test_without_vllm_it_says_what_to_install(tmp_path, model, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(LiveEngineError, match="no vLLM is installed") as raised:
        calibrate(model=model, out=tmp_path / "p.json")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"out": "."}, ResultsError, "is a folder; name a file"),
        ({"out": "file/p.json"}, ResultsError, "cannot be written"),
        ({"raw": "file/raw.parquet"}, ResultsError, "raw"),
        ({"model": "nowhere"}, ProfileError, r"config\.json: cannot be read"),
        ({"engine_arg": ["enforce_eager"]}, SettingsError, "write NAME=VALUE"),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_starts(tmp_path, model, given, error, words):
    (tmp_path / "file").write_text("")
    paths = {"model": model, "out": "p.json", **given}
    for name in {"model", "out", "raw"} & paths.keys():
        paths[name] = str(tmp_path / paths[name]) if name == "model" else tmp_path / paths[name]
    with pytest.raises(error, match=words):
        calibrate(**paths)


@pytest.mark.live
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine_arg": ["max_num_seqs=4"]}, "say it with --max-num-seqs"),
        ({"engine_arg": ["gpu-memory-utilisation=0.8"]}, "nearest: gpu_memory_utilization"),
        ({"graphs": True}, "this machine has no GPU; drop --graphs"),
    ],
)
def test_what_vllm_would_not_take(vllm, tmp_path, model, options, words):
    import torch

    if torch.cuda.is_available() and "graphs" in options:
        pytest.skip("this machine has a GPU")
    with pytest.raises(LiveEngineError, match=words):
        calibrate(model=model, out=tmp_path / "p.json", **options)


# -- points ----------------------------------------------------------------------------------------
GPU = Limits(
    max_num_seqs=256,
    max_step_tokens=8192,
    max_model_len=32768,
    pool_tokens=900_000,
    block_tokens=16,
)
CPU = Limits(
    max_num_seqs=64,
    max_step_tokens=2048,
    max_model_len=4096,
    pool_tokens=1_000_000,
    block_tokens=32,
)
TIGHT = Limits(
    max_num_seqs=8, max_step_tokens=256, max_model_len=512, pool_tokens=1600, block_tokens=16
)


@pytest.mark.parametrize("limits", [GPU, CPU, TIGHT], ids=["gpu", "cpu", "tight"])
@pytest.mark.parametrize("quick", [False, True])
def test_every_point_fits_the_engine(limits, quick):
    chosen = choose_points(limits, seed=3, quick=quick)
    assert len(chosen.ladders) >= 2 and max(max(ladder.batches) for ladder in chosen.ladders) >= 4
    for ladder in chosen.ladders:
        assert (
            limits.fits([ladder.context] * max(ladder.batches))
            and max(ladder.batches) <= limits.max_num_seqs
        )
    for point in chosen.points:
        assert len(point.contexts) + len(point.prefills) <= limits.max_num_seqs
        assert len(point.contexts) + sum(new for new, _ in point.prefills) <= limits.max_step_tokens
        held = [*point.contexts, *(new + resident for new, resident in point.prefills)]
        assert limits.fits(held)
        assert all(resident % limits.block_tokens == 0 for _, resident in point.prefills)
    assert {"prefill", "mixed", "check"} <= {point.kind for point in chosen.points}


def test_a_gpu_is_measured_over_the_ranges_that_it_serves():
    chosen = choose_points(GPU)
    grid = {(batch, ladder.context) for ladder in chosen.ladders for batch in ladder.batches}
    assert {(1, 128), (256, 128), (256, 2048), (1, 16384), (32, 16384)} <= grid
    assert (256, 16384) not in grid  # four million tokens
    assert {p.prefills[0][0] for p in chosen.points if p.kind == "prefill"} >= {128, 1024, 8192}
    assert (
        max(resident for p in chosen.points if p.kind == "chunk" for _, resident in p.prefills)
        >= 16384
    )


def test_the_seed_decides_the_random_points():
    assert choose_points(CPU, seed=1) == choose_points(CPU, seed=1) != choose_points(CPU, seed=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 2}, "--max-num-seqs"),
        ({"max_step_tokens": 32}, "--max-step-tokens"),
        ({"max_model_len": ROOM}, "--max-model-len"),
        ({"pool_tokens": 500}, "--num-blocks"),
    ],
)
def test_an_engine_too_small_to_calibrate_is_one_line(change, words):
    from dataclasses import replace

    assert words in replace(CPU, **change).too_small() and not CPU.too_small()


def test_points_of_a_kind_differ():
    for kind in ("mixed", "check"):
        drawn = [p for p in choose_points(GPU).points if p.kind == kind]
        assert len(set(drawn)) == len(drawn) >= 16
        assert np.ptp([len(p.contexts) for p in drawn]) > 50
