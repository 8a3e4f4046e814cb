"""Servers and fronts of the experiments, a process each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from twinserve.sim.setup.config import SettingsError

FRONT = (sys.executable, "-c", "from twinserve.sim.cli.main import main; main()", "route")
WORKER = (sys.executable, "-m", "twinserve.experiments.route.worker")


class Process:
    """A process that says where it listens. Raises SettingsError where it does not."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            self.end()
            raise SettingsError(f"{' '.join(command[1:4])} did not start")
        self.url = line.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Seconds that it has computed."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.end()

    def end(self) -> int:
        """SIGTERM, and SIGKILL after ten seconds. Returns the exit status."""
        self._process.terminate()
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode


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
