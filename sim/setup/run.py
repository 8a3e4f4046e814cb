"""Runs a simulation: settings in, rows and metrics out."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version

import numpy as np
import pandas as pd

from twinserve.backends.links import PcieLink, allreduces_of, evenly
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.registry import PolicySpec, file_sha256, ledger_class
from twinserve.policies.requests import RequestTable
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.garbage import collected_seldom
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.source import RequestSource, shared_contents
from twinserve.sim.results.decisions import DecisionRecorder, log_bytes
from twinserve.sim.results.files import RunResult, RunRows
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.recorder import StepRecorder, request_frame
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.traces.apps.truth import TrueDemand


@dataclass(frozen=True)
class Progress:
    """How far a run is. total: requests of the list, the pool's not counted."""

    label: str
    now_s: float
    finished: int
    submitted: int
    total: int
    steps: int


Report = Callable[[Progress], None]


def simulate(
    config: SimulationConfig, report: Report | None = None, goodput: dict | None = None
) -> dict[str, RunResult]:
    """Every policy of `config` over one request list; label -> result. Nothing is written."""
    return {spec.label: result for spec, result in run_each(resolve(config), report, goodput)}


def run_each(
    inputs: Inputs,
    report: Report | None = None,
    goodput: dict | None = None,
    decisions: bool = False,
    begin: Callable[[str], None] = lambda label: None,
) -> Iterator[tuple[PolicySpec, RunResult]]:
    """Every policy over the request list of `inputs`, one after another; each result comes as soon
    as it is there.

    begin(label) is called before each. Before the first one all policies are made once, so that
    what one of them refuses (PolicyError, SettingsError) does not come after minutes of another.
    """
    for spec in inputs.policies:
        make_policy(inputs, spec)
    for number, spec in enumerate(inputs.policies):
        if number:
            gc.collect()  # the last run's objects refer to each other in circles
        begin(spec.label)
        yield spec, run_policy(inputs, spec, report, goodput, decisions)


def run_policy(
    inputs: Inputs,
    spec: PolicySpec,
    report: Report | None = None,
    goodput: dict | None = None,
    decisions: bool = False,
) -> RunResult:
    """One policy over the request list of `inputs`. decisions: the result holds a decision log."""
    return run_simulation(Simulation(inputs, spec, report, decisions), goodput)


def run_simulation(simulation: Simulation, goodput: dict | None = None) -> RunResult:
    """Run it to the end, and sum it up."""
    inputs, spec = simulation.inputs, simulation.spec
    started = time.perf_counter()
    simulation.run()
    simulated = time.perf_counter()
    rows = simulation.rows()
    summary = summarise(rows, goodput)
    decisions = np.array(
        [s for engine in simulation.engines for s in engine.decision_seconds] or [0.0]
    )
    steps = sum(engine.recorder.steps for engine in simulation.engines)
    wall = simulated - started
    timing = {
        "wall_s": wall,
        "metrics_s": time.perf_counter() - simulated,
        "decisions": len(decisions),
        "decision_mean_s": float(decisions.mean()),
        "decision_p99_s": float(np.percentile(decisions, 99)),
        "simulated_steps_per_s": steps / wall,
        "requests_per_s": len(rows.requests) / wall,
    }
    engine = simulation.engines[0]
    described = describe(inputs, spec, engine)
    counted = [e.core.policy.counters for e in simulation.engines]
    if counted[0]:
        described["policy"]["counters"] = {
            name: sum(c[name] for c in counted) for name in counted[0]
        }
    log = (
        log_bytes(described, engine.core.requests, engine.recorder, engine.backend.moved)
        if simulation.decisions
        else None
    )
    return RunResult(rows, described, timing, summary, log)


class Simulation:
    """The assembled objects of one run: clock, engines, source. decisions: keep every plan, for a
    decision log."""

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        report: Report | None = None,
        decisions: bool = False,
    ) -> None:
        self.inputs = inputs
        self.spec = replace(spec, kv=spec.kv or inputs.config.kv)
        self.decisions = decisions
        self.clock = self._clock()
        self.engines = [self._engine(i) for i in range(inputs.config.replicas)]
        self.source = RequestSource(
            self.clock,
            inputs.workload,
            self.engines,
            inputs.hardware.block_tokens,
            client_timeout_s=inputs.config.client_timeout,
        )
        self._report = report
        self._finished = 0
        if report is not None:
            for engine in self.engines:
                engine.on_finish = self._counting(engine.on_finish)

    def _clock(self) -> Clock:
        return Clock()

    def run(self) -> None:
        """To the end of the last request, or where a subclass has it (`_advance`)."""
        with collected_seldom():
            self._advance()

    def _advance(self) -> None:
        self.clock.run()

    def _counting(self, after: Callable[[int], None]) -> Callable[[int], None]:
        def count(row: int) -> None:
            after(row)
            self._finished += 1
            if self._finished % 32 == 0:
                self._report(self.progress())

        return count

    def progress(self) -> Progress:
        workload = self.inputs.workload
        return Progress(
            self.spec.label,
            self.clock.now,
            self._finished,
            self.source.submitted,
            len(workload),
            sum(engine.recorder.steps for engine in self.engines),
        )

    def _engine(self, replica: int) -> Engine:
        config = self.inputs.config
        requests = RequestTable()
        policy = make_policy(self.inputs, self.spec)
        ledger = self._ledger(requests, policy)
        backend = self._backend(requests, policy)
        overhead = 0.0 if config.decision_time == "none" else None
        core = EngineCore(requests, policy, ledger, config.async_scheduling)
        return Engine(
            self.clock, core, backend, self._recorder(replica), decision_overhead=overhead
        )

    def _recorder(self, replica: int) -> StepRecorder:
        return DecisionRecorder(replica) if self.decisions else StepRecorder(replica)

    def _backend(self, requests: RequestTable, policy: Policy) -> SimulatedBackend:
        hardware, config = self.inputs.hardware, self.inputs.config
        return SimulatedBackend(
            requests,
            hardware.model,
            PcieLink(hardware.profile.pcie_bytes_per_s, sharing=policy.link_sharing or evenly),
            hardware.limits,
            layers=hardware.profile.llm.layers,
            fast=not config.exact,
            allreduces=allreduces_of(hardware.profile.gpu, hardware.model)
            if config.pcie_contention
            else None,
            layered=ledger_class(self.spec.kv_name).knows_layers,
        )

    def _ledger(self, requests: RequestTable, policy: Policy) -> KvLedger:
        config, hardware = self.inputs.config, self.inputs.hardware
        kv = self.spec.kv_name
        kind = ledger_class(kv)
        wanted = policy.prefix_caching if config.prefix_caching is None else config.prefix_caching
        caching = wanted and policy.uses_prefix_cache
        options = {"layers": hardware.profile.llm.layers} if kind.knows_layers else {}
        if kind.caches_prefixes:
            options |= {
                "prefix_caching": caching,
                "shared_contents": shared_contents(self.inputs.workload, hardware.block_tokens)
                if caching
                else 0,
            }
        elif config.prefix_caching and caching:
            raise SettingsError(
                f"--prefix-caching: the {kv} ledger of policy {self.spec.label} has none; add "
                "kv=paged to it"
            )
        return kind(
            requests, hardware.num_blocks, hardware.block_tokens, hardware.host_blocks, **options
        )

    def rows(self) -> RunRows:
        names = self.source.group_names
        requests = [request_frame(e.core.requests, i, names) for i, e in enumerate(self.engines)]
        steps = [engine.recorder.step_frame() for engine in self.engines]
        gaps = [engine.recorder.gap_frame() for engine in self.engines]
        return RunRows(
            _joined(requests),
            _joined(steps),
            _joined(gaps),
            self.inputs.hardware.num_blocks,
            self.source.never_sent,
        )


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """The replicas' rows, one after another."""
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]


def make_policy(inputs: Inputs, spec: PolicySpec) -> Policy:
    """A new policy that can serve the requests of `inputs`. Raises PolicyError or SettingsError
    where it cannot."""
    hardware, longest = inputs.hardware, inputs.workload.longest
    policy = spec.build(
        hardware.limits, inputs.estimator_for(spec.policy) if spec.uses_estimator else None
    )
    budget = policy.prompt_budget
    if budget is not None and budget < longest:
        raise SettingsError(
            f"policy {spec.label} computes prompts whole, in steps of {budget} tokens at most, "
            "and the longest request has "
            f"{longest} (prompt and output: after a preemption both are computed again); set "
            f"{policy.prompt_budget_setting} "
            f"to {longest} or more, or cut requests with --cap-length {budget}"
        )
    if policy.predictor is not None and policy.predictor.needs_truth:
        policy.predictor.truth = TrueDemand(inputs.workload)
    policy.prepare({info.kind for info in inputs.workload.applications.values()})
    return policy


def effective(config: SimulationConfig, spec: PolicySpec) -> SimulationConfig:
    """The settings of `spec`'s run alone, without those that it makes no use of: given back, they
    are accepted."""
    changes: dict = {"policy": (spec.text,)}
    if not spec.uses_estimator:
        changes["estimator"] = "paper"
    if config.prefix_caching and not spec.policy.uses_prefix_cache:
        changes["prefix_caching"] = None
    return config.model_copy(update=changes)


def describe(inputs: Inputs, spec: PolicySpec, engine: Engine) -> dict:
    """run.json: all that is needed to understand the run and to repeat it."""
    hardware, workload = inputs.hardware, inputs.workload
    policy, ledger = engine.core.policy, engine.core.ledger
    digest = file_sha256(type(policy))
    return {
        "label": spec.label,
        "policy": {
            "name": spec.name,
            "options": policy.options.model_dump(mode="json"),
            **({"file_sha256": digest} if digest else {}),
        },
        "kv": {
            "ledger": ledger.name,
            "prefix_caching": ledger.prefix_caching,
            "num_blocks": ledger.num_blocks,
            "block_tokens": ledger.block_tokens,
            "host_blocks": ledger.host_blocks,
        },
        "limits": asdict(hardware.limits),
        "trace": {
            **asdict(workload.provenance),
            "requests": len(workload),
            "pool": None if workload.pool is None else asdict(workload.pool),
        },
        "profile": hardware.profile.model_dump(mode="json"),
        "notices": list(inputs.notices),
        "config": effective(inputs.config, spec).model_dump(mode="json"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("twinserve", "numpy", "pandas", "simpy")},
        },
    }
