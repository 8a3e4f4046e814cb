"""The same requests before a real server on an emulated GPU: wall time, HTTP, real clients.

If clients see other times than the simulation, the difference is the host's, the front end's or the
client's; each is given in seconds.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.live.emulate.model import one_token_words, write_model
from twinserve.backends.live.emulate.serve import engine_arguments
from twinserve.backends.live.emulate.steps import Lateness
from twinserve.backends.live.measure.replayed import Seen, prompts_of, replayed
from twinserve.backends.live.serving.client import ahead_of_others
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess, put_ahead
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import PolicySpec
from twinserve.sim.results.columns import ENGINE_ARRIVAL
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.twin.emulated import said_of
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import Workload

KEEPS_UP, SENT_S = 0.01, 0.005  # share of late steps, mean delay of a client: the host's limits
METRICS = ("ttft", "tpot", "e2el")
_BEFORE = ("client late", "HTTP", "API server")  # parts of a TTFT up to the engine
_STAMPS = "twinserve.backends.live.measure.stamps.Stamping{}{}Scheduler"


@dataclass(frozen=True)
class EmulatedServer:
    """Seconds, an entry a request in the order of the workload.

    due_s     after the first request
    engine    latencies from when the API server has a request, as vLLM's metrics count
    client    latencies from when the request was due
    parts     the parts of these times by name
    lateness  of the host
    """

    due_s: np.ndarray
    engine: dict[str, np.ndarray]
    client: dict[str, np.ndarray]
    parts: dict[str, np.ndarray]
    lateness: Lateness

    @property
    def keeps_up(self) -> bool:
        few_late = self.lateness.late <= KEEPS_UP * self.lateness.steps
        return few_late and float(self.parts[_BEFORE[0]].mean()) <= SENT_S

    def arrived(self, workload: Workload) -> Workload:
        """The workload as it came to the engine's process: a request that is a few milliseconds
        late may have to wait for a whole step more."""
        at_s = self.due_s + sum(self.parts[name] for name in _BEFORE)
        came = replace(workload, arrival_s=at_s, concurrency=None)
        return take_rows(came, np.argsort(at_s, kind="stable"))

    def means(self, run: RunResult, fronted: RunResult) -> dict[tuple[str, str], tuple]:
        """By where and metric: the mean that was simulated and the mean that was seen, seconds.
        run: of `arrived`, for the engine; fronted: with a front end, for clients."""
        found = {}
        for where, result in (("engine", run), ("client", fronted)):
            columns = RequestColumns.of(result.rows.requests)
            for name in METRICS:
                both = getattr(columns, name), getattr(self, where)[name]
                found[where, name] = tuple(float(np.nanmean(values)) for values in both)
        return found

    def mean_parts(self, fronted: RunResult) -> dict[str, tuple[float, float]]:
        """Mean seconds of the client's TTFT by part, simulated and seen."""
        c = RequestColumns.of(fronted.rows.requests)
        first = c.ttft if c.engine_ttft is None else c.engine_ttft
        before = np.zeros(len(c.arrival))
        if c.engine_ttft is not None:
            before = np.asarray(fronted.rows.requests[ENGINE_ARRIVAL], np.float64) - c.arrival
        ours = {
            "to the engine": before,
            "waits there": c.queued,
            "computed": first - c.queued,
            "back": c.ttft - first - before,
        }
        seen = self.parts | {"to the engine": sum(self.parts[name] for name in _BEFORE)}
        return {
            name: (float(np.mean(values)), float(seen[name].mean()))
            for name, values in ours.items()
        }

    def table(self) -> pd.DataFrame:
        """A row a request, seconds."""
        of = {"engine": self.engine, "client": self.client}
        named = {f"{at}_{name}": of[at][name] for at in of for name in METRICS}
        return pd.DataFrame(named | self.parts)

    def summary(self, run: RunResult, fronted: RunResult) -> dict:
        """As plain values."""
        lateness = self.lateness
        means = self.means(run, fronted)
        return {
            "steps": lateness.steps,
            "late_steps": lateness.late,
            "late_s": lateness.late_s,
            "host_keeps_up": self.keeps_up,
            "mean_s": {f"{where}_{name}": _both(x) for (where, name), x in means.items()},
            "ttft_parts_s": {
                **{name: _both(x) for name, x in self.mean_parts(fronted).items()},
                **{name: float(self.parts[name].mean()) for name in _BEFORE},
            },
        }

    def lines(self, run: RunResult, fronted: RunResult) -> list[tuple[str, str]]:
        """As names and values, for the terminal. Errors are shown if the host kept up."""
        found = [("server", self.lateness.line().partition(": ")[2])]
        for (where, name), (ours, seen) in self.means(run, fronted).items():
            said = f"{1e3 * ours:.6g} / {1e3 * seen:.6g} ms"
            if self.keeps_up:
                said += f"  {100 * (ours / seen - 1):+.2f} %"
            found.append((f"{where}, mean {name}", said))
        parts = self.mean_parts(fronted).items()
        told = (f"{name} {1e3 * ours:.2f} / {1e3 * seen:.2f} ms" for name, (ours, seen) in parts)
        found.append(("client's ttft", "; ".join(told)))
        before = (f"{name} {1e3 * self.parts[name].mean():.2f} ms" for name in _BEFORE)
        found.append(("to the engine", "; ".join(before)))
        if not self.keeps_up:
            found.append(("note", "the host was late, so errors are not the simulation's"))
        return found


def _both(means: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("simulated", "seen"), means, strict=True))


def check_served(inputs: Inputs) -> None:
    """Raises SettingsError for requests that wait for certain others."""
    workload = inputs.workload
    if workload.pool is not None or np.isnan(workload.arrival_s).any():
        raise SettingsError(
            "--served: clients send requests at their times or in a closed loop, and here some "
            "wait for certain others; give a trace of arrivals without --pool, or drop --served"
        )


def serve_emulated(inputs: Inputs, spec: PolicySpec) -> EmulatedServer:
    """Send the workload in wall time to a server of its own (`emulated_server`)."""
    check_served(inputs)
    with emulated_server(inputs, spec) as send:
        return send(inputs.workload, inputs.config.seed)


@contextmanager
def emulated_server(
    inputs: Inputs, spec: PolicySpec
) -> Iterator[Callable[[Workload, int], EmulatedServer]]:
    """Start `vllm serve` on the GPU of `inputs`; with what is yielded, send a workload, its texts
    drawn by a seed; stop the server. Server and clients go before other programs, if the host
    allows it. Raises LiveEngineError, one line, if it does not start or an answer is lost."""
    ours, block = spec.name != "vllm", inputs.hardware.block_tokens
    with tempfile.TemporaryDirectory(prefix="twinserve-") as folder:
        server = _start(inputs, spec, Path(folder))
        words, stamped = one_token_words(server.model), 0

        def send(workload: Workload, seed: int) -> EmulatedServer:
            nonlocal stamped
            drawn = prompts_of(workload, block, seed, len(words))
            prompts = ["".join(words[token] for token in tokens) for tokens in drawn]
            said = [{"vllm_xargs": said_of(workload, row)} for row in range(len(workload))]
            # asked, not read from its last words: on a busy host a server is killed before these
            before = server.called("lateness")
            with ahead_of_others():
                further = said if ours else None
                seen = asyncio.run(replayed(server.url, server.name, workload, prompts, further))
            counts = server.called("lateness")
            if lost := int(np.isnan(seen.last_s).sum()):
                raise LiveEngineError(
                    f"{spec.label}: the server lost {lost} of {len(workload)} answers"
                )
            lines = (Path(folder) / "stamps").read_text().splitlines()
            stamps, stamped = [json.loads(line) for line in lines[stamped:]], len(lines)
            lateness = Lateness(**{name: counts[name] - before[name] for name in counts})
            return of_stamps(seen, stamps, lateness)

        try:
            server.wait(300.0)
            put_ahead(server.process.pid)
            yield send
        finally:
            server.stop()


def of_stamps(seen: Seen, stamps: list[dict], lateness: Lateness) -> EmulatedServer:
    """Return the clients' times with the engine's notes (`measure/stamps.py`)."""
    # a server's request is named cmpl-ROW-0-...
    of_row = {int(line["name"].split("-")[1]): line for line in stamps}
    lines = [of_row[row] for row in range(len(seen.sent_s))]
    names = ("came_s", "reached_s", "scheduled_s")
    came, reached, scheduled = (np.array([line[name] for line in lines]) for name in names)
    first, last = (np.array([line["tokens_s"][at] for line in lines]) for at in (0, -1))
    gaps = np.where(seen.tokens > 1, seen.tokens - 1.0, np.nan)
    engine = {"ttft": first - reached, "tpot": (last - first) / gaps, "e2el": last - reached}
    parts = {
        "client late": seen.sent_s - seen.due_s,
        "HTTP": came - seen.sent_s,
        "API server": reached - came,
        "waits there": scheduled - reached,
        "computed": first - scheduled,
        "back": seen.first_s - first,
    }
    due_s = seen.due_s - seen.due_s.min()
    return EmulatedServer(due_s, engine, seen.latencies(), parts, lateness)


def _start(inputs: Inputs, spec: PolicySpec, folder: Path) -> ServerProcess:
    config, hardware = inputs.config, inputs.hardware
    ours = spec.name != "vllm"
    if config.prefix_caching is None and not spec.policy.prefix_caching:
        config = config.model_copy(update={"prefix_caching": False})
    options: dict = {"stamps_path": str(folder / "stamps")}
    if ours:
        options |= {"clients": "trusted", "num_blocks": hardware.num_blocks}
    model = write_model(folder / "model", hardware.profile.llm, hardware.limits.max_model_len)
    given = ["--additional-config", json.dumps(options)]
    arguments = engine_arguments(config, hardware, spec.text if ours else None, given)
    kind = "Async" if config.async_scheduling else ""
    stamping = _STAMPS.format("Policy" if ours else "", kind)
    arguments += ["--scheduler-cls", stamping]  # the last of two wins
    environment = {**CPU_ENGINE, "VLLM_SERVER_DEV_MODE": "1"}
    return ServerProcess(folder, model, arguments, environment=environment)
