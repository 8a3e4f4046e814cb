"""Run a simulation: settings in, rows and metrics out."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from twinserve.own_code import file_sha256
from twinserve.policies.registry import PolicySpec
from twinserve.profiles.evidence import recorded
from twinserve.profiles.front_end import NO_DELAYS
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.garbage import collected_seldom
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.fleet.rows import fleet_rows
from twinserve.sim.fleet.source import RequestSource
from twinserve.sim.results.files import RunResult, RunRows
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.metrics_fleet import GPUS
from twinserve.sim.results.options import MetricsOptions, Warmup
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import most_decodes, outside
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.objectives import parse_objectives, pool_objectives
from twinserve.sim.setup.offloading import HostStores
from twinserve.sim.setup.replicas import (
    BackendOf,
    Description,
    SimulatedBackends,
    compose,
    kinds,
    make_policy,
)
from twinserve.traces.readers.options import reader_sha256
from twinserve.traces.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from twinserve.sim.fleet.faults import Faults

PLAIN = MetricsOptions()
MOST_WINDOWS = 2_000
_LONG = 100_000  # requests


@dataclass(frozen=True)
class Progress:
    """Progress of a run, in simulated seconds.

    finished   requests of the list that have ended, without the pool
    submitted  requests so far, with the pool
    total      requests of the list
    total_s    the last arrival that is known
    """

    label: str
    now_s: float
    finished: int
    submitted: int
    total: int
    total_s: float

    @property
    def share(self) -> float:
        """Progress from 0 to 1: of time to the last arrival or of requests, whichever is less."""
        arrived = min(self.now_s / self.total_s, 1.0) if self.total_s > 0 else 1.0
        return min(arrived, self.finished / self.total if self.total else 1.0)


Report = Callable[[Progress], None]
_REPORT_STEPS = 16  # engine steps, or runs of identical ones, between two reports


def simulate(
    config: SimulationConfig, report: Report | None = None, options: MetricsOptions = PLAIN
) -> dict[str, RunResult]:
    """Run every policy of `config` over one request list; return label -> result."""
    return {spec.label: result for spec, result in run_each(resolve(config), report, options)}


def run_each(
    inputs: Inputs,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    decisions: bool = False,
    begin: Callable[[str], None] = lambda label: None,
) -> Iterator[tuple[PolicySpec, RunResult]]:
    """Run every policy over the requests of `inputs` in turn; yield each result when its run ends.

    Calls begin(label) before each run. All policies are made once before the first run, so that one
    with wrong settings fails at once (PolicyError, SettingsError). options: further metrics; a
    metric that the request list does not allow is refused as early.
    """
    _check_options(options, inputs.workload)
    for spec in inputs.policies:
        for description, _ in kinds(inputs, spec):
            make_policy(description.inputs(inputs), description.spec, description.role)
    for number, spec in enumerate(inputs.policies):
        if number:
            gc.collect()  # the last run's objects refer to each other in circles
        begin(spec.label)
        yield spec, run_policy(inputs, spec, report, options, decisions)


def run_policy(
    inputs: Inputs,
    spec: PolicySpec,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    decisions: bool = False,
) -> RunResult:
    """Run one policy over the requests of `inputs`. decisions: keep a decision log."""
    result = run_simulation(
        Simulation(inputs, spec, report, decisions, warmup=options.warmup), options
    )
    if len(inputs.workload) >= _LONG:
        gc.collect()  # what the run held, before its results are written
    return result


def run_simulation(simulation: Simulation, options: MetricsOptions = PLAIN) -> RunResult:
    """Run to the end and summarise, with the warm-up and the objectives of its settings."""
    started = time.perf_counter()
    simulation.run()
    simulated = time.perf_counter()
    rows = simulation.rows()
    options = _of_settings(simulation, options)
    summary = summarise(rows, options)
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
        "requests_per_s": len(rows.request_columns) / wall,
    }
    engine = simulation.engines[0]
    described = describe_all(simulation, options)
    profile = simulation.inputs.hardware.profile
    if not simulation.inputs.pools and profile.most_requests is not None:
        described["notices"] += outside(profile, rows.step_columns)
        described["step_times"] = [recorded(profile, most_decodes(rows.step_columns))]
    summary["step_times"] = described["step_times"]
    counted = [e.core.policy.counters for e in simulation.engines]
    if any(counted):  # replicas may differ in policy
        described["policy"]["counters"] = {
            name: sum(c.get(name, 0) for c in counted)
            for name in dict.fromkeys(name for c in counted for name in c)
        }
    log = None
    if simulation.decisions:
        from twinserve.sim.results.decisions import log_bytes

        log = log_bytes(described, engine.core.requests, engine.recorder, engine.backend.moved)
    return RunResult(rows, described, timing, summary, log)


def _of_settings(simulation: Simulation, options: MetricsOptions) -> MetricsOptions:
    inputs = simulation.inputs
    objectives = parse_objectives(inputs.config.slo)
    options = replace(options, warmup=simulation.warmup, objectives=objectives)
    every = options.every_s is not None
    return options if every else replace(options, stages_s=inputs.workload.stages_s)


def describe_all(simulation: Simulation, options: MetricsOptions) -> dict:
    """Return the run.json of a run, before or after its start."""
    inputs, spec = simulation.inputs, simulation.spec
    return describe(inputs, spec, simulation.engines[0]) | {
        "fleet": simulation.fleet.described()
        | _sha256_of_routers(simulation.fleet)
        | ({"pools": [p.described(spec) for p in inputs.pools]} if inputs.pools else {}),
        "metrics": _of_settings(simulation, options).described(),
    }


def _check_options(options: MetricsOptions, workload: Workload) -> None:
    """Raise WorkloadError if a warm-up leaves no request, SettingsError for too many windows."""
    arrival = workload.arrival_s
    known = arrival[~np.isnan(arrival)]
    first, last = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if workload.pool is not None:
        first, last = 0.0, max(last, workload.pool.until_s or 0.0)
    if options.every_s is not None and (last - first) / options.every_s > MOST_WINDOWS:
        raise SettingsError(
            f"--metrics-every {options.every_s:g}: cuts {last - first:,.0f} s of arrivals into "
            f"more than {MOST_WINDOWS:,} windows; choose longer ones"
        )
    if options.every_s is None and len(workload.stages_s) > MOST_WINDOWS:
        raise SettingsError(
            f"the trace has more than {MOST_WINDOWS:,} stages, and metrics a window of each; "
            "choose fewer, or windows with --metrics-every"
        )
    warmup = options.warmup
    if warmup is None:
        return
    if warmup.requests is not None and warmup.requests >= len(workload):
        raise WorkloadError(warmup.too_long(f"there are {len(workload):,} requests"))
    # a later turn may come at any time
    if warmup.seconds is not None and len(known) == len(arrival) and last - first < warmup.seconds:
        raise WorkloadError(warmup.too_long(f"requests arrive for {last - first:,.4g} s"))


class Simulation:
    """The objects of one run: clock, fleet, source. decisions: keep every plan for a decision log.

    made_of   a description of each replica; by default `--replicas` times that of `inputs`, `spec`
    router    of requests; by default the router of the settings
    migrates  requests of a failed replica continue on another one (`Fleet`)
    offline_window  best-effort requests wait in the fleet; replicas with fewer requests pull
              families of them (`Fleet`)
    backend   makes a replica's backend; by default simulated ones
    engine_of  class of the replicas' engines
    warmup    of the metrics: its rows keep these gaps between tokens apart
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        report: Report | None = None,
        decisions: bool = False,
        *,
        made_of: Sequence[Description] | None = None,
        router: Router | None = None,
        migrates: bool = False,
        offline_window: int | None = None,
        clock: Clock | None = None,
        backend: BackendOf | None = None,
        engine_of: type[Engine] = Engine,
        warmup: Warmup | None = None,
    ) -> None:
        self.inputs = inputs
        self.warmup = warmup
        self.spec = replace(spec, kv=spec.kv or inputs.config.kv)
        self.decisions = decisions
        self._report = report
        self._ended = self._stepped = 0
        self._last_arrival_s = inputs.workload.last_arrival_s
        self.clock = clock or Clock()
        self._backend, self._engine_of = backend or SimulatedBackends(), engine_of
        router = router or parse_router(inputs.config.router).build()
        self.fleet = self._new_fleet(router, migrates, offline_window)
        if inputs.failures is not None or inputs.config.grace is not None:
            from twinserve.sim.setup.failures import resolve_recovery

            self.fleet.recovery = resolve_recovery(inputs.config)
        self.faults: Faults | None = None
        self._made_of: list[Description] = []  # by replica
        self._stores = HostStores()
        self._kinds: dict[int, tuple[Description, Inputs]] = {}  # by id of the description
        own = [kind for kind, count in kinds(inputs, spec) for _ in range(count)]
        for description in own if made_of is None else made_of:
            self.add(description)
        self.source = RequestSource(
            self.clock,
            inputs.workload,
            self.fleet,
            client_timeout_s=inputs.config.client_timeout,
            pool_objectives=pool_objectives(parse_objectives(inputs.config.slo)),
            front_end=inputs.delays or NO_DELAYS,
        )
        if inputs.failures is not None:
            from twinserve.sim.fleet.faults import Faults

            self.faults = Faults(
                self.clock, self.fleet, inputs.failures, self._again, lambda: self.source.over
            )
        if inputs.config.autoscale is not None:
            self._autoscale(inputs.config.autoscale)
        if report is not None:
            self.fleet.on_ended = self._counting(self.fleet.on_ended)

    def _new_fleet(self, router: Router, migrates: bool, offline_window: int | None) -> Fleet:
        hand_over = self.inputs.hand_over
        if hand_over is None:
            return Fleet(self.clock, (), router, migrates, offline_window)
        if offline_window is not None:
            raise SettingsError(
                "offline_window: offline requests are not simulated with separate prefill and "
                "decode; drop it"
            )
        return hand_over.fleet(self.clock, router, migrates)

    @property
    def engines(self) -> list[Engine]:
        """The engines of all replicas, by index."""
        return [replica.engine for replica in self.fleet.replicas]

    def add(self, description: Description, warm_up_s: float = 0.0) -> Replica:
        """Add a replica to the fleet now."""
        if id(description) not in self._kinds:  # estimators are fitted once for all of a kind
            self._kinds[id(description)] = description, description.inputs(self.inputs)
        replica = compose(
            self._kinds[id(description)][1],
            description,
            len(self.fleet.replicas),
            self.clock,
            backend=self._backend,
            decisions=self.decisions,
            timed=self.warmup is not None,
            stores=self._stores,
            engine_of=self._engine_of,
        )
        delays, profile = self.inputs.delays, description.hardware.profile
        # ranks have processes of their own, which launch (vllm/v1/executor/multiproc_executor.py)
        if delays is not None and delays.service is not None and profile.tp * profile.pp == 1:
            replica.engine.launch_s = delays.service.launch_s
        if self._report is not None:
            replica.engine.on_step = self._step
        self._made_of.append(description)
        self.fleet.add(replica, warm_up_s)
        return replica

    def _autoscale(self, text: str) -> None:
        from twinserve.sim.fleet.scaling import Autoscaler, parse_scaler
        from twinserve.sim.setup.demand import bounds_of, demand_of

        inputs, kind = self.inputs, self._made_of[0]
        Autoscaler(
            self.clock,
            self.fleet,
            parse_scaler(text),
            bounds_of(inputs.config),
            demand_of(inputs),
            partial(self._start, kind),
            lambda: self.source.over,
        )

    def _start(self, description: Description, start_up_s: float) -> Replica:
        """Start one more replica, which may crash like the first ones."""
        replica = self.add(description, start_up_s)
        if self.faults is not None:
            self.faults.joins(replica, self.clock.now + start_up_s)
        return replica

    def _again(self, replica: Replica, start_up_s: float) -> Replica:
        """Start a replica like this one."""
        return self.add(self._made_of[replica.index], start_up_s)

    def run(self) -> None:
        """Run to the end of the last request, or as a subclass's `_advance` does."""
        with collected_seldom():
            self._advance()

    def _advance(self) -> None:
        self.clock.run()

    def _counting(self, after: Callable[[list[Request]], None]) -> Callable[[list[Request]], None]:
        def count(requests: list[Request]) -> None:
            after(requests)
            self._ended += sum(request.group != self.source.pool_group for request in requests)

        return count

    def _step(self) -> None:
        """Count a step and report progress: a long time can pass before a request ends."""
        self._stepped += 1
        if self._stepped % _REPORT_STEPS == 0 and self._report is not None:
            self._report(self.progress())

    def progress(self) -> Progress:
        workload = self.inputs.workload
        return Progress(
            self.spec.label,
            self.clock.now,
            self._ended,
            self.source.submitted,
            len(workload),
            self._last_arrival_s,
        )

    def rows(self) -> RunRows:
        between = None if self.inputs.delays is None else self.source.between
        rows = fleet_rows(self.fleet, self.source.group_names, self.warmup, between)
        if self.faults is not None:
            from twinserve.sim.fleet.faults import failure_rows

            rows.failures = failure_rows(self.fleet, self.faults.happened)
        if self.inputs.config.autoscale is not None and rows.replicas is not None:
            rows.replicas[GPUS] = self.inputs.hardware.profile.gpus
        return rows


def effective(inputs: Inputs, spec: PolicySpec) -> SimulationConfig:
    """Return the settings of `spec`'s run that some replica uses; valid as input."""
    config = inputs.config
    used = [description.spec for description, _ in kinds(inputs, spec)]
    changes: dict = {"policy": (spec.text,)}
    if not any(one.uses_estimator for one in used):
        changes["estimator"] = "paper"
    if config.prefix_caching and not any(one.policy.uses_prefix_cache for one in used):
        changes["prefix_caching"] = None
    return config.model_copy(update=changes)


def describe(inputs: Inputs, spec: PolicySpec, engine: Engine) -> dict:
    """Return run.json: all that is needed to understand and repeat the run."""
    hardware, workload = inputs.hardware, inputs.workload
    policy, ledger = engine.core.policy, engine.core.ledger
    digest = file_sha256(spec.policy)  # of `config`: a pool may have another policy
    reader = reader_sha256(inputs.config.format)
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
            **({"reader_file_sha256": reader} if reader else {}),
            "requests": len(workload),
            "pool": None if workload.pool is None else asdict(workload.pool),
        },
        "profile": hardware.profile.model_dump(mode="json"),
        "step_times": [recorded(one.profile) for one, _ in inputs.machines],
        **({} if inputs.front_end is None else {"front_end": asdict(inputs.front_end)}),
        "notices": list(inputs.notices),
        "config": effective(inputs, spec).model_dump(mode="json"),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("twinserve", "numpy", "pandas", "simpy")},
        },
    }


def _sha256_of_routers(fleet: Fleet) -> dict[str, str]:
    """Return the hashes of the routers' files, if any."""
    routers = {"router": fleet.router}
    if (prefill := getattr(fleet, "prefill_router", None)) is not None:  # of `Disaggregated`
        routers["prefill_router"] = prefill
    found = {f"{name}_file_sha256": file_sha256(type(one)) for name, one in routers.items()}
    return {name: digest for name, digest in found.items() if digest}


@cache
def _version(name: str) -> str:
    """Return an installed package's version, cached: the look-up takes a tenth of a short run."""
    return version(name)
