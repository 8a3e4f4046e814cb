"""The same requests before real servers and in the simulator, with one failure injected in both.

Servers stand behind `twinserve route`; the simulated fleet has the same router. The live run is
repeated, so that what the two differ by stands beside what a run differs by from itself.
docs/routers.md has the results.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from cyclopts import Parameter

from twinserve.backends.live.route.settings import model_of, require_libraries, router_of
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines
from twinserve.experiments.route.processes import FRONT, Process, labelled, page
from twinserve.formats import whole_file
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.routing import read_routing
from twinserve.sim.setup.config import SettingsError, SimulationConfig, parse_slo
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.reroute import reroute
from twinserve.traces.workload import Workload

_TIMED = (sys.executable, "-m", "twinserve.experiments.route.timed_worker")
_READY_S = 600.0  # a real server loads its model meanwhile
_COUNTS = ("failed", "moved", "sent")  # metrics that are numbers of requests


def twin(
    *,
    trace: str = "sharegpt",
    rate: float = 3.0,
    requests: int = 60,
    cap_length: int = 300,
    seed: int = 0,
    profile: str = "llama-3.1-70b@a100-80g:tp4",
    front_end: str = "none",
    given: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    slo: str = "ttft=0.2,tpot=0.04",
    workers: int = 2,
    router: str = "vllm-dp",
    server: str | None = None,
    kill_at: float = 8.0,
    down: float = 4.0,
    repeats: int = 3,
    out: Path | None = None,
) -> None:
    """Metrics of live runs behind `twinserve route`, and of the simulation, side by side.

    Parameters
    ----------
    trace: str
        As for twinserve simulate; so are rate, requests, cap_length, seed, profile, front_end
        and router.
    given: tuple[str]
        Another setting of simulate, as block_tokens=32; may be repeated.
    slo: str
        Objectives in seconds, as ttft=0.2,tpot=0.04.
    workers: int
        Servers, and replicas of the simulated fleet.
    server: str
        Command that starts a real server, with {port} where its port belongs, as "vllm serve MODEL
        --port {port}". By default servers generate nothing, and take the profile's step times.
    kill_at: float
        Seconds of the run at which the last server is killed with SIGKILL; 0: none is.
    down: float
        Seconds after which its command is started again. When it is up is measured.
    repeats: int
        Live runs.
    out: Path
        CSV file for the metrics of all runs.
    """
    require_libraries()
    if min(workers, repeats, requests) < 1 or not 0 <= kill_at < math.inf:
        raise SettingsError("give numbers that are above 0")
    if kill_at and workers < 2:
        raise SettingsError(
            "with one server a kill leaves nobody; give --workers 2, or --kill-at 0"
        )
    if server is not None and "{port}" not in server:
        raise SettingsError("--server: has no {port}; write it where the server's port belongs")
    if not 0 < down < math.inf:
        raise SettingsError(f"--down {down:g}: seconds above 0")
    bounds = parse_slo(slo)
    if bounds is None:
        raise SettingsError("--slo none: attainment is compared; give ttft=0.2,tpot=0.04")
    router_of(router)
    # caches hold nothing in both: each live prompt is another one
    settings = {
        "trace": trace,
        "rate": rate,
        "requests": requests,
        "cap_length": cap_length,
        "seed": seed,
        "profile": profile,
        "prefix_caching": False,
        "slo": slo,
        **_settings(given),
    }
    workload = resolve(SimulationConfig(**settings)).workload
    rows, picks = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = server or shlex.join([*_TIMED, str(folder / "settings.json"), "{port}"])
        (folder / "settings.json").write_text(json.dumps(settings | {"exact": True}))
        servers = [Server(command) for _ in range(workers)]
        for one in servers:
            stack.callback(one.end)
        for one in servers:
            one.wait()
        up_s = []
        for repeat in range(repeats):
            record = folder / f"{repeat}.jsonl.gz"
            live = _Live(servers, router, record, workload, kill_at, down)
            table = live.run(seed * 1000 + repeat)
            up_s.append(live.up_s)
            rows.append({"run": f"live {repeat + 1}", **metrics(table, bounds), **live.counts})
            picks.append(_rerouted(record))
    failure = {}
    if kill_at:
        schedule = [{"replica": workers - 1, "at_s": kill_at, "until_s": float(np.mean(up_s))}]
        failure = {"failures": json.dumps(schedule), "on_failure": "migrate", "start_up": 0.0}
    config = SimulationConfig(
        **settings, **failure, replicas=workers, router=router, front_end=front_end
    )
    rows.append({"run": "simulated", **simulated(config, workload, bounds)})
    table = pd.DataFrame(rows)
    if out is not None:
        with whole_file(out) as partial:
            table.to_csv(partial, index=False)
    print("\n".join(machine_lines({**machine(), "core": None})))
    if kill_at:
        shown = ", ".join(f"{one:.1f}" for one in up_s)
        print(f"the last of {workers} servers was killed at {kill_at:g} s, and up at {shown} s")
    print(beside(table).to_string(index=False))
    print(*picks, sep="\n")


def _settings(given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text}: has no value; write block_tokens=32")
        found[name.replace("-", "_")] = value
    return found


class Server:
    """A process that serves on a port of its own, with all that it started."""

    def __init__(self, command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = shlex.split(command.replace("{port}", str(port)))
        self.start()

    def start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            said = f"--server: {self._command[0]}: {error.strerror}; name a command"
            raise SettingsError(said) from None

    def wait(self) -> None:
        """Raises SettingsError where it does not get ready."""
        end = time.monotonic() + _READY_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SettingsError(f"{' '.join(self._command)[:200]}: did not get ready")

    def model(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()


@dataclass
class _Live:
    """One run. up_s: when the killed server took requests again, by the run's clock."""

    servers: list[Server]
    router: str
    record: Path
    workload: Workload
    kill_at_s: float
    down_s: float
    up_s: float = math.nan

    def run(self, seed: int) -> pd.DataFrame:
        from twinserve.experiments.route.replayed import replayed

        named = [part for one in self.servers for part in ("--worker", one.url)]
        flags = ["--router", self.router, "--port", "0", "--record", str(self.record)]
        # as soon as it can be: the simulated router learns of it at once
        flags += ["--health-interval", "0.2", "--health-timeout", "30"]  # busy is not dead
        front = Process([*FRONT, *flags, *named])
        try:
            model = self.servers[0].model()
            _until(lambda: sum(self._up(front)) == len(self.servers))
            killing = self._failure(front) if self.kill_at_s else None
            table = asyncio.run(replayed(front.url, model, self.workload, seed, killing))
            said = page(front.url)
            picks = labelled(said, "picks_total")
            moved = sum(
                sum(labelled(said, name).values()) for name in ("migrations_total", "retries_total")
            )
            self.counts = {"moved": moved} | {
                f"sent to {i + 1}": picks[one.url] for i, one in enumerate(self.servers)
            }
        finally:
            front.end()
        return table

    def _up(self, front: Process) -> list[float]:
        return list(labelled(page(front.url), "worker_up").values())

    def _failure(self, front: Process):
        async def fail(begin: float) -> None:
            await asyncio.sleep(begin + self.kill_at_s - time.monotonic())
            await asyncio.to_thread(self.servers[-1].kill)
            await asyncio.sleep(self.down_s)
            self.servers[-1].start()
            await asyncio.to_thread(_until, lambda: self._up(front)[-1] == 1.0)
            self.up_s = time.monotonic() - begin

        return fail


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _READY_S
    while not holds():
        if time.monotonic() > end:
            raise SettingsError(f"a server was not up within {_READY_S:g} s")
        time.sleep(0.05)


def simulated(
    config: SimulationConfig, workload: Workload, bounds: tuple[float, float, float]
) -> dict[str, float]:
    inputs = resolve(config)
    result = run_policy(inputs, inputs.policies[0])
    requests = result.rows.requests
    frame = pd.DataFrame(
        {
            "ttft_s": requests["first_token_s"] - requests["arrival_s"],
            "tpot_s": (requests["last_token_s"] - requests["first_token_s"])
            / (requests["output_tokens"] - 1).where(requests["output_tokens"] > 1),
            "e2el_s": requests["last_token_s"] - requests["arrival_s"],
            "finished": requests["finished"],
        }
    )
    stays = result.rows.placements
    where = (requests if stays is None else stays)["replica"].to_numpy(np.int64)
    # whoever took the place of the one that crashed
    where = where[where >= 0].clip(max=config.replicas - 1)
    sent = np.bincount(where, minlength=config.replicas)
    counts = {f"sent to {i + 1}": float(n) for i, n in enumerate(sent)}
    return {**metrics(frame, bounds), "moved": float(len(where) - len(requests)), **counts}


def metrics(table: pd.DataFrame, bounds: tuple[float, float, float]) -> dict[str, float]:
    """Of requests that got all their tokens; shares are of all. bounds: as of `parse_slo`."""
    done = table[table["finished"].astype(bool)]
    found: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        values = done[f"{name}_s"].dropna() * 1e3
        for label, value in (
            ("mean", values.mean()),
            ("p50", values.quantile(0.5)),
            ("p99", values.quantile(0.99)),
        ):
            found[f"{name} {label}, ms"] = float(value)
    found["e2el mean, s"] = float(done["e2el_s"].mean())
    ttft, tpot = done["ttft_s"] <= bounds[0], ~(done["tpot_s"] > bounds[1])
    for name, kept in (("ttft", ttft), ("tpot", tpot), ("both", ttft & tpot)):
        found[f"{name} attained, %"] = 100.0 * float(kept.sum()) / len(table)
    found["failed"] = float(len(table) - len(done))
    return found


def beside(table: pd.DataFrame) -> pd.DataFrame:
    """A row a metric: mean, least and most of the live runs, the simulation, and by how much that
    is off. inside: it lies between the least and the most of the live runs."""
    live = table[table["run"] != "simulated"].drop(columns="run")
    said = table[table["run"] == "simulated"].drop(columns="run").iloc[0]
    rows = []
    for name in live.columns:
        values, mine = live[name], said[name]
        mean, least, most = values.mean(), values.min(), values.max()
        counted = name.startswith(_COUNTS) or name.endswith("%")
        off = f"{mine - mean:+.3g}" if counted else f"{100 * (mine / mean - 1):+.1f} %"
        rows.append(
            {
                "metric": name,
                "live": f"{mean:.4g}",
                "least": f"{least:.4g}",
                "most": f"{most:.4g}",
                "simulated": f"{mine:.4g}",
                "off by": off,
                "inside": "yes" if least <= mine <= most else "no",
            }
        )
    return pd.DataFrame(rows)


def _rerouted(record: Path) -> str:
    """The live run's event stream, to the router of the simulated fleet."""
    routing = read_routing(record)
    spec = parse_router(routing.router)
    found = reroute(routing, (spec.build(), spec.build()), model_of(routing.profile))
    modelled = sum(one.choices for one in found.modelled.values())
    return (
        f"the router asked again, {found.asked} times: {found.other_views} other views, "
        f"{found.other_choices} other picks; with simulated signals {modelled} other picks"
    )
