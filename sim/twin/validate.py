"""Simulation beside reality: one workload, run by the simulator and by a live engine, and what
differs.

For each policy: a simulated run; a locked replay of its decisions on the engine (step times, free
of scheduling differences); free runs, repeated, whose own spread says how much of a difference
means anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from twinserve.backends.counts import Counts, not_made
from twinserve.backends.live.engine.engine import VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import PolicySpec
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Progress, run_policy, run_simulation
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import LockedReplay, replay_locked, together

# (metric of summary.json, unit, aim in percent); the aim counts where the live runs repeat each
# other more closely
LATENCIES = {"ttft": 10.0, "tpot": 5.0, "itl": 5.0, "e2el": 5.0}
STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUTS = {"request_throughput": 5.0, "output_throughput": 5.0}
STEP_TIME_AIM_PCT = 5.0


@dataclass(frozen=True)
class Validation:
    """One policy: simulated, locked, and live as often as it was repeated. not_made: of the moves
    in the decision log, those that the engine has no mechanism for, by kind."""

    spec: PolicySpec
    simulated: RunResult
    locked: LockedReplay
    live: list[RunResult]
    drift: int
    not_made: Counts

    def table(self) -> pd.DataFrame:
        """One row a metric and statistic: metric, statistic, simulated, live (mean of the repeats),
        error_pct, spread_pct (largest distance of a repeat from their mean), aim_pct (NaN: none is
        set), within (error inside the larger of aim and spread)."""
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
        if ours is None or None in theirs:
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
                "drift": self.drift,
                "not_made": [result.config["live"]["not_made"] for result in self.live],
            },
            "metrics": self.table().to_dict("records"),
        }


class Watch(Protocol):
    """Is told how far each run of a validation is."""

    def begin(self, label: str) -> None: ...

    def report(self, state: Progress) -> None: ...

    def steps(self, done: int, total: int) -> None: ...


def validate_policy(
    inputs: Inputs,
    spec: PolicySpec,
    engine: VllmEngine,
    repeats: int,
    wall: bool,
    say: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
) -> Validation:
    """Simulate, lock, repeat. The engine must have the sizes of `live_settings` for this policy,
    and no requests. say: a line for each run; watch: how far it is. Raises LiveEngineError where a
    run drifts, or loses or shortens an answer."""
    begin = watch.begin if watch else lambda label: None
    report, steps = (watch.report, watch.steps) if watch else (None, None)
    texts = PromptTexts(engine.vocab, engine.settings.block_tokens, inputs.config.seed)
    begin(f"{spec.label} simulated")
    simulated = run_policy(inputs, spec, report, decisions=True)
    log = parse_log(simulated.decisions)
    replays = []
    for number in range(repeats):
        say(f"{spec.label}: locked replay of {len(log.steps):,} steps, {number + 1} of {repeats}")
        _forget(engine)
        begin(f"{spec.label} locked")
        replays.append(replay_locked(log, engine, texts, steps))
        _refuse(f"locked replay {number + 1}", replays[-1].parted)
    locked = together(replays) if repeats > 1 else replays[0]
    live, drift = [], 0
    for number in range(repeats):
        say(f"{spec.label}: live run {number + 1} of {repeats}")
        _forget(engine)
        begin(f"{spec.label} live")
        run = LiveRun(inputs, spec, engine, report, wall, texts)
        result = run_simulation(run)
        result.config["live"] = run.described()
        _refuse(f"live run {number + 1}", result.config["live"]["parted"])
        drift += engine.scheduler.drift
        live.append(result)
    return Validation(
        spec, simulated, locked, live, drift, not_made(log.moved, engine.settings.physical)
    )


def validate_each(
    inputs: Inputs,
    open_engine: Callable[[PolicySpec], AbstractContextManager[VllmEngine]],
    repeats: int,
    wall: bool,
    say: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
) -> tuple[list[Validation], dict[str, str]]:
    """`validate_policy` for every policy of `inputs`, on an engine of its own; one that fails does
    not keep the others from theirs. Returns what there is of those that ended, and why the others
    failed, in a line: label -> line."""
    found: list[Validation] = []
    failed: dict[str, str] = {}
    for spec in inputs.policies:
        say(f"{spec.label}: starting the engine")
        try:
            with open_engine(spec) as engine:
                engine.warm_up()
                found.append(validate_policy(inputs, spec, engine, repeats, wall, say, watch))
        except Exception as error:  # whatever it is, other policies may do better
            expected = isinstance(error, (LiveEngineError, SettingsError))
            line = str(error) if expected else f"{type(error).__name__}: {error}"
            failed[spec.label] = " ".join(line.split())
            say(f"{spec.label}: failed: {failed[spec.label]}")
    return found, failed


def _refuse(what: str, parted: str) -> None:
    """Raise LiveEngineError for a run that `parted` from what it was told; nothing where it did
    not."""
    if parted:
        raise LiveEngineError(f"{what}: {parted}")


def _forget(engine: VllmEngine) -> None:
    """Every run begins with an empty prefix cache and counts from zero."""
    engine.forget_prefixes()
    engine.scheduler.forget_counts()
