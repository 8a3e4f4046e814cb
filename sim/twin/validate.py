"""Simulation and reality: one workload, run by the simulator and by a live engine, and the
differences.

For each policy: a simulated run; a locked replay of its decisions on the engine (step times, free
of scheduling differences); repeated free runs, whose spread decides which differences count.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from twinserve.backends.counts import Counts, not_made
from twinserve.backends.live.engine.engine import VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.versions import LiveEngineError
from twinserve.errors import worded
from twinserve.formats import whole_file
from twinserve.policies.registry import PolicySpec
from twinserve.profiles.measured.disturbed import NOISY, disturbed_beside, lost, slowdown
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.folders import folders, resolved
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Progress, Simulation, run_simulation
from twinserve.sim.twin.limit import TimeLimit, TimeUp
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import LockedReplay, replay_locked, together
from twinserve.sim.twin.stability import IdleSeats, Parts, Schedule, nudged, parts_beside, parts_of


class KeptSteps:
    """out: the folder of the validation; None: nothing is kept. files: what is kept, in order."""

    def __init__(self, out: Path | None) -> None:
        out = None if out is None else resolved(out)
        self.folder = None if out is None else out.with_name(f"{out.name}.steps")
        self.files: list[Path] = []
        self._labels: list[str] = []

    def keep(self, policy: str, kind: str, number: int, steps: pd.DataFrame) -> None:
        """A run's steps, whole or not at all. OSError if they cannot be written."""
        if self.folder is None:
            return
        if policy not in self._labels:
            self._labels.append(policy)
        path = self.folder / f"{folders(self._labels)[policy]}-{kind}-{number}.parquet"
        with whole_file(path) as partial:
            steps.to_parquet(partial, index=False)
        self.files.append(path)

    def drop(self) -> None:
        """Delete the steps; other files next to them stay."""
        for path in self.files:
            path.unlink(missing_ok=True)
        if self.files and self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        self.files = []

    @contextlib.contextmanager
    def told_where(self) -> Iterator[None]:
        """Print the path of the kept steps if the work inside ends early."""
        try:
            yield
        except BaseException:
            if self.files:
                print(f"note: the steps of the runs that ended: {self.folder}", file=sys.stderr)
            raise


# (metric of summary.json, unit, aim in percent); the aim counts where the live runs repeat each
# other more closely
LATENCIES = {"ttft": 10.0, "tpot": 5.0, "itl": 5.0, "e2el": 5.0}
STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUTS = {"request_throughput": 5.0, "output_throughput": 5.0}
STEP_TIME_AIM_PCT = 5.0


@dataclass(frozen=True)
class Validation:
    """One policy: simulated, locked, and live as often as it was repeated.

    not_made   of the moves in the decision log, those that the engine has no mechanism for, by kind
    set_aside  live runs that were run again, since others disturbed them, and are not in `live`
    partial    what the time limit left out; empty: nothing
    schedule   what the error of the free runs is made of; None: not looked at
    """

    spec: PolicySpec
    simulated: RunResult
    locked: LockedReplay
    live: list[RunResult]
    drift: int
    not_made: Counts
    set_aside: int = 0
    partial: str = ""
    schedule: Schedule | None = None

    def noise(self) -> list[str]:
        """What is to be known of the measurements before their errors are read; empty if they
        are whole and were hardly disturbed."""
        lines = []
        locked, live = self.locked.noise(), [disturbed_share(result) for result in self.live]
        if locked and (locked["disturbed_pct"] > 100 * NOISY or locked["never_calm_pct"]):
            lines.append(
                f"other programs disturbed {locked['disturbed_pct']:.0f} % of the locked "
                f"measurements; {locked['never_calm_pct']:.0f} % of the steps have no other"
            )
        if noisy := [share for share in live if share > NOISY]:
            lines.append(
                f"other programs disturbed {len(noisy)} of {len(live)} live runs, steps of up to "
                f"{max(noisy):.0%} of their time: their latencies say nothing of the simulation; "
                "validate again on a quiet machine"
            )
        if self.set_aside:
            lines.append(f"{self.set_aside} live runs were disturbed more, and set aside")
        if self.partial:
            lines.append(f"partial, as the time was up: {self.partial}")
        return lines

    def table(self) -> pd.DataFrame:
        """One row a metric and statistic: metric, statistic, simulated; live (mean of the repeats);
        error_pct; spread_pct (largest distance of a repeat from their mean); aim_pct (NaN: none is
        set); within (error inside the larger of aim and spread)."""
        rows = []
        for metric, aim in LATENCIES.items():
            for statistic in STATISTICS:
                name = f"{statistic}_{metric}_ms"
                rows.append(
                    self._row(metric, statistic, name, aim if statistic == "mean" else np.nan)
                )
        for metric, aim in THROUGHPUTS.items():
            rows.append(self._row(metric, "", metric, aim))
        return pd.DataFrame([row for row in rows if row is not None])

    def _row(self, metric: str, statistic: str, name: str, aim: float) -> dict | None:
        ours = self.simulated.summary.get(name)
        theirs = [result.summary.get(name) for result in self.live]
        if ours is None or None in theirs or not theirs:
            return None
        mean = float(np.mean(theirs))
        error = 100 * (ours / mean - 1)
        spread = 100 * float(np.max(np.abs(np.array(theirs) / mean - 1)))
        return {
            "metric": metric,
            "statistic": statistic,
            "simulated": ours,
            "live": mean,
            "error_pct": error,
            "spread_pct": spread,
            "aim_pct": aim,
            "within": bool(abs(error) <= np.nanmax([aim, spread])),
        }

    def summary(self) -> dict:
        """As plain values, for validation.json."""
        return {
            "policy": self.spec.label,
            "locked": {
                "steps": len(self.locked.steps),
                "drift": self.locked.drift,
                "not_made": self.not_made,
                **self.locked.error(),
            },
            "free": {
                "repeats": len(self.live),
                "set_aside": self.set_aside,
                "disturbed_pct": [100 * disturbed_share(result) for result in self.live],
                "drift": self.drift,
                "not_made": [result.config["live"]["not_made"] for result in self.live],
            },
            "schedule": self.schedule and self.schedule.summary(),
            "notes": self.noise(),
            "partial": self.partial,
            "metrics": self.table().to_dict("records"),
        }


class Watch(Protocol):
    """Receives the progress of each run of a validation."""

    def begin(self, label: str) -> None: ...

    def report(self, state: Progress) -> None: ...

    def steps(self, done: int, total: int) -> None: ...


Keep = Callable[[str, str, int, pd.DataFrame], None]  # policy, "locked" or "live", number, steps


def validate_policy(
    inputs: Inputs,
    spec: PolicySpec,
    engine: VllmEngine,
    repeats: int,
    wall: bool,
    say: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
    limit: TimeLimit | None = None,
    keep: Keep = lambda policy, kind, number, steps: None,
) -> Validation:
    """Simulate, lock, repeat: locked and live by turns, so that disturbances of the machine affect
    both. In wall time the simulation has the time of our own loop, if the profile has it. Disturbed
    runs are repeated, at most as often again. The engine must have the sizes of `live_settings` for
    this policy, and no requests. say: a line for each run; watch: its progress; keep: receives the
    steps of each ended run. Raises LiveEngineError if a run drifts, or loses or shortens an answer,
    and TimeUp if the time is up before a locked replay has ended."""
    limit = limit or TimeLimit()
    texts = PromptTexts(engine.vocab, engine.settings.block_tokens, inputs.config.seed)
    begin = watch.begin if watch else lambda label: None
    begin(f"{spec.label} simulated")
    report = limit.around(watch.report if watch else None)
    expected = with_loop_time(inputs) if wall else inputs
    loop_s = 0.0 if expected is inputs else inputs.hardware.profile.loop_s
    simulation = Simulation(expected, spec, report, decisions=True)
    idle = IdleSeats(simulation.engines[0].core)
    simulated = run_simulation(simulation)
    usual = parts_of(simulated, idle.seats)
    log = parse_log(simulated.decisions)
    replays: list[LockedReplay] = []
    live: list[RunResult] = []
    parts: list[Parts] = []  # of each of these

    def lock() -> None:
        number = len(replays) + 1
        say(f"{spec.label}: locked replay {number} of {len(log.steps):,} steps")
        _forget(engine)
        begin(f"{spec.label} locked")
        steps = limit.around(watch.steps if watch else None)
        found = replay_locked(log, engine, texts, steps).without_loop(loop_s)
        _refuse(f"locked replay {number}", found.parted)
        keep(spec.label, "locked", number, found.steps)
        replays.append(found)

    def run_free() -> None:
        number = len(live) + 1
        say(f"{spec.label}: live run {number}")
        _forget(engine)
        begin(f"{spec.label} live")
        run = LiveRun(inputs, spec, engine, report, wall, texts)
        idle = IdleSeats(run.engines[0].core)
        result = run_simulation(run)
        steps = pd.DataFrame([step.row() for step in run.backend.steps])
        noisy = disturbed_live(steps, together(replays), engine.on_one_core)
        keep(spec.label, "live", number, steps.assign(disturbed=noisy))
        spent = steps["measured_s"].to_numpy(np.float64)
        share = float(spent[noisy].sum() / spent.sum()) if len(spent) else 0.0
        result.config["live"] = run.described() | {"disturbed_share": share}
        parts.append(parts_beside(simulated, result, steps, idle.seats, loop_s))
        _refuse(f"live run {number}", result.config["live"]["parted"])
        live.append(result)

    partial = _by_turns(lock, run_free, replays, live, repeats, limit)
    drift = sum(result.config["live"]["drift"] for result in live)
    calmest = sorted(sorted(range(len(live)), key=lambda i: disturbed_share(live[i]))[:repeats])
    return Validation(
        spec,
        simulated,
        together(replays),
        [live[i] for i in calmest],
        drift,
        not_made(log.moved, engine.settings.physical),
        len(live) - len(calmest),
        partial,
        Schedule(usual, [parts[i] for i in calmest], nudged(expected, spec, simulated)),
    )


def with_loop_time(inputs: Inputs) -> Inputs:
    """Delay the steps of `inputs` as in a live run in wall time, by our own loop between two steps.
    Unchanged if the profile does not know that time, or --decision-time asks for another one."""
    if inputs.config.decision_time != "none" or not inputs.hardware.profile.loop_s:
        return inputs
    config = inputs.config.model_copy(update={"decision_time": "profile"})
    return replace(inputs, config=config)


def _by_turns(
    lock: Callable[[], None],
    run_free: Callable[[], None],
    replays: list[LockedReplay],
    live: list[RunResult],
    repeats: int,
    limit: TimeLimit,
) -> str:
    """Fill `replays` and `live`. Returns what the limit left out. Raises TimeUp if all."""
    try:
        for _ in range(repeats):
            lock()
            run_free()
        while len(replays) < 2 * repeats and _unsettled(replays):
            lock()
        while len(live) < 2 * repeats and _calm(live) < repeats:
            run_free()
    except TimeUp:
        if not replays:
            raise
        ended = min(len(replays), repeats), min(len(live), repeats)
        if min(ended) < repeats:
            return f"{ended[0]} of {repeats} locked replays, {ended[1]} of {repeats} live runs"
        return "disturbed runs were not run again as often as they may be"
    return ""


def _unsettled(replays: list[LockedReplay]) -> bool:
    return together(replays).noise()["never_calm_pct"] > 100 * NOISY


def _calm(live: list[RunResult]) -> int:
    return sum(disturbed_share(result) <= NOISY for result in live)


def disturbed_share(result: RunResult) -> float:
    """The share of a live run's engine time that went into steps which others disturbed."""
    return result.config["live"].get("disturbed_share", 0.0)


def disturbed_live(steps: pd.DataFrame, locked: LockedReplay, on_one_core: bool) -> np.ndarray:
    """Return bool[steps] of a live run (`TimedStep.row`): others had the core, or many steps on end
    took longer than predictions and locked steps allow. A live step has no repeats, so it is
    compared with its prediction. The locked replays give the allowed error for as many steps on
    end. locked: replays taken together, of the same policy on the same engine."""
    if not len(steps):
        return np.zeros(0, bool)
    seconds = steps["measured_s"].to_numpy(np.float64)
    off_core = steps["off_core_s"].to_numpy(np.float64) if on_one_core else np.zeros(len(steps))
    still = locked.steps[~locked.steps["moved"]]
    usual = (still["measured_s"] / still["predicted_s"]).to_numpy(np.float64)
    level = np.quantile(slowdown(usual, np.ones(len(usual), bool)), 0.95) if len(usual) else np.nan
    ratio = (seconds - off_core) / (level * steps["predicted_s"].to_numpy(np.float64))
    ratio[steps["moved"].to_numpy(bool)] = np.nan
    return disturbed_beside(ratio, lost(seconds, off_core))


def validate_each(
    inputs: Inputs,
    open_engine: Callable[[PolicySpec], AbstractContextManager[VllmEngine]],
    repeats: int,
    wall: bool,
    say: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
    limit: TimeLimit | None = None,
    keep: Keep = lambda policy, kind, number, steps: None,
) -> tuple[list[Validation], dict[str, str]]:
    """`validate_policy` for every policy of `inputs`, on an engine of its own; one that fails does
    not keep the others from theirs, and each has an even share of the time that is left. Returns
    what there is of those that ended, and why there is nothing of the others, in a line: label ->
    line."""
    limit = limit or TimeLimit()
    found: list[Validation] = []
    failed: dict[str, str] = {}
    for number, spec in enumerate(inputs.policies):
        try:
            limit.check()
            say(f"{spec.label}: starting the engine")
            with ExitStack() as stack:
                with limit.stopped():
                    engine = stack.enter_context(open_engine(spec))
                    engine.warm_up()
                mine = limit.share(len(inputs.policies) - number)
                found.append(
                    validate_policy(inputs, spec, engine, repeats, wall, say, watch, mine, keep)
                )
        except Exception as error:  # whatever it is, other policies may do better
            failed[spec.label] = _why(error)
            say(f"{spec.label}: failed: {failed[spec.label]}")
    return found, failed


def _why(error: Exception) -> str:
    if isinstance(error, TimeUp):
        return "the time was up before a replay had ended; give more with --limit"
    expected = isinstance(error, (LiveEngineError, SettingsError))
    return worded(error) if expected else " ".join(f"{type(error).__name__}: {error}".split())


def _refuse(what: str, parted: str) -> None:
    """Raise LiveEngineError for a run that `parted` from its plans."""
    if parted:
        raise LiveEngineError(f"{what}: {parted}")


def _forget(engine: VllmEngine) -> None:
    """Every run begins with an empty prefix cache and counts from zero."""
    engine.forget_prefixes()
    engine.scheduler.forget_counts()
