"""Stages `plan` and `validate` of a campaign: windows of traces at several loads. `plan` simulates
each policy, without a GPU. `validate` simulates nothing: it replays the policy in lock-step on the
engine, then runs it free, repeatedly. Every run is on disk as soon as it is over."""

import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.experiments.campaign.setup import (
    LEAST_S,
    MODEL_SIZES,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    clear,
    mode_name,
)
from twinserve.experiments.campaign.steps import PROFILES
from twinserve.policies.registry import PolicySpec, parse_policy
from twinserve.policies.requests import RequestClass
from twinserve.profiles.profile import Profile, load_profile, save_profile
from twinserve.sim.results.decisions import FILE as DECISIONS
from twinserve.sim.results.decisions import parse_log, read_log
from twinserve.sim.results.files import RunResult, read_run, write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.replicas import make_policy
from twinserve.sim.setup.run import run_policy, run_simulation
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import LockedReplay, replay_locked
from twinserve.sim.twin.validate import Validation, with_loop_time
from twinserve.traces.load import load_trace
from twinserve.traces.transform import cap_length, head

RUNS = "runs"
BEST_EFFORT_EVERY = 3  # this share of the requests is best-effort: BROS is about both kinds
FEWEST = 16
_SLACK = 1.2  # a run may take that much longer than simulated
_OVERHEAD_S = 3.0


@dataclass(frozen=True)
class Cell:
    """One workload under one policy. load: share of the estimated capacity; seconds: length of the
    window then."""

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
    """What is run. loads, policies: the first two matter most."""

    traces: dict[str, Path]
    loads: tuple[float, ...]
    policies: tuple[str, ...]
    seconds: float
    repeats: int

    def cells(self) -> list[Cell]:
        """Every cell, in order of worth."""
        return list(dict.fromkeys(cell for cell, _ in self.units()))

    def units(self) -> list[tuple[Cell, str]]:
        """(cell, "locked" or "live-N") in order of worth."""

        def of(loads: tuple[float, ...], policies: tuple[str, ...], *parts: str):
            return [
                (Cell(trace, load, policy, self.seconds), part)
                for load in loads
                for part in parts
                for policy in policies
                for trace in self.traces
            ]

        again = [f"live-{number}" for number in range(2, self.repeats + 1)]
        main, others = self.loads[:2], self.loads[2:]
        first, more = self.policies[:2], self.policies[2:]
        return [
            *of(main, first, "locked", "live-1"),
            *of(main[:1], first, *again),
            *of(others, first, "locked", "live-1"),
            *of(main[:1], more, "locked", "live-1"),
            *of(main[1:] + others, first, *again),
            *of(main[:1], more, *again),
            *of(main[1:] + others, more, "locked", "live-1", *again),
        ]


def inputs_of(
    key: str,
    cell: Cell,
    trace: Path,
    profile: str,
    rate_scale: float | None = None,
    requests: int = 0,
) -> Inputs:
    """The workload of `cell` on `profile`, every third request best-effort. rate_scale and
    requests: as chosen before, with the profile that the runs were planned on."""
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
        async_scheduling=False,  # as the engine in this process
    )
    if rate_scale is None:
        requests, rate_scale = _chosen(config, cell, trace)
        return inputs_of(key, cell, trace, profile, rate_scale, requests)
    inputs = resolve(config)
    workload = inputs.workload
    kinds = np.full(len(workload), RequestClass.REAL_TIME, workload.service_class.dtype)
    kinds[BEST_EFFORT_EVERY - 1 :: BEST_EFFORT_EVERY] = RequestClass.BEST_EFFORT
    return replace(inputs, workload=replace(workload, service_class=kinds))


def _chosen(config: SimulationConfig, cell: Cell, trace: Path) -> tuple[int, float]:
    """(requests, rate scale) such that the window has the cell's load and length."""
    hardware = resolve_hardware(config)
    workload = cap_length(load_trace(trace, seed=config.seed), config.cap_length)
    each = service_seconds(workload, hardware) / len(workload)
    count = min(len(workload), max(FEWEST, round(cell.seconds * cell.load / each)))
    workload = head(workload, count)
    scale = cell.load * workload.span_s / service_seconds(workload, hardware)
    return count, float(f"{scale:.3g}")


# -- before, without an engine ---------------------------------------------------------------------
def plan_runs(store: Store, key: str, graphs: bool, plan: Plan) -> None:
    """Simulate every cell of `plan`, and keep what `validate` needs. On the measured profile, if
    there is one, else on the first shipped one; cells that ran on the engine keep their plan.
    Raises StageError if no cell can be planned."""
    measured = store.folder / PROFILES / f"{mode_name(key, graphs)}.json"
    profile = load_profile(measured if measured.exists() else MODEL_SIZES[key].shipped[0])
    wrong, cells = [], plan.cells()
    for cell in cells:
        folder = store.path(*_names(key, graphs, cell), DECISIONS).parent
        if (folder / "locked.json").exists() or any(folder.glob("live-*/run.json")):
            continue
        shutil.rmtree(folder, ignore_errors=True)  # of another profile, perhaps
        try:
            facts = _plan_cell(folder, key, cell, plan.traces[cell.trace], profile)
        except Exception as error:  # noqa: BLE001 - another policy or trace may do
            shutil.rmtree(folder, ignore_errors=True)
            store.failed(cell.name, error)
            wrong.append(error)
        else:
            store.write(facts, *_names(key, graphs, cell), "cell.json")  # with it the plan is whole
            store.say(f"{cell.name}: {facts['requests']} requests, {facts['planned_s']:.0f} s")
    if cells and len(wrong) == len(cells):
        raise StageError(f"no run can be planned; the first: {wrong[0]}")


def _plan_cell(folder: Path, key: str, cell: Cell, trace: Path, profile: Profile) -> dict:
    """Simulate `cell` on `profile`; the files of its plan, and what cell.json is to say."""
    save_profile(profile, folder / "profile.json")
    inputs = inputs_of(key, cell, trace, str(folder / "profile.json"))
    (spec,) = inputs.policies
    expected = with_loop_time(inputs)
    loop_s = 0.0 if expected is inputs else profile.loop_s
    simulated = run_policy(expected, spec, decisions=True)
    decisions = simulated.decisions or b""
    log = parse_log(decisions)
    _check_room(inputs, spec, log.step_tokens, key)
    write_run(folder / "simulated", replace(simulated, decisions=None))
    (folder / DECISIONS).write_bytes(decisions)
    return {
        **asdict(cell),
        "rate_scale": inputs.config.rate_scale,
        "requests": inputs.config.requests,
        "planned_on": f"{profile.name}, {profile.source}",
        "planned_s": float(simulated.rows.steps["end_s"].max()),
        "planned_busy_s": sum(step.seconds - loop_s for step in log.steps),
        "loop_s": loop_s,
    }


def _check_room(inputs: Inputs, spec: PolicySpec, planned: int, key: str) -> None:
    """Raises ValueError if a step of `planned` tokens, or one that a free run may plan, is more
    than the engine computes at once."""
    size, longest = MODEL_SIZES[key], inputs.workload.longest
    chunk = spec.options.get("chunk")
    if isinstance(chunk, int):
        most = size.budget_tokens + min(chunk, longest)
    else:  # none given, or one that the policy chooses itself
        most = make_policy(inputs, spec).step_tokens(longest)
    if max(planned, most) > size.max_step_tokens:
        raise ValueError(
            f"{spec.label} may plan steps of {max(planned, most)} tokens, the engine has room for "
            f"{size.max_step_tokens}: give it a smaller chunk or max_num_batched_tokens"
        )


# -- on an engine ----------------------------------------------------------------------------------
def validate(
    store: Store,
    engines: Engines,
    key: str,
    graphs: bool,
    deadline: Deadline,
    plan: Plan,
    swap: bool = True,
    **extra,
) -> None:
    """All units of `plan` that the time allows; those that are there already are left out. swap:
    for policies that may swap. Raises StageError where none is planned, or every one failed."""
    todo = [unit for unit in plan.units() if not _done(store, key, graphs, *unit)]
    if not todo:
        store.say("validate: all runs are done already")
        return
    known = {cell: store.read(*_names(key, graphs, cell), "cell.json") for cell, _ in todo}
    for cell in (cell for cell, facts in known.items() if facts is None):
        store.say(f"{cell.name}: skipped, not planned")
    todo = [(cell, part) for cell, part in todo if known[cell] is not None]
    if not todo:
        raise StageError("no run is planned: run stage plan first; it needs no GPU")
    wanted = {parse_policy(cell.policy).name for cell, _ in todo}
    engine = engines.get(key, graphs, swap and wanted != {"vllm"}, extra, deadline)
    engine.scheduler.can_adopt = False  # hits must be hits from now on
    engine.warm_up()
    prepared: dict[Cell, _Prepared] = {}
    tried, wrong = 0, []
    for cell, part in todo:
        # a locked replay jumps over idle time
        expected_s = known[cell]["planned_busy_s" if part == "locked" else "planned_s"]
        longest_s = max(_SLACK * expected_s + _OVERHEAD_S, LEAST_S)
        if deadline.left < longest_s:
            store.say(f"{cell.name} {part}: needs {longest_s:.0f} s, has {deadline.left:.0f} s")
            continue
        begun = time.monotonic()
        tried += 1
        try:
            if cell not in prepared:
                trace = plan.traces[cell.trace]
                prepared[cell] = _Prepared(store, key, graphs, cell, known[cell], trace, engine)
            clear(engine)
            run = prepared[cell]
            said = run.locked(deadline) if part == "locked" else run.live(part, deadline)
        except OutOfTime:
            store.say(f"{cell.name} {part}: out of time")
        except Exception as error:  # noqa: BLE001 - another policy or trace may do
            store.failed(f"{cell.name} {part}", error)
            wrong.append(error)
        else:
            store.say(f"{cell.name} {part}: {time.monotonic() - begun:.1f} s, {said}")
    clear(engine)
    if wrong and len(wrong) == tried:
        raise StageError(f"all {tried} runs failed; the first: {wrong[0]}")


def _names(key: str, graphs: bool, cell: Cell) -> tuple[str, str, str]:
    return RUNS, mode_name(key, graphs), cell.name


def _done(store: Store, key: str, graphs: bool, cell: Cell, part: str) -> bool:
    folder = store.folder.joinpath(*_names(key, graphs, cell))
    return (folder / ("locked.json" if part == "locked" else f"{part}/run.json")).exists()


class _Prepared:
    """A planned cell, ready for the engine."""

    def __init__(
        self, store: Store, key: str, graphs: bool, cell: Cell, known: dict, trace: Path, engine
    ) -> None:
        self.store, self.engine, self.names = store, engine, _names(key, graphs, cell)
        self.loop_s = known.get("loop_s", 0.0)  # plans of older campaigns have none
        folder = store.folder.joinpath(*self.names)
        profile, chosen = str(folder / "profile.json"), (known["rate_scale"], known["requests"])
        self.inputs = inputs_of(key, cell, trace, profile, *chosen)
        (self.spec,) = self.inputs.policies
        self.log = read_log(folder / DECISIONS)
        self.texts = PromptTexts(
            engine.vocab, engine.settings.block_tokens, self.inputs.config.seed
        )

    def locked(self, deadline: Deadline) -> str:
        """Decisions of the simulation, step by step on the engine."""

        found = replay_locked(self.log, self.engine, self.texts, deadline.look)
        found = found.without_loop(self.loop_s)
        target = self.store.path(*self.names, "locked.parquet")
        partial = target.with_name(f".{target.name}.partial")
        found.steps.to_parquet(partial, index=False)
        partial.replace(target)
        names, error = ("first_drift", "drift", "evictions"), found.error()
        facts = {name: getattr(found, name) for name in names}
        self.store.write(facts | error, *self.names, "locked.json")
        step = error["mean_absolute_error_pct"]
        return f"{len(found.steps):,} steps, drift {found.drift}, {step:.1f} % a step"

    def live(self, part: str, deadline: Deadline) -> str:
        """The policy on the live engine, requests arriving in wall time."""
        run = LiveRun(self.inputs, self.spec, self.engine, wall=True, texts=self.texts)
        for request in self.log.requests:  # drawing prompts is no part of a run
            self.texts.tokens(request.id, request.prompt_tokens, request.prefix)

        run.backend.on_answer = deadline.look
        result = run_simulation(run)
        result.config["live"] = run.described()
        write_run(self.store.path(*self.names, part), result)
        tpot = result.summary.get("mean_tpot_ms") or float("nan")
        return f"drift {run.live.scheduler.drift}, mean TPOT {tpot:.2f} ms"


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
        # of every run the same; older ones do not say
        missing = said[0].get("not_made", {}) if said else {}
        drift = sum(one["drift"] for one in said)
        return Validation(
            PolicySpec(self.cell["policy"]), self.simulated, self.locked, self.live, drift, missing
        )


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
