"""A `vllm serve` as a process of its own, on a free port of this host."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from twinserve.backends.live.versions import LiveEngineError

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
NAME = "served"
CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # the engine's process need not import everything again
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
}
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_TOLD = 1000  # characters of a server's log that an error shows


def named_vllm(folder: Path) -> Path:
    """A folder that names this vLLM for its command: the CPU build has another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu").partition("+")[0]
        info = folder / f"vllm-{found}+cpu.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")
    return folder


def end_with_parent(sign: signal.Signals) -> None:
    """Have the kernel send `sign` to this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, sign)


def put_ahead(process: int) -> bool:
    """Run a process and its children, with all their threads, before the ordinary programs of the
    host, as on an idle machine. Returns False if the host forbids that (it takes Linux, and root or
    CAP_SYS_NICE)."""
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
                if not all([put_ahead(int(child)) for child in children.split()]):
                    return False
    except (AttributeError, OSError):
        return False
    return True


class ServerProcess:
    """`vllm serve MODEL --host .. --port .. ARGUMENTS`, with its log in `folder`.

    name         of the model in requests
    environment  variables besides those of this process
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        arguments: Sequence[str],
        name: str = NAME,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", name]
        paths = [str(named_vllm(folder / "named")), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        self.model, self.name = model, name
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*VLLM, "serve", str(model), *where, *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 180.0) -> None:
        """Until it answers. LiveEngineError if it ends, or takes longer."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise LiveEngineError(
                    f"vllm serve ended with {self.process.returncode}:\n{self.said()[-_TOLD:]}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        raise LiveEngineError(
            f"vllm serve did not come up in {timeout_s:g} s:\n{self.said()[-_TOLD:]}"
        )

    def called(self, method: str, timeout_s: float = 60.0) -> dict:
        """Return what `method` of the worker answers, of a server with VLLM_SERVER_DEV_MODE=1.
        LiveEngineError if the server does not."""
        asked = urllib.request.Request(
            f"{self.url}/collective_rpc",
            json.dumps({"method": method}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
                return json.load(answer)["results"][0]
        except OSError as error:
            raise LiveEngineError(f"vllm serve does not answer {method}: {error}") from error

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the server as an operator would; its children too if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
