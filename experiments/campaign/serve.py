"""Stage `serve` of a campaign: `vllm serve` at its defaults (asynchronous scheduling, an API server
that tokenises and streams) under vLLM's own client: what a user measures, and strangers publish."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import time
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


def load(requests: int, prompt: int, output: int, rate: float = math.inf, clients: int = 0) -> dict:
    """Flags of `vllm bench serve`: requests of so many tokens, at `rate` a second (inf: at once),
    at most `clients` under way (0: any)."""
    found = {"num_prompts": requests, "random_input_len": prompt, "random_output_len": output}
    found |= {"request_rate": rate} | ({"max_concurrency": clients} if clients else {})
    return found


def loads_of(key: str) -> dict[str, dict]:
    """By name, in order of worth: hardly loaded, half, nearly full, closed loops, and a burst."""
    if MODEL_SIZES[key].quick:
        return {"40-6-20-a-second": load(6, 40, 6, rate=20.0), "40-6-at-once": load(6, 40, 6)}
    return {
        "512-128-3-a-second": load(30, 512, 128, rate=3.0),
        "512-128-14-a-second": load(180, 512, 128, rate=14.0),
        "512-128-at-once": load(256, 512, 128),
        "512-128-32-clients": load(192, 512, 128, clients=32),
        "512-128-1-clients": load(10, 512, 128, clients=1),
        "512-128-24-a-second": load(300, 512, 128, rate=24.0),
        "4096-64-2.5-a-second": load(40, 4096, 64, rate=2.5),
        "512-128-128-clients": load(384, 512, 128, clients=128),
    }


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
    missing = [name for name in loads_of(key) if not (folder / f"{name}.json").exists()]
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
        server = ServerProcess(Path(scratch), model, arguments, environment=on_cpu)
        try:
            import vllm.benchmarks.serve  # noqa: F401 - takes seconds, as the server's start

            server.wait(max(deadline.left, 1.0))
            start_s = time.monotonic() - begun
            store.say(f"serve: up after {start_s:.0f} s")
            with contextlib.suppress(OutOfTime):
                for number, name in enumerate(loads_of(key)):
                    # a seed of its own: prompts of another load would be in the prefix cache
                    if name in missing:
                        target = folder / f"{name}.json"
                        _measure(
                            store, server, loads_of(key)[name], target, deadline, seed + number
                        )
        finally:
            server.stop(_STOP_S)
            shutil.copy(server.log, folder / "server.log")
    facts = {"vllm": installed_vllm(), "arguments": arguments, "start_s": start_s}
    store.write({**facts, "tokenizer": tokenizer is not None}, SERVE, folder.name, "server.json")
    if not any(folder.glob("*-*.json")):
        raise StageError("no load was measured in the time that the server's start left")


def _measure(
    store: Store, server, flags: dict, target: Path, deadline: Deadline, seed: int
) -> None:
    """A load is not begun where the time left is no longer than its arrivals and a few seconds."""
    from twinserve.backends.live.serving.client import bench

    if deadline.left < flags["num_prompts"] / flags["request_rate"] + 8.0:
        raise OutOfTime
    with tempfile.TemporaryDirectory() as scratch:
        flags = {"dataset_name": "random", "num_warmups": 2, **flags}
        found = json.loads(bench(server, Path(scratch) / target.name, flags, seed).read_text())
    found.pop("generated_texts", None)  # of random weights: megabytes of nothing
    write_atomically(target, json.dumps(found).encode())
    store.saved(SERVE)
    store.say(
        f"serve, {target.stem}: {found['completed']} of {flags['num_prompts']} in "
        f"{found['duration']:.1f} s, TTFT {found['mean_ttft_ms']:.1f} ms, "
        f"TPOT {found['mean_tpot_ms']:.2f} ms"
    )


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
