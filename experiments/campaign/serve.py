"""Stage `serve` of a campaign: `vllm serve` at its defaults (asynchronous scheduling, an API server
that tokenises and streams) under vLLM's own client: what a user measures, and strangers publish."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from twinserve.experiments.campaign.setup import (
    FIRST_START_S,
    MODEL_SIZES,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    mode_name,
    model_folder,
)
from twinserve.traces.write import write_atomically

SERVE = "serve"
_START_S = FIRST_START_S[True]
_STOP_S = 10.0


@dataclass(frozen=True)
class Load:
    """What one run of `vllm bench serve` offers.

    requests, prompt, output  of the dataset `random`; tokens
    rate                      requests/s, Poisson; inf: all at once
    concurrency               requests under way at most (None: any)
    """

    requests: int
    prompt: int
    output: int
    rate: float = math.inf
    concurrency: int | None = None

    @property
    def name(self) -> str:
        how = f"{self.rate:g}-a-second" if self.rate < math.inf else "at-once"
        how = how if self.concurrency is None else f"{self.concurrency}-clients"
        return f"{self.prompt}-{self.output}-{how}"

    def words(self, seed: int) -> list[str]:
        found = ["--num-prompts", self.requests, "--request-rate", self.rate, "--seed", seed]
        found += ["--random-input-len", self.prompt, "--random-output-len", self.output]
        if self.concurrency is not None:
            found += ["--max-concurrency", self.concurrency]
        return [str(word) for word in found]


def loads_of(key: str) -> tuple[Load, ...]:
    """In order of worth: hardly loaded, half, nearly full, closed loops, and a burst."""
    if MODEL_SIZES[key].quick:
        return (Load(6, 40, 6, rate=20.0), Load(6, 40, 6))
    return (
        Load(30, 512, 128, rate=3.0),
        Load(180, 512, 128, rate=14.0),
        Load(256, 512, 128),
        Load(192, 512, 128, concurrency=32),
        Load(10, 512, 128, concurrency=1),
        Load(300, 512, 128, rate=24.0),
        Load(40, 4096, 64, rate=2.5),
        Load(384, 512, 128, concurrency=128),
    )


def measure_server(
    store: Store,
    engines: Engines,
    key: str,
    graphs: bool,
    deadline: Deadline,
    tokenizer: Path | None = None,
    seed: int = 0,
    **extra,
) -> None:
    """One server, then each load that is not there yet: `serve/MODE/LOAD.json`, as vLLM's client
    writes it, and `server.json`. tokenizer: a folder with tokenizer.json (None: one of words).
    extra: engine arguments. Raises StageError where nothing was measured."""
    folder = store.path(SERVE, mode_name(key, graphs), "server.json").parent
    missing = [load for load in loads_of(key) if not (folder / f"{load.name}.json").exists()]
    if not missing:
        store.say("serve: measured already")
        return
    if deadline.left < _START_S * bool(MODEL_SIZES[key].config):
        raise OutOfTime(f"{deadline.left:.0f} s are left, and a server takes {_START_S:.0f} s")
    engines.close()
    from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
    from twinserve.backends.live.versions import installed_vllm

    model = _with_tokenizer(store, key, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.monotonic()
        on_cpu = CPU_ENGINE if MODEL_SIZES[key].config is None else None
        arguments = _arguments(key, graphs, extra)
        server = ServerProcess(Path(scratch), model, arguments, "model", on_cpu)
        try:
            client = _Client(server.url, model)  # its imports take seconds, as the server's start
            server.wait(max(deadline.left, 1.0))
            start_s = time.monotonic() - begun
            store.say(f"serve: up after {start_s:.0f} s")
            with contextlib.suppress(OutOfTime):
                for number, load in enumerate(loads_of(key)):
                    # a seed of its own: prompts of another load would be in the prefix cache
                    if load in missing:
                        _measure(store, client, load, folder, deadline, seed + number)
        finally:
            server.stop(_STOP_S)
            shutil.copy(server.log, folder / "server.log")
    facts = {"vllm": installed_vllm(), "arguments": arguments, "start_s": start_s}
    store.write({**facts, "tokenizer": tokenizer is not None}, SERVE, folder.name, "server.json")
    store.saved(SERVE)
    if not any(folder.glob("*-*.json")):
        raise StageError("no load was measured in the time that the server's start left")


def _measure(
    store: Store, client: _Client, load: Load, folder: Path, deadline: Deadline, seed: int
) -> None:
    """A load is not begun where the time left is no longer than its arrivals and a few seconds."""
    offered_s = load.requests / load.rate if load.rate < math.inf else 0.0
    if deadline.left < offered_s + 8.0:
        raise OutOfTime
    found = client.run([*load.words(seed), "--num-warmups", "2"], folder, f"{load.name}.json")
    store.saved(SERVE)
    store.say(
        f"serve, {load.name}: {found['completed']} of {load.requests} in {found['duration']:.1f} s,"
        f" TTFT {found['mean_ttft_ms']:.1f} ms, TPOT {found['mean_tpot_ms']:.2f} ms"
    )


class _Client:
    """`vllm bench serve` in this process: a second one would import vLLM again for each load."""

    def __init__(self, url: str, model: Path) -> None:
        from vllm.benchmarks import serve

        self._serve = serve
        self._parser = argparse.ArgumentParser()
        serve.add_cli_args(self._parser)
        self._words = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
        self._words += ["--model", "model", "--tokenizer", str(model), "--dataset-name", "random"]
        self._words += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]

    def run(self, words: list[str], folder: Path, name: str) -> dict:
        with tempfile.TemporaryDirectory() as scratch:
            where = ["--result-dir", scratch, "--result-filename", name]
            self._serve.main(self._parser.parse_args([*self._words, *words, *where]))
            found = json.loads((Path(scratch) / name).read_text())
        found.pop("generated_texts", None)  # of random weights: megabytes of nothing
        write_atomically(folder / name, json.dumps(found).encode())
        return found


def _with_tokenizer(store: Store, key: str, tokenizer: Path | None) -> Path:
    """The model's folder, with a tokenizer in it."""
    from twinserve.backends.live.engine.tiny_model import write_tokenizer

    model = model_folder(store, key)
    if tokenizer is None:
        return write_tokenizer(model, json.loads((model / "config.json").read_text())["vocab_size"])
    for file in tokenizer.iterdir():
        shutil.copy(file, model)
    return model


def _arguments(key: str, graphs: bool, extra: dict) -> list[str]:
    """Of `vllm serve`. What it chooses itself (steps, seats, asynchronous scheduling) is left to
    it."""
    size = MODEL_SIZES[key]
    found = ["--dtype", size.dtype, "--max-model-len", str(size.max_model_len)]
    found += ["--load-format", "dummy" if size.config else "safetensors"]
    found += ["--generation-config", "vllm"]
    if not graphs:
        found.append("--enforce-eager")
    for name, value in extra.items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return found
