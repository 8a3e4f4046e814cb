"""Measures the front end of `vllm serve` before an emulated GPU. Single streamed requests are timed
by client and engine (stamps.py); for loads, CPU times of threads count."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    RequestFuncOutput,
    async_request_openai_completions,
)

from twinserve.backends.live.emulate.model import write_model
from twinserve.backends.live.emulate.serve import engine_arguments
from twinserve.backends.live.serving.client import ahead_of_others
from twinserve.backends.live.serving.process import CPU_ENGINE, NAME, ServerProcess, put_ahead
from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.measured.front_end import Exchange, Load
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

SCHEDULER = "twinserve.backends.live.measure.stamps.StampingAsyncScheduler"
PROFILE = "llama-3.1-8b@h100"  # its steps are long enough for this host to keep up
# about a token each in any English vocabulary
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
).split()
_STEPS = re.compile(r"^vllm:iteration_tokens_total_count\S* (\S+)$", re.M)


@dataclass(frozen=True)
class Traffic:
    """requests, at most `clients` at once; words of each prompt, tokens of each answer"""

    requests: int
    words: int
    tokens: int
    clients: int
    streamed: bool = True


# each of the columns of the fit has a load in which it is most of the work
LOADS = (
    Traffic(64, 16, 2, 8),
    Traffic(6, 16, 64, 1),
    Traffic(6, 16, 64, 2, streamed=False),
    Traffic(64, 16, 64, 64),
    Traffic(64, 16, 256, 64, streamed=False),
    Traffic(16, 1500, 2, 4),
    Traffic(16, 300, 48, 16),
)
WARM_UP = (Traffic(16, 100, 8, 8), Traffic(16, 100, 8, 8, streamed=False))


SINGLE_TOKENS = 8  # of a single answer


def measure_front_end(
    folder: Path,
    *,
    tokenizer: Path | None,
    max_model_len: int,
    lengths: Sequence[int],
    quick: bool,
    seed: int,
    shown: Callable[[float, str], None],
) -> tuple[list[Load], list[Exchange]]:
    """Serve a model that only waits, and ask it. folder: for the server's files; tokenizer: a
    model's folder, None: one of English; lengths: of single prompts, in words.

    LiveEngineError if the server does not start, or answers otherwise than asked.
    """
    shown(0.0, "starts a server")
    single_rounds, load_rounds = (8, 2) if quick else (20, 4)
    stamps, rng = folder / "stamps.jsonl", np.random.default_rng(seed)
    server = _start(folder, tokenizer, max_model_len, stamps)
    try:
        server.wait(300.0)
        put_ahead(server.process.pid)
        client = _Client(server, seed)
        for traffic in WARM_UP:
            client.ask(traffic)
        warm, singles = sum(traffic.requests for traffic in WARM_UP), []
        loads = []
        with ahead_of_others():
            for number in range(single_rounds):
                shown(0.4 * number / single_rounds, "single requests")
                for length in rng.permutation(lengths).tolist():
                    singles += client.ask(Traffic(1, length, SINGLE_TOKENS, 1))
            for number in range(load_rounds):
                shown(0.4 + 0.6 * number / load_rounds, "loads")
                loads += [client.load(traffic) for traffic in LOADS]
    finally:
        server.stop()
    lines = [json.loads(line) for line in stamps.read_text().splitlines()][warm:]
    exchanges = [_exchange(line, seen) for line, seen in zip(lines, singles, strict=False)]
    return loads, exchanges


def _start(folder: Path, tokenizer: Path | None, longest: int, stamps: Path) -> ServerProcess:
    config = SimulationConfig(profile=PROFILE, max_model_len=longest, prefix_caching=False)
    hardware = resolve_hardware(config)
    llm = hardware.profile.llm
    model = write_model(folder / "model", llm, longest, None if tokenizer is None else llm.vocab)
    further = ["--scheduler-cls", SCHEDULER]
    further += ["--additional-config", json.dumps({"stamps_path": str(stamps)})]
    if tokenizer is not None:
        further += ["--tokenizer", str(tokenizer.resolve())]
    arguments = engine_arguments(config, hardware, None, further)
    return ServerProcess(folder, model, arguments, environment=CPU_ENGINE)


def _exchange(stamped: dict, seen: RequestFuncOutput) -> Exchange:
    """What engine and client saw of one request, both by CLOCK_MONOTONIC (Linux)."""
    sent_s = seen.start_time
    times = sent_s + np.cumsum([seen.ttft, *seen.itl])
    prompt, queued_s, tokens_s = (stamped[k] for k in ("prompt_tokens", "queued_s", "tokens_s"))
    return Exchange(prompt, sent_s, queued_s, tokens_s, times.tolist())


class _Client:
    """The client of `vllm bench serve`, in this thread."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server, self._seed = server, seed
        self._url = f"{server.url}/v1/completions"

    def load(self, traffic: Traffic) -> Load:
        """Send it, and count."""
        prompts = self._prompts(traffic)
        steps, (server_s, others_s) = self._steps(), thread_seconds(self._server.process.pid)
        began_s = time.thread_time()
        answers = asyncio.run(self._all(traffic, prompts))
        client_s = time.thread_time() - began_s
        server_ended_s, others_ended_s = thread_seconds(self._server.process.pid)
        return Load(
            requests=len(answers),
            prompt_tokens=sum(answer.prompt_len for answer in answers),
            steps=self._steps() - steps,
            tokens=sum(answer.output_tokens for answer in answers),
            messages=sum(1 + len(answer.itl) for answer in answers if traffic.streamed),
            server_s=server_ended_s - server_s,
            tokeniser_s=others_ended_s - others_s,
            client_s=client_s if traffic.streamed else float("nan"),
        )

    def ask(self, traffic: Traffic) -> list[RequestFuncOutput]:
        return asyncio.run(self._all(traffic, self._prompts(traffic)))

    def _prompts(self, traffic: Traffic) -> list[str]:
        """The same one each time: prompts of as many words have as many tokens."""
        rng = np.random.default_rng(self._seed)
        return [" ".join(rng.choice(WORDS, traffic.words))] * traffic.requests

    def _steps(self) -> int:
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=30) as page:
            (count,) = _STEPS.findall(page.read().decode())
        return int(float(count))

    async def _all(self, traffic: Traffic, prompts: list[str]) -> list[RequestFuncOutput]:
        gate = asyncio.Semaphore(traffic.clients)
        ask = self._streamed if traffic.streamed else self._whole

        async def one(prompt: str) -> RequestFuncOutput:
            async with gate:
                answer = await ask(session, prompt, traffic.tokens)
            if not answer.success or answer.output_tokens != traffic.tokens:
                raise LiveEngineError(
                    f"the server answered with {answer.output_tokens} tokens of {traffic.tokens}: "
                    f"{answer.error[-300:]}"
                )
            return answer

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*map(one, prompts))

    async def _streamed(self, session, prompt: str, tokens: int) -> RequestFuncOutput:
        given = RequestFuncInput(prompt, self._url, 0, tokens, NAME, ignore_eos=True)
        return await async_request_openai_completions(given, session)

    async def _whole(self, session, prompt: str, tokens: int) -> RequestFuncOutput:
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        async with session.post(self._url, json=body) as answer:
            if answer.status != 200:
                return RequestFuncOutput(error=await answer.text())
            usage = (await answer.json())["usage"]
        return RequestFuncOutput(
            success=True,
            prompt_len=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
        )


def thread_seconds(process: int) -> tuple[float, float]:
    """CPU seconds of its first thread, and of its others without those of ZeroMQ. LiveEngineError
    if the host does not count them."""
    first_s, others_s = 0.0, 0.0
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            name = (thread / "comm").read_text()
            seconds = int((thread / "schedstat").read_text().split()[0]) * 1e-9
            if int(thread.name) == process:
                first_s = seconds
            elif not name.startswith("ZMQ"):
                others_s += seconds
    except OSError as error:
        raise LiveEngineError(
            f"{error.filename}: this host does not count the CPU time of threads; measure on Linux"
        ) from None
    return first_s, others_s
