"""Measures the front end of a `vllm serve` from outside: single streamed requests over HTTP to a
server that does nothing else, each seen by its client and by the engine (stamps.py)."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twinserve.backends.live.serving.client import ahead_of_others
from twinserve.backends.live.serving.process import CPU_ENGINE, NAME, ServerProcess
from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.front_end import Exchange

SCHEDULER = "twinserve.backends.live.measure.stamps.Stamping{}Scheduler"
# Seeded models have words of their own; these are about a token each in any English vocabulary.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
).split()
_METRIC = re.compile(r"^(vllm:\w+_seconds)_(sum|count)(?:\{[^}]*\})? (\S+)$", re.M)
# vLLM's histograms: what the API server counts, and the two parts of what the engine counts
SERVER, ENGINE = "vllm:time_to_first_token_seconds", "vllm:request_{}_time_seconds"


@dataclass(frozen=True)
class Effort:
    """rounds over all lengths, after `warm_up` of them that do not count; tokens of each answer"""

    rounds: int = 30
    warm_up: int = 3
    tokens: int = 16


QUICK = Effort(rounds=8, warm_up=1, tokens=8)


@dataclass(frozen=True)
class Measured:
    """exchanges: in the order in which they were made. server_ttft_s, engine_ttft_s: means of the
    same requests by vLLM's own metrics; NaN where it has none."""

    exchanges: list[Exchange]
    server_ttft_s: float
    engine_ttft_s: float


def measure_front_end(
    folder: Path,
    model: Path,
    arguments: Sequence[str],
    *,
    lengths: Sequence[int],
    words: Sequence[str] = WORDS,
    effort: Effort = Effort(),
    seed: int = 0,
    gpu: bool = False,
    threads: int = 1,
    shown: Callable[[float, str], None] = lambda share, text: None,
) -> Measured:
    """Serve `model`, and ask it for answers to prompts of `lengths` words, one at a time, in an
    order that is drawn anew in each round. folder: for the server's log and stamps.

    LiveEngineError where the server does not start, or answers otherwise than asked.
    """
    stamps = folder / "stamps.jsonl"
    scheduler = ["--scheduler-cls", SCHEDULER.format("Async" if gpu else "")]
    told = ["--additional-config", json.dumps({"stamps_path": str(stamps)})]
    # a prefix found in the cache would be a prompt of another length to the engine
    given = [*arguments, *scheduler, *told, "--no-enable-prefix-caching"]
    environment = {} if gpu else {**CPU_ENGINE, "OMP_NUM_THREADS": str(threads)}
    shown(0.0, "starts a server")
    server = ServerProcess(folder, model, given, environment=environment)
    try:
        server.wait(600.0 if gpu else 180.0)
        client = _Client(server.port)
        rng = np.random.default_rng(seed)
        seen, before = [], {}
        rounds = effort.warm_up + effort.rounds
        with ahead_of_others():
            for number in range(rounds):
                if number == effort.warm_up:
                    before = _metrics(server.url)
                for length in rng.permutation(lengths).tolist():
                    shown(number / rounds, f"prompts of {length} words")
                    seen.append(client.ask(" ".join(rng.choice(words, length)), effort.tokens))
            after = _metrics(server.url)
    finally:
        server.stop()
    lines = [json.loads(line) for line in stamps.read_text().splitlines()]
    if len(lines) != len(seen):
        raise LiveEngineError(f"the engine had {len(lines)} requests, its client sent {len(seen)}")
    exchanges = [
        Exchange(line["prompt_tokens"], sent, line["queued_s"], line["tokens_s"], tokens)
        for line, (sent, tokens) in zip(lines, seen, strict=True)
    ][effort.warm_up * len(lengths) :]
    means = {name: _mean(name, before, after) for name in {n for n, _ in after}}
    parts = [means.get(ENGINE.format(part), np.nan) for part in ("queue", "prefill")]
    return Measured(exchanges, means.get(SERVER, np.nan), sum(parts))


class _Client:
    """One connection, kept open between requests as benchmark clients do."""

    def __init__(self, port: int) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)
        self._line.connect()

    def ask(self, prompt: str, tokens: int) -> tuple[float, list[float]]:
        """When the request was sent (`time.monotonic`), and when each token was seen."""
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        content, seen = json.dumps(body).encode(), []
        sent_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        self._line.request("POST", "/v1/completions", content, headers)
        answer = self._line.getresponse()
        if answer.status != 200:
            raise LiveEngineError(
                f"the server answered {answer.status} to a completion: "
                f"{answer.read()[:300].decode(errors='replace')}"
            )
        while line := answer.readline():
            now = time.monotonic()
            if line.startswith(b"data: {"):
                told = json.loads(line[6:]).get("usage", {}).get("completion_tokens", 0)
                seen += [now] * (told - len(seen))
        if len(seen) != tokens:
            raise LiveEngineError(
                f"the server answered with {len(seen)} tokens of {tokens}; see whether it streams "
                "/v1/completions of this model"
            )
        return sent_s, seen


def _metrics(url: str) -> dict[tuple[str, str], float]:
    """(histogram, sum or count) -> value, of all of vLLM's in seconds."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        found = _METRIC.findall(page.read().decode())
    return {(name, part): float(value) for name, part, value in found}


def _mean(name: str, before: dict, after: dict) -> float:
    total, count = (after[name, p] - before.get((name, p), 0.0) for p in ("sum", "count"))
    return total / count if count else float("nan")
