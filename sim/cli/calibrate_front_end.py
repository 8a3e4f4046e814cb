"""`twinserve calibrate --front-end`: serve a model over HTTP, and write what lies before it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.profiles.front_end import FrontEnd, bunched, fit_front_end, save_front_end
from twinserve.sim.cli.live import SEEDED
from twinserve.sim.cli.progress import RunProgress

MANY, WIDE = 0.1, 0.5  # shares of bunched answers, and spreads, that are told as a note
MOST_TOKENS = 4096  # of a request, by default
# Of the common words that prompts are made of, and hardly more. Seeded models have one, but vLLM
# refuses a prompt with more characters than the longest tokens could have, and spaces count.
_TOKENS_A_WORD = 1.5
_FEWEST_WORDS = 16


def calibrate_front_end(
    model: str,
    out: Path,
    scratch: Path,
    *,
    name: str | None,
    dtype: str | None,
    max_model_len: int | None,
    threads: int,
    extra: dict,
    quick: bool,
    seed: int,
    progress: RunProgress,
) -> None:
    """Measure, write `out`, and say what was found. Arguments as of `calibrate`; scratch: a folder
    for the server's log."""
    version = installed_vllm()
    import torch

    from twinserve.backends.live.measure.front_end import (
        QUICK,
        WORDS,
        Effort,
        Measured,
        measure_front_end,
    )

    gpu = torch.cuda.is_available()
    effort = QUICK if quick else Effort()
    folder, words = served_model(model, scratch)
    longest = max_model_len or MOST_TOKENS
    progress.begin("calibrate")

    def shown(share: float, text: str) -> None:
        progress.bar.update(progress.bar.task_ids[-1], completed=share, state=text)

    load = os.getloadavg()[0]
    found: Measured = measure_front_end(
        scratch,
        folder,
        _arguments(folder, longest, dtype, gpu, extra),
        lengths=prompt_lengths(int((longest - effort.tokens) / _TOKENS_A_WORD)),
        words=words or WORDS,
        effort=effort,
        seed=seed,
        gpu=gpu,
        threads=threads,
        shown=shown,
    )
    device = torch.cuda.get_device_name() if gpu else "CPU engine"
    source = (
        f"{len(found.exchanges)} requests, one at a time, to vllm serve {version} on this host "
        f"({device}, {os.cpu_count()} cores, load average {load:.1f} before)"
    )
    front_end = fit_front_end(found.exchanges, name or f"{folder.name}@{device}", source)
    save_front_end(front_end, out)
    _tell(front_end, found)
    print(out)


def served_model(model: str, scratch: Path) -> tuple[Path, list[str]]:
    """Return the model's folder with a tokenizer, and the words that the tokenizer knows (none:
    English words). Raises LiveEngineError."""
    if model in SEEDED:
        from twinserve.backends.live.engine.tiny_model import VOCAB, write_model, write_tokenizer

        folder = write_tokenizer(write_model(scratch / model, model))
        return folder, [f"w{i}" for i in range(VOCAB)]
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise LiveEngineError(
            f"--model {model}: no config.json is there; give a model's folder, with its tokenizer"
        )
    return folder, []


def prompt_lengths(room: int) -> list[int]:
    """Return the lengths of prompts in words: powers of four from 16, as many as fit. Raises
    LiveEngineError if only one length fits."""
    lengths, words = [], _FEWEST_WORDS
    while words < room:
        lengths.append(words)
        words *= 4
    if len(lengths) < 2:
        raise LiveEngineError(
            "--max-model-len: there is no room for prompts of several lengths; make it 256 or more"
        )
    return [*lengths, room] if room > 1.5 * lengths[-1] else lengths


def _arguments(folder: Path, longest: int, dtype: str | None, gpu: bool, extra: dict) -> list[str]:
    """Of `vllm serve`."""
    said = ["--max-model-len", str(longest)]
    if not any(folder.glob("*.safetensors")):
        said += ["--load-format", "dummy"]
    if dtype is not None:
        said += ["--dtype", dtype]
    if not gpu:
        said += ["--enforce-eager", "--no-async-scheduling"]
    for name, value in extra.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            said += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            said += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return said


def _tell(front_end: FrontEnd, found) -> None:
    exchanges = found.exchanges
    print(front_end.describe())
    client = np.mean([e.seen_s[0] - e.sent_s for e in exchanges])
    engine = np.mean([e.engine_s[0] - e.queued_s for e in exchanges])
    lines = {
        "the client": client,
        "the engine": engine,
        "vLLM's metric": found.server_ttft_s,
        "queue and prefill": found.engine_ttft_s,
    }
    for who, seconds in lines.items():
        print(f"{who:>18}  {1e3 * seconds:.2f} ms to the first token on average")
    unseen = "off the medians of prompt lengths, each half predicted from the other"
    print(f"{'fit':>18}  {front_end.fit_error:.1%} {unseen}")
    print(f"{'spread':>18}  {front_end.spread:.1%} between the quartiles of requests")
    together = bunched(exchanges)
    if together > MANY:
        print(
            f"note: {together:.0%} of the answers reached the client in one piece, or nearly; "
            "measure again as root, whose client goes before other programs, or on a quiet machine"
        )
    if front_end.spread > WIDE:
        print("note: requests differ much; measure again on a quiet machine")
