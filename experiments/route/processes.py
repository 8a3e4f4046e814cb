"""Servers and fronts of the experiments, a process each."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

from twinserve.sim.setup.config import SettingsError

PORT = "{port}"
TWINSERVE = (sys.executable, "-c", "from twinserve.sim.cli.main import main; main()")
FRONT = (*TWINSERVE, "route", "--port", PORT)
_READY_S = 600.0  # a real server loads its model meanwhile


class Process:
    """A command that serves on a port of its own, with all that it starts. PORT stands for the
    port in `command`. `start` runs the command again, on the same port."""

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._command = [word.replace(PORT, port) for word in command]
        self.start()

    def start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(self._command, start_new_session=True, **quiet)
        except OSError as error:
            said = f"{self._command[0]}: {error.strerror}; name a command"
            raise SettingsError(said) from None

    def wait(self) -> Process:
        """Until it is ready. Raises SettingsError if it ends before, or takes too long."""
        end = time.monotonic() + _READY_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.1)
        self.end()
        raise SettingsError(f"{shlex.join(self._command)[:200]}: not ready in {_READY_S:g} s")

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """SIGTERM, and SIGKILL after ten seconds."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


def page(url: str) -> str:
    """Of a front's /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return answer.read().decode()


def labelled(text: str, name: str) -> dict[str, float]:
    """Samples of one of the front's metrics, by their labels' values; "": without labels."""
    found: dict[str, float] = {}
    for labels, value in re.findall(
        rf"^twinserve_route_{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE
    ):
        found[",".join(re.findall(r'="([^"]*)"', labels))] = float(value)
    return found


def named(servers: Sequence[Process]) -> list[str]:
    """The front's options for these servers."""
    return [word for one in servers for word in ("--worker", one.url)]
