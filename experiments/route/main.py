"""The same requests before real servers and in the simulator, with one failure injected in both:
`twinserve study route`.

Servers stand behind `twinserve route`; the simulated fleet has the same router. The live run is
repeated, to compare the difference of the two with that between live runs. docs/routers.md has the
results.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.backends.live.route.settings import model_of, require_libraries
from twinserve.experiments.benchmark.main import MACHINE
from twinserve.experiments.study.grid import repeats
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.routing import read_routing
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.reroute import reroute
from twinserve.sim.twin.served import of_run

# -- servers and fronts of the experiments, a process each -----------------------------------------
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


_COUNTS = ("failed", "moved", "sent")  # metrics that are numbers of requests
SIMULATED = "simulated"


# prompts begin with one of twelve texts, so that a pick decides what is found in a cache
LOAD = {"trace": "stages:4x40,lengths=sharegpt,system=512x12", "cap_length": 800}


def twin(
    repeats: int,
    profile: str = "llama-3.1-70b@h100:tp4",
    front_end: str = "vllm",
    workers: int = 2,
    router: str = "sglang",
    kill_at_s: float = 20.0,
    down_s: float = 4.0,
    **settings: Any,
) -> list[dict[str, Any]]:
    """A row of metrics for each live run behind `twinserve route`, and one of the simulation.
    Servers are those of `twinserve emulate`: vLLM whose steps take the profile's times. They, the
    front and the clients go before other programs, if the host allows it.

    kill_at_s when the last server is killed with SIGKILL, and down_s: seconds after which its
              command is started again. When it is up is measured
    settings  of `simulate`, instead of `LOAD`
    """
    require_libraries()
    server = [*TWINSERVE, "emulate", "--profile", profile, "--port", PORT]
    server += ["--", "--enable-prompt-tokens-details"]
    settings = LOAD | {"profile": profile} | settings
    inputs = resolve(SimulationConfig(**settings))
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [Process(server) for _ in range(workers)]
        for one in servers:
            stack.callback(one.kill)
        live = _Live([one.wait() for one in servers], router, inputs, kill_at_s, down_s)
        for repeat in range(repeats):
            record = folder / f"{repeat}.jsonl.gz"
            found = live.run(settings.get("seed", 0) * 1000 + repeat, record)
            rows.append({"run": f"live {repeat + 1}", **found, **_rerouted(record)})
    up_s = float(np.mean([row["up again, s"] for row in rows]))
    schedule = [{"replica": workers - 1, "at_s": kill_at_s, "until_s": up_s}]
    failure = {"failures": json.dumps(schedule), "on_failure": "migrate", "start_up": 0.0}
    fleet = {"replicas": workers, "router": router, "front_end": front_end}
    ours = simulated(SimulationConfig(**settings, **failure, **fleet))
    return [*rows, {"run": SIMULATED, **ours}]


@dataclass
class _Live:
    """Runs on these servers. up_s: when the killed one took requests again, by the run's clock."""

    servers: list[Process]
    router: str
    inputs: Inputs
    kill_at_s: float
    down_s: float
    up_s: float = math.nan

    def run(self, seed: int, record: Path) -> dict[str, float]:
        from twinserve.backends.live.measure.replayed import prompts_of, replayed
        from twinserve.backends.live.serving.client import ahead_of_others
        from twinserve.backends.live.serving.process import put_ahead

        # as soon as it can be: the simulated router learns of it at once
        often = ["--health-interval", "0.2", "--health-timeout", "30"]  # busy is not dead
        flags = ["--router", self.router, "--record", str(record), *often]
        front = Process([*FRONT, *flags, *named(self.servers)])
        try:
            front.wait()
            with urllib.request.urlopen(f"{self.servers[0].url}/v1/models", timeout=30) as answer:
                model = json.load(answer)["data"][0]["id"]
            _until(lambda: sum(_up(front)) == len(self.servers))
            for process in (front, *self.servers):
                put_ahead(process.pid)
            killing, workload = self._failure(front), self.inputs.workload
            # of another seed each time, so that caches hold nothing of earlier runs
            prompts = prompts_of(workload, self.inputs.hardware.block_tokens, seed)
            with ahead_of_others():
                seen = asyncio.run(replayed(front.url, model, workload, prompts, beside=killing))
            said = page(front.url)
        finally:
            front.end()
        again = [labelled(said, f"{name}_total") for name in ("migrations", "retries")]
        picks = labelled(said, "picks_total")
        return {
            **metrics(seen.latencies(), len(workload)),
            **_hits(seen.cached, workload.prompt_tokens),
            "up again, s": self.up_s,
            "moved": sum(sum(counts.values()) for counts in again),
            **{f"sent to {i + 1}": picks[one.url] for i, one in enumerate(self.servers)},
        }

    def _failure(self, front: Process):
        async def fail(begin: float) -> None:
            await asyncio.sleep(begin + self.kill_at_s - time.monotonic())
            await asyncio.to_thread(self.servers[-1].kill)
            await asyncio.sleep(self.down_s)
            self.servers[-1].start()
            await asyncio.to_thread(_until, lambda: _up(front)[-1] == 1.0)
            self.up_s = time.monotonic() - begin

        return fail


def _up(front: Process) -> list[float]:
    return list(labelled(page(front.url), "worker_up").values())


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _READY_S
    while not holds():
        if time.monotonic() > end:
            raise SettingsError(f"a server did not start within {_READY_S:g} s")
        time.sleep(0.05)


def simulated(config: SimulationConfig) -> dict[str, float]:
    inputs = resolve(config)
    result = run_policy(inputs, inputs.policies[0])
    requests, stays = result.rows.requests, result.rows.placements
    where = (requests if stays is None else stays)["replica"].to_numpy(np.int64)
    cached = requests["hit_tokens"]
    if stays is not None:  # a server says what it found itself, and the last one has the word
        cached = stays.sort_values("placement").groupby("request")["hit_tokens"].last()
        cached = cached.reindex(range(len(requests)), fill_value=0)
    # a crashed replica's successor has the next number
    where = where[where >= 0].clip(max=config.replicas - 1)
    sent = np.bincount(where, minlength=config.replicas)
    return {
        **metrics(of_run("simulated", result).latencies, len(requests)),
        **_hits(cached.to_numpy(float), requests["prompt_tokens"].to_numpy(float)),
        "moved": float(len(where) - len(requests)),
        **{f"sent to {i + 1}": float(n) for i, n in enumerate(sent)},
    }


def _hits(cached: np.ndarray, prompts: np.ndarray) -> dict[str, float]:
    """Of prompts whose server said what it found cached, in all."""
    told = ~np.isnan(cached)
    share = cached[told].sum() / prompts[told].sum() if told.any() else math.nan
    return {"prefix hits, %": 100 * float(share)}


def metrics(latencies: Mapping[str, np.ndarray], requests: int) -> dict[str, float]:
    """Of requests that got all their tokens: arrays by metric, seconds."""
    found: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        values = 1e3 * latencies[name]
        found[f"{name} mean, ms"] = float(np.nanmean(values))
        for percent in (50, 99):
            found[f"{name} p{percent}, ms"] = float(np.nanpercentile(values, percent))
    found["e2el mean, s"] = float(np.nanmean(latencies["e2el"]))
    found["failed"] = float(requests - len(latencies["e2el"]))
    return found


def beside(table: pd.DataFrame) -> pd.DataFrame:
    """A row a metric: mean, least and most of the live runs, the simulation, and by how much that
    is off. inside: it lies between the least and the most of the live runs."""
    live = table[table["run"] != SIMULATED].drop(columns="run")
    said = table[table["run"] == SIMULATED].drop(columns="run").iloc[0]
    found = live.agg(["mean", "min", "max"]).T.assign(simulated=said)
    off = []
    for name, mean, mine in zip(found.index, found["mean"], found["simulated"], strict=True):
        counted = name.startswith(_COUNTS)
        share = f"{100 * (mine / mean - 1):+.1f} %" if mean else ""
        off.append("" if np.isnan(mine) else f"{mine - mean:+.3g}" if counted else share)
    inside = found["simulated"].between(found["min"], found["max"]).map({True: "yes", False: "no"})
    inside = inside.where(found["simulated"].notna(), "")
    found = found.map("{:.4g}".format).assign(**{"off by": off, "inside": inside})
    names = {"index": "metric", "mean": "live", "min": "least", "max": "most"}
    return found.reset_index().rename(columns=names)


def _rerouted(record: Path) -> dict[str, float]:
    """The live run's event stream, to the router of the simulated fleet."""
    routing = read_routing(record)
    spec = parse_router(routing.router)
    found = reroute(routing, (spec.build(), spec.build()), model_of(routing.profile))
    return {
        "asked again": found.asked,
        "other views": found.other_views,
        "other picks": found.other_choices,
        "other picks, simulated signals": sum(one.choices for one in found.modelled.values()),
    }


def twins(scale: Scale) -> list[Point]:
    few = {"requests": 24, "cap_length": 700, "kill_at_s": 3.5, "down_s": 0.5}
    return repeats(scale, **(few if scale.quick else {}))


STUDY = Study(
    "route",
    "",
    [MACHINE, Figure("twin", "Live before servers, and simulated", twins, twin, beside)],
    seeds=3,
    workers=1,
    intro="Measured on this machine; its other load affects the numbers.",
)
