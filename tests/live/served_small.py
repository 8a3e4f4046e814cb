"""`vllm serve` of the model `small` on the CPU, and vLLM's own benchmark client in this process:
its imports take longer than a short load."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.served import of_run

NAME = "small"
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
# what no profile says of a CPU engine; its KV memory holds more than 16 of the longest requests
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]
METRICS = ("ttft", "tpot", "e2el")


def write_small(folder: Path) -> Path:
    """The model with its tokenizer, in a folder of its name."""
    model = folder / NAME
    tiny_model.write_model(model, name=NAME)
    tiny_model.write_tokenizer(model)
    return model


def start(folder: Path, model: Path, arguments: list[str]) -> ServerProcess:
    given = [*ON_A_CPU, "--no-enable-prefix-caching", *arguments]
    environment = {**CPU_ENGINE, "OMP_NUM_THREADS": "1"}
    return ServerProcess(folder, model, given, NAME, environment)


def engine_arguments() -> list[str]:
    """Of a server with the limits of `ENGINE`."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in ENGINE.items()]
    return [*(word for pair in pairs for word in pair), "--block-size", "32"]


def bench(server: ServerProcess, out: Path, load: dict, seed: int, *further: str) -> Path:
    """`vllm bench serve` with the flags of `load`; its result file, with details."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    words = ["--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"]
    words += ["--model", NAME, "--tokenizer", str(server.model), "--ignore-eos", "--disable-tqdm"]
    words += ["--seed", str(seed), "--save-result", "--save-detailed"]
    words += ["--result-dir", str(out.parent), "--result-filename", out.name, *further]
    for name, value in load.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    serve.main(parser.parse_args(words))
    return out


def predicted(profile: Path, load: dict, seed: int) -> np.ndarray:
    """float64[3]: mean TTFT, TPOT and E2E latency, seconds, of the load as stated, on a calibrated
    profile and the front end beside it."""
    front = profile.with_suffix(".front_end.json")
    config = SimulationConfig(
        profile=str(profile),
        front_end=str(front) if front.exists() else "none",
        trace="vllm:" + ",".join(f"{name}={value}" for name, value in load.items()),
        seed=seed,
        slo="none",
        host_time="none",
        block_tokens=32,
        **ENGINE,
    )
    inputs = resolve(config)
    return _means(of_run("predicted", run_policy(inputs, inputs.policies[0])))


def _means(served) -> np.ndarray:
    return np.array([np.nanmean(served.latencies[name]) for name in METRICS])
