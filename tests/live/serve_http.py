"""A real `vllm serve` of the tiny model, as a process of its own, and a few ways to talk to it."""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from twinserve.backends.live.emulate import settings
from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

SCHEDULER = "twinserve.backends.live.serving.scheduler.PolicyScheduler"
MIDDLEWARE = "twinserve.backends.live.serving.attributes.CheckAttributes"
NAME = "tiny"


def write_served_model(folder: Path) -> Path:
    """The tiny model with a tokenizer of words: token 17 is the word w17."""
    tiny_model.write_model(folder)
    tiny_model.write_tokenizer(folder)
    return folder


class Server(ServerProcess):
    """`vllm serve` with `options` for our scheduler (None: vLLM's own). emulated: on an H100 that
    only waits, some 7 ms a step on a busy machine too."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        options: dict | None,
        arguments: Sequence[str] = (),
        emulated: bool = False,
    ) -> None:
        if emulated:
            config = SimulationConfig(profile="llama-3.1-8b@h100", async_scheduling=False)
            gpu = settings.emulated(config, resolve_hardware(config)).model_dump()
            options = {**(options or {}), settings.KEY: gpu}
            arguments = [*arguments, "--worker-cls", settings.WORKER]
            arguments += ["--distributed-executor-backend", settings.EXECUTOR]
        given = ["--load-format", "safetensors", "--dtype", "float32", "--enforce-eager"]
        given += ["--block-size", "32", "--no-async-scheduling", "--generation-config", "vllm"]
        given += ["--middleware", MIDDLEWARE, *arguments]
        if options is not None:
            given += ["--scheduler-cls", SCHEDULER, "--additional-config", json.dumps(options)]
        environment = {**CPU_ENGINE, "OMP_NUM_THREADS": "1"}
        super().__init__(folder, model, given, NAME, environment)

    def complete(
        self,
        prompt: str | list[int],
        timeout_s: float = 300.0,
        name: str = "",
        key: str | None = None,
        **values,
    ) -> tuple[int, dict]:
        """POST /v1/completions; (status, answer). name: see `answered`; key: the client's."""
        body = {
            "model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0.0,
            "ignore_eos": True, **values,
        }  # fmt: skip
        bearer = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(
            f"{self.url}/v1/completions?{name}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **bearer},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answered(self) -> list[str]:
        """Names of the named completions in the order in which the server began to answer. Answers
        that are sent a moment apart may be read in any order."""
        return re.findall(r'"POST /v1/completions\?(\S+) HTTP', self.said())

    def leave_early(self, prompt: list[int], max_tokens: int, after_s: float, **values) -> None:
        """Begin a streamed completion, and hang up."""
        body = json.dumps(
            {
                "model": NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True,
                "ignore_eos": True, **values,
            }
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                "application/json\r\n"
            )
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(after_s)
