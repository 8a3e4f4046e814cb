"""What `plan --emit` writes starts what was recommended: read back, it is the same simulation."""

import json

import pytest
import yaml

from tests.commands import refused, status
from tests.sim.planned import write_trace
from twinserve.profiles.gpu_labels import gpu_of_label
from twinserve.sim.cli.main import main
from twinserve.sim.plan.candidates import candidates
from twinserve.sim.plan.start import FILES, LABELS, emitted, serve_arguments
from twinserve.sim.serve_line.settings import from_vllm
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

SETTINGS = [
    {},
    {"max_num_seqs": 48, "max_num_batched_tokens": 3072, "gpu_memory_utilization": 0.85},
    {"kv_cache_dtype": "fp8", "enforce_eager": True, "async_scheduling": False},
    {"engine_version": "0.19", "max_model_len": 20_000},
]


def candidate(gpu: str, tp: int, **settings):
    base = SimulationConfig(**settings)
    (one,), _ = candidates(base, "qwen3-8b", [gpu], [tp], ["least-requests"], {}, 4000)
    return one


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_written_reads_back_as_the_same_simulation(tmp_path, kind, settings):
    one = candidate("h100", 2, **settings)
    words = serve_arguments(one, 0, (1.0, None), 4000)
    file = tmp_path / FILES[kind]
    file.write_text(emitted(kind, one, 3, words))
    said = from_vllm(str(file), {} if kind in ("kubernetes", "llm-d") else {"gpu": "h100"})
    eager = "--enforce-eager is not simulated"  # its step times
    assert [w for w in said.warnings if eager not in w] == []
    asked = {"engine_version": settings.get("engine_version")} if kind == "vllm" else {}
    found = SimulationConfig(from_vllm=str(file), gpu="h100", **asked)
    assert found.replicas == (1 if kind == "vllm" else 3)
    assert found.profile == one.config.profile and found.policy == ("vllm",)
    assert found.async_scheduling == one.config.async_scheduling
    back = resolve_hardware(found)
    assert back.kv_tokens == one.hardware.kv_tokens
    theirs, ours = back.limits, one.hardware.limits
    assert (theirs.max_num_seqs, theirs.max_num_batched_tokens) == (
        ours.max_num_seqs,
        ours.max_num_batched_tokens,
    )
    assert back.profile.gpu_memory_utilization == one.hardware.profile.gpu_memory_utilization


@pytest.mark.parametrize(("gpu", "tp"), [("h100", 2), ("mi300x", 1)])
def test_manifests_are_of_the_schemas_of_kubernetes(gpu, tp):
    """With fields that a schema does not have refused."""
    schemas = pytest.importorskip("kubernetes_validate")
    one = candidate(gpu, tp)
    text = emitted("kubernetes", one, 3, serve_arguments(one, 0, (1.0, None), 4000))
    kinds = []
    for document in yaml.safe_load_all(text):
        for release in ("1.31", "1.34"):
            schemas.validate(document, release, strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Deployment", "Service"]
    with pytest.raises(schemas.ValidationError):
        schemas.validate({**document, "specs": {}}, "1.31", strict=True)


def test_labels_are_those_that_are_read():
    assert {gpu_of_label(label) for label in LABELS.values()} == set(LABELS)


@pytest.mark.slow
def test_the_command_writes_it_beside_the_plan(tmp_path, capsys):
    trace = write_trace(tmp_path / "t.csv", rate=60.0)
    words = ["plan", "--model", "qwen3-8b", "-t", trace, "--slo", "ttft p90 < 2 s"]
    words += ["--gpus", "h100", "--tp", "1", "--workers", "1", "-q", "--emit", "kubernetes"]
    assert "--out" in refused(capsys, main, words)
    assert not status(main, [*words, "--out", tmp_path / "p"]), capsys.readouterr().err
    best = json.loads((tmp_path / "p" / "plan.json").read_text())["rows"][0]
    found = SimulationConfig(from_vllm=str(tmp_path / "p" / "kubernetes.yaml"))
    assert found.replicas == best["replicas"] and found.profile == "qwen3-8b@h100"
