"""The same requests before a real server on an emulated GPU: wall time, HTTP, real clients.

Where its clients see other times than the simulation says, the difference is the host's, the front
end's or the client's, and each is told by its seconds.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.live.emulate.model import VOCAB, write_model
from twinserve.backends.live.emulate.pace import Lateness
from twinserve.backends.live.emulate.serve import engine_arguments
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.measure.replayed import Seen, replayed
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import PolicySpec
from twinserve.sim.fleet.prefix_index import content_ids
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs

KEEPS_UP, SENT_S = 0.01, 0.005  # share of late steps, mean delay of a client: the host's limits
METRICS = ("ttft", "tpot", "e2el")
_STAMPS = "twinserve.backends.live.measure.stamps.Stamping{}{}Scheduler"


@dataclass(frozen=True)
class EmulatedServer:
    """What was seen, seconds, an entry a request in the order of the workload: latencies `engine`
    from when the API server has a request on, as vLLM's metrics count, `client` from when it was
    due; `sent` after that, `arrived` in the API server after it was sent, `back` from the engine's
    first token to the client's. lateness: of the host."""

    engine: dict[str, np.ndarray]
    client: dict[str, np.ndarray]
    sent: np.ndarray
    arrived: np.ndarray
    back: np.ndarray
    lateness: Lateness

    @property
    def keeps_up(self) -> bool:
        few_late = self.lateness.late <= KEEPS_UP * self.lateness.steps
        return few_late and float(self.sent.mean()) <= SENT_S

    def means(self, simulated: RunResult) -> dict[str, tuple[float, float, float]]:
        """By metric: simulated, seen by the engine, seen by clients; seconds."""
        columns = RequestColumns.of(simulated.rows.requests)
        return {
            name: tuple(
                float(np.nanmean(values))
                for values in (getattr(columns, name), self.engine[name], self.client[name])
            )
            for name in METRICS
        }  # type: ignore[misc]

    def parts(self, simulated: RunResult) -> dict[str, float]:
        """Where the client's mean TTFT parts from the simulated one, seconds; they add up."""
        ours, engine, _ = self.means(simulated)["ttft"]
        return {
            "client, late to send": float(self.sent.mean()),
            "front end, to the engine": float(self.arrived.mean()),
            "engine": engine - ours,
            "front end, back to the client": float(self.back.mean()),
        }

    def table(self) -> pd.DataFrame:
        """A row a request, seconds."""
        of = {"engine": self.engine, "client": self.client}
        named = {f"{at}_{name}": of[at][name] for at in of for name in METRICS}
        return pd.DataFrame(named | {"sent": self.sent, "arrived": self.arrived, "back": self.back})

    def summary(self, simulated: RunResult) -> dict:
        """As plain values."""
        lateness = self.lateness
        return {
            "steps": lateness.steps,
            "late_steps": lateness.late,
            "late_s": lateness.late_s,
            "host_keeps_up": self.keeps_up,
            "mean_s": {
                name: dict(zip(("simulated", "engine", "client"), values, strict=True))
                for name, values in self.means(simulated).items()
            },
            "ttft_parts_s": self.parts(simulated),
        }

    def lines(self, simulated: RunResult) -> list[tuple[str, str]]:
        """As names and values, for the terminal. Errors are shown if the host kept up."""
        found = [("server", self.lateness.line().partition(": ")[2])]
        for name, (ours, engine, client) in self.means(simulated).items():
            said = f"{1e3 * ours:.6g} / {1e3 * engine:.6g} / {1e3 * client:.6g} ms"
            if self.keeps_up:
                said += f"  {100 * (ours / engine - 1):+.1f} / {100 * (ours / client - 1):+.1f} %"
            found.append((f"mean {name}, engine, client", said))
        parts = (f"{name} {1e3 * s:+.2f} ms" for name, s in self.parts(simulated).items())
        found.append(("clients wait longer", "; ".join(parts)))
        if not self.keeps_up:
            found.append(("note", "the host was late, so that no error is the simulation's"))
        return found


def check_served(inputs: Inputs) -> None:
    """Raises SettingsError for requests that do not come at times of their own."""
    workload = inputs.workload
    if workload.pool is not None or workload.concurrency or np.isnan(workload.arrival_s).any():
        raise SettingsError(
            "--served: clients send each request at its own time, and here some wait for others; "
            "give a trace of arrivals without --pool, or drop --served"
        )


def serve_emulated(inputs: Inputs, spec: PolicySpec) -> EmulatedServer:
    """Start `vllm serve` on the GPU of `inputs`, send the workload in wall time, stop the server.
    LiveEngineError, one line, where it does not start or an answer is lost."""
    check_served(inputs)
    workload, block = inputs.workload, inputs.hardware.block_tokens
    texts = PromptTexts(VOCAB, block, inputs.config.seed)
    prompts = [
        texts.tokens(workload.ids[row], int(n), content_ids(workload, row, block))
        for row, n in enumerate(workload.prompt_tokens)
    ]
    ours = spec.name != "vllm"
    further = [{"vllm_xargs": _said(inputs, row)} if ours else {} for row in range(len(workload))]
    with tempfile.TemporaryDirectory(prefix="twinserve-") as folder:
        server = _start(inputs, spec, Path(folder))
        try:
            server.wait(300.0)
            seen = asyncio.run(replayed(server.url, server.name, workload, prompts, further))
            # asked, not read from its last words: on a busy host a server is killed before these
            lateness = Lateness(**server.called("lateness"))
        finally:
            server.stop()
        lost = int(np.isnan(seen.last_s).sum())
        if lost:
            raise LiveEngineError(
                f"{spec.label}: the server lost {lost} of {len(workload)} answers"
            )
        stamps = [json.loads(s) for s in (Path(folder) / "stamps").read_text().splitlines()]
    return of_stamps(seen, stamps, lateness)


def of_stamps(seen: Seen, stamps: list[dict], lateness: Lateness) -> EmulatedServer:
    """What clients saw, beside what the engine noted (`measure/stamps.py`)."""
    # a server's request is named cmpl-ROW-0-...
    of_row = {int(line["name"].split("-")[1]): line for line in stamps}
    lines = [of_row[row] for row in range(len(seen.sent_s))]
    came, first, last = np.array(
        [(line["came_s"], line["tokens_s"][0], line["tokens_s"][-1]) for line in lines]
    ).T
    gaps = np.where(seen.tokens > 1, seen.tokens - 1.0, np.nan)
    engine = {"ttft": first - came, "tpot": (last - first) / gaps, "e2el": last - came}
    return EmulatedServer(
        engine,
        seen.latencies(),
        seen.sent_s - seen.due_s,
        came - seen.sent_s,
        seen.first_s - first,
        lateness,
    )


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


def _said(inputs: Inputs, row: int) -> dict:
    """What the client says of its request to a scheduler of ours."""
    workload = inputs.workload
    said: dict = {"class": ("rt", "be")[int(workload.service_class[row])]}
    for name in ("slo_ttft_s", "slo_tpot_s"):
        seconds = float(getattr(workload, name)[row])
        if not np.isnan(seconds):
            said[name] = seconds
    return said
