"""Stage `validate` of a campaign: for windows of traces at several loads, each policy simulated, replayed in lock-step
on the engine, and run free on it, again and again. Every run is on disk as soon as it is over."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ..backends.live.prompts import PromptTexts
from ..policies.registry import PolicySpec
from ..policies.requests import RequestClass
from ..sim.config import SimulationConfig
from ..sim.decisions import parse_log
from ..sim.inputs import Inputs, resolve, resolve_hardware, service_seconds
from ..sim.live import LiveRun
from ..sim.replay import LockedReplay, replay_locked
from ..sim.results import RunResult, read_run, write_run
from ..sim.run import run_policy, run_simulation
from ..sim.validate import Validation
from ..traces.load import load_trace
from ..traces.transform import cap_length, head
from .campaign_setup import MODEL_SIZES, Deadline, Engines, OutOfTime, Store, clear
from .campaign_steps import PROFILES, make_profile, mode_name

RUNS = "runs"
BEST_EFFORT_EVERY = 3  # this share of the requests is best-effort: BROS is about both kinds
FEWEST = 16
_SLACK = 1.2  # a run may take that much longer than simulated
_OVERHEAD_S = 3.0


@dataclass(frozen=True)
class Cell:
    """One workload under one policy. load: share of the estimated capacity; seconds: length of the window then."""

    trace: str
    load: float
    policy: str
    seconds: float

    @property
    def name(self) -> str:
        policy = "".join(c if c.isalnum() else "-" for c in self.policy)
        return f"{self.trace}-{round(100 * self.load)}-{policy}"


@dataclass(frozen=True)
class Plan:
    """What is run. loads: the first two matter most."""

    traces: dict[str, Path]
    loads: tuple[float, ...]
    policies: tuple[str, ...]
    seconds: float
    repeats: int

    def units(self) -> list[tuple[Cell, str]]:
        """(cell, "locked" or "live-N") in order of worth."""

        def cells(load: float) -> list[Cell]:
            return [Cell(trace, load, policy, self.seconds) for trace in self.traces for policy in self.policies]

        def of(loads: tuple[float, ...], *parts: str) -> list[tuple[Cell, str]]:
            return [(cell, part) for load in loads for part in parts for cell in cells(load)]

        again = [f"live-{number}" for number in range(2, self.repeats + 1)]
        main, others = self.loads[:2], self.loads[2:]
        return [
            *of(main, "locked", "live-1"),
            *of(main[:1], *again),
            *of(others, "locked", "live-1"),
            *of(main[1:] + others, *again),
        ]


def inputs_of(
    key: str, cell: Cell, trace: Path, profile: str, rate_scale: float | None = None, requests: int = 0
) -> Inputs:
    """The workload of `cell` on `profile`, every third request best-effort. rate_scale and requests: as chosen
    before, with the profile that the runs were planned on."""
    size = MODEL_SIZES[key]
    config = SimulationConfig(
        policy=(cell.policy,),
        trace=str(trace),
        profile=profile,
        requests=requests or None,
        rate_scale=rate_scale or 1.0,
        cap_length=size.cap_tokens,
        block_tokens=size.block_tokens,
        num_blocks=size.ledger_blocks,
        host_blocks=size.host_blocks,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.budget_tokens,
    )
    if rate_scale is None:
        requests, rate_scale = _chosen(config, cell, trace)
        return inputs_of(key, cell, trace, profile, rate_scale, requests)
    inputs = resolve(config)
    workload = inputs.workload
    kinds = np.full(len(workload), RequestClass.REAL_TIME, workload.klass.dtype)
    kinds[BEST_EFFORT_EVERY - 1 :: BEST_EFFORT_EVERY] = RequestClass.BEST_EFFORT
    return replace(inputs, workload=replace(workload, klass=kinds))


def _chosen(config: SimulationConfig, cell: Cell, trace: Path) -> tuple[int, float]:
    """(requests, rate scale) such that the window has the cell's load and length."""
    hardware = resolve_hardware(config)
    workload = cap_length(load_trace(trace, seed=config.seed), config.cap_length)
    each = service_seconds(workload, hardware) / len(workload)
    count = min(len(workload), max(FEWEST, round(cell.seconds * cell.load / each)))
    workload = head(workload, count)
    scale = cell.load * workload.span_s / service_seconds(workload, hardware)
    return count, float(f"{scale:.3g}")


def validate(
    store: Store, engines: Engines, key: str, graphs: bool, deadline: Deadline, plan: Plan, swap: bool = True, **extra
) -> None:
    """All units of `plan` that the time allows; those that are there already are left out."""
    profile = store.folder / PROFILES / f"{mode_name(key, graphs)}.json"
    if not profile.exists() and make_profile(store, key, graphs) is None:
        return
    todo = [(cell, part) for cell, part in plan.units() if not _done(store, key, graphs, cell, part)]
    if not todo:
        store.say("validate: all runs are there")
        return
    if deadline.near:
        store.say(f"validate: {deadline.left:.0f} s are too few")
        return
    engine = engines.get(key, graphs, swap, extra)
    engine.scheduler.can_adopt = False  # hits must be hits from now on
    engine.warm_up()
    prepared: dict[Cell, _Prepared] = {}
    for cell, part in todo:
        if cell not in prepared:
            try:
                prepared[cell] = _Prepared(store, key, graphs, cell, plan.traces[cell.trace], profile, engine)
            except Exception as error:  # noqa: BLE001 - another policy or trace may do
                store.failed(cell.name, error)
                prepared[cell] = None
        if (ready := prepared[cell]) is None:
            continue
        if deadline.left < ready.longest_s:
            store.say(f"{cell.name} {part}: {ready.longest_s:.0f} s, and {deadline.left:.0f} s are left")
            continue
        begun = time.monotonic()
        clear(engine)
        try:
            said = ready.locked(deadline) if part == "locked" else ready.live(part, deadline)
        except OutOfTime:
            store.say(f"{cell.name} {part}: out of time")
        except Exception as error:  # noqa: BLE001
            store.failed(f"{cell.name} {part}", error)
        else:
            store.say(f"{cell.name} {part}: {time.monotonic() - begun:.1f} s, {said}")
        finally:
            store.saved(RUNS)
    clear(engine)


def _done(store: Store, key: str, graphs: bool, cell: Cell, part: str) -> bool:
    folder = store.folder / RUNS / mode_name(key, graphs) / cell.name
    return (folder / ("locked.json" if part == "locked" else f"{part}/run.json")).exists()


class _Prepared:
    """A cell with its simulated run, ready for the engine."""

    def __init__(self, store: Store, key: str, graphs: bool, cell: Cell, trace: Path, profile: Path, engine) -> None:
        self.store, self.engine = store, engine
        self.names = (RUNS, mode_name(key, graphs), cell.name)
        known = store.read(*self.names, "cell.json")
        kept = store.path(*self.names, "profile.json")
        if known is None:
            kept.write_bytes(
                profile.read_bytes()
            )  # the plan of all runs of this cell, also after more steps were measured
            self.inputs = inputs_of(key, cell, trace, str(kept))
            chosen = self.inputs.config
            known = {
                **asdict(cell),
                "rate_scale": chosen.rate_scale,
                "requests": chosen.requests,
                "vllm": engine.version,
            }
            store.write(known, *self.names, "cell.json")
        else:
            self.inputs = inputs_of(key, cell, trace, str(kept), known["rate_scale"], known["requests"])
        (self.spec,) = self.inputs.policies
        simulated = run_policy(self.inputs, self.spec, decisions=True)
        self.log = parse_log(simulated.decisions)
        if not (store.folder.joinpath(*self.names) / "simulated").exists():
            write_run(store.path(*self.names, "simulated"), replace(simulated, decisions=None))
        self.texts = PromptTexts(engine.vocab, engine.settings.block_tokens, self.inputs.config.seed)
        self.longest_s = _SLACK * float(simulated.rows.steps["end_s"].max()) + _OVERHEAD_S
        longest = max((sum(step.grants.values()) for step in self.log.steps), default=0)
        if longest > engine.settings.max_step_tokens:
            raise ValueError(f"{self.spec.label} plans steps of {longest} tokens, the engine has room for "
                             f"{engine.settings.max_step_tokens}: give the policy a chunk")  # fmt: skip

    def locked(self, deadline: Deadline) -> str:
        """Decisions of the simulation, step by step on the engine."""

        def watch(done: int, total: int) -> None:
            if deadline.left < 0:
                raise OutOfTime

        found = replay_locked(self.log, self.engine, self.texts, watch)
        target = self.store.path(*self.names, "locked.parquet")
        partial = target.with_name(f".{target.name}.partial")
        found.steps.to_parquet(partial, index=False)
        partial.replace(target)
        facts = {"first_drift": found.first_drift, "drift": found.drift, "evictions": found.evictions, **found.error()}
        self.store.write(facts, *self.names, "locked.json")
        return (
            f"{len(found.steps):,} steps, drift {found.drift}, {found.error()['mean_absolute_error_pct']:.1f} % a step"
        )

    def live(self, part: str, deadline: Deadline) -> str:
        """The policy on the live engine, requests arriving in wall time."""
        run = LiveRun(self.inputs, self.spec, self.engine, wall=True, texts=self.texts)
        for request in self.log.requests:  # drawing prompts is no part of a run
            self.texts.tokens(request.id, request.prompt_tokens, request.prefix)

        def watch(answer) -> None:
            if deadline.left < 0:
                raise OutOfTime

        run.backend.on_answer = watch
        result = run_simulation(run)
        result.config["live"] = run.described()
        write_run(self.store.path(*self.names, part), result)
        return (
            f"drift {run.live.scheduler.drift}, mean TPOT {result.summary.get('mean_tpot_ms') or float('nan'):.2f} ms"
        )


@dataclass(frozen=True)
class Finished:
    """What came of one cell. cell: cell.json; live: free runs in order; locked may be missing."""

    folder: Path
    cell: dict
    simulated: RunResult
    live: list[RunResult]
    locked: LockedReplay | None

    def validation(self) -> Validation:
        """As `twinserve validate` has it."""
        said = [result.config["live"] for result in self.live]
        missing = said[0].get("not_made", {}) if said else {}  # of every run the same; older ones do not say
        drift = sum(one["drift"] for one in said)
        return Validation(PolicySpec(self.cell["policy"]), self.simulated, self.locked, self.live, drift, missing)


def finished(store: Store, key: str, graphs: bool) -> list[Finished]:
    """Every cell that has a simulated run and anything from the engine."""
    found = []
    for folder in sorted((store.folder / RUNS / mode_name(key, graphs)).glob("*")):
        cell = store.read(*folder.relative_to(store.folder).parts, "cell.json")
        if cell is None or not (folder / "simulated").exists():
            continue
        live = [read_run(path.parent) for path in sorted(folder.glob("live-*/run.json"))]
        locked, facts = None, store.read(*folder.relative_to(store.folder).parts, "locked.json")
        if facts is not None:
            steps = pd.read_parquet(folder / "locked.parquet")
            locked = LockedReplay(steps, {}, facts["first_drift"], facts["evictions"], [])
        if live or locked is not None:
            found.append(Finished(folder, cell, read_run(folder / "simulated"), live, locked))
    return found
