"""Why free runs of an engine differ from their simulation, and whether the schedule is stable.

The time of a live run over that of its simulation is a product of three:

- *work*: the profile's time of the live steps, over the simulated seconds. Steps differ, since
  requests met at other times.
- *engine*: the measured time of the steps, over the profile's.
- *outside*: all the time in which the run had requests, over the time of the steps, relative to
  the simulation: planning, and the loop around the engine.

An unstable schedule makes small errors large. `nudged` repeats the simulation with steps that are a
tenth longer, and with steps of which each is a little off.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import State
from twinserve.profiles.composition import AroundModel, StepComposition, StepTimeModel
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_fleet import busy_seconds
from twinserve.sim.results.metrics_requests import summed
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import BackendOf, simulated_backend
from twinserve.sim.setup.run import Simulation, run_simulation

LONGER, NOISE = 0.1, 0.01  # of a step: nudges
MOST_THROUGHPUT, MOST_STEPS = 0.15, 0.05  # by which a nudge, or chance, may move them
FACTORS = ("work", "engine", "outside")
_RIGHT = 0.05  # step times, work and what is outside are right within this


class Noisy(AroundModel):
    """`model`, each of whose steps is longer or shorter by chance: lognormal, of this standard
    deviation. For backends that price each step by itself (not `fast`)."""

    def __init__(self, model: StepTimeModel, deviation: float, seed: int) -> None:
        super().__init__(model)
        self._deviation = deviation
        self._rng = np.random.default_rng(seed)

    def step_seconds(self, work: StepComposition) -> float:
        return self.model.step_seconds(work) * self._rng.lognormal(0.0, self._deviation)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        raise NotImplementedError("each step has an error of its own")


class IdleSeats:
    """Counts, as `core` plans: seats that stay idle while requests that hold their memory, and
    have a place for the next token, could decode."""

    def __init__(self, core: EngineCore) -> None:
        self.seats = 0
        self._core, self._plan = core, core.plan
        core.plan = self._counted  # type: ignore[method-assign]

    def _counted(self, now: float):
        plan = self._plan(now)
        idle = self._core.policy.limits.max_num_seqs - len(plan.rows)
        if idle > 0 and len(plan.rows):
            self.seats += min(idle, len(passed_over(self._core, plan.rows)))
        return plan


def passed_over(core: EngineCore, served: np.ndarray) -> np.ndarray:
    """int64[k]: rows without a token that hold all their KV and a place for the next token.
    served: int64[n], rows of the plan that was just made."""
    requests, ledger = core.requests, core.ledger
    rows = np.flatnonzero((requests.state == State.RUNNING) & (requests.output_tokens > 0))
    rows = rows[requests.known_tokens(rows) - requests.computed_tokens[rows] == 1]
    rows = rows[~np.isin(rows, [*served, *core.ready_s])]
    whole = np.asarray(ledger.missing_tokens(rows)) == 0
    return rows[whole & (np.asarray(ledger.slack_tokens(rows)) > 0)]


@dataclass(frozen=True)
class Nudge:
    """A simulation with other step times, relative to the original: changes of the number of steps,
    and of tokens/s. longer: share by which each step is; below saturation fewer steps are then
    taken, each with more requests."""

    what: str
    longer: float
    steps: float
    throughput: float

    @property
    def moved(self) -> bool:
        """By more than what it did."""
        most = self.longer + MOST_STEPS
        return abs(self.steps) > most or abs(self.throughput) > MOST_THROUGHPUT

    def said(self) -> str:
        return f"steps {self.steps:+.1%}, tokens/s {self.throughput:+.1%}"


def nudged(inputs: Inputs, spec: PolicySpec, simulated: RunResult) -> list[Nudge]:
    """The simulation again, with steps that the policy's estimates know nothing of: longer by
    LONGER, and each with NOISE. A saturated run loses a tenth of its tokens/s to the former,
    whatever its policy does."""

    def longer(*parts: Any) -> SimulatedBackend:
        made = simulated_backend(*parts)
        made.slow(1 + LONGER)
        return made

    def noisy(*parts: Any) -> SimulatedBackend:
        made = simulated_backend(*parts)
        made.fast, made.model = False, Noisy(made.model, NOISE, inputs.config.seed)
        return made

    def nudge(what: str, share: float, backend: BackendOf) -> Nudge:
        other = run_simulation(Simulation(inputs, spec, backend=backend))
        steps = len(other.rows.steps) / max(len(simulated.rows.steps), 1) - 1
        ours, theirs = (r.summary["output_throughput"] or 0.0 for r in (simulated, other))
        return Nudge(what, share, steps, theirs / ours - 1 if ours else 0.0)

    return [
        nudge(f"steps were {LONGER:.0%} longer", LONGER, longer),
        nudge(f"steps had {NOISE:.0%} of noise", 0.0, noisy),
    ]


@dataclass(frozen=True)
class Parts:
    """A live run compared with its simulation. steps, batch: its steps, and requests a step;
    idle_seats: see `IdleSeats`. work, engine, outside: factors; their product is live time over
    simulated time."""

    steps: int
    batch: float
    idle_seats: int
    work: float = 1.0
    engine: float = 1.0
    outside: float = 1.0


def parts_of(result: RunResult, idle_seats: int) -> Parts:
    """Of a run by itself."""
    scheduler = result.summary["scheduler"]
    return Parts(scheduler["steps"], scheduler["mean_batch"] or 0.0, idle_seats)


def parts_beside(
    simulated: RunResult, live: RunResult, steps: pd.DataFrame, idle_seats: int, loop_s: float = 0.0
) -> Parts:
    """steps: of the live run (`TimedStep.row`). loop_s: of our loop in a simulated step."""
    found = parts_of(live, idle_seats)
    priced, measured = float(steps["predicted_s"].sum()), float(steps["measured_s"].sum())
    simulated_steps = simulated.rows.step_columns
    whole = summed(busy_seconds(simulated_steps), 0, len(simulated_steps))
    seconds = whole - loop_s * len(simulated.rows.steps)
    if not (priced and measured and seconds):
        return found
    outside = max(_busy_s(live), measured) / measured
    outside /= whole / seconds
    return replace(found, work=priced / seconds, engine=measured / priced, outside=outside)


def _busy_s(result: RunResult) -> float:
    """Seconds in which a run had requests that had come and not ended."""
    requests = result.rows.requests
    came = np.sort(requests["arrival_s"].to_numpy(np.float64))
    ended = requests["ended_s"].to_numpy(np.float64)  # of a pool's last ones: never
    ended = np.where(np.isnan(ended), result.rows.steps["end_s"].max(), ended)
    times = np.concatenate([came, ended])
    order = times.argsort(kind="stable")
    change = np.concatenate([np.ones(len(came)), -np.ones(len(ended))])[order]
    here = change.cumsum()[:-1] > 0
    return float(np.diff(times[order])[here].sum())


@dataclass(frozen=True)
class Schedule:
    """The simulated run, each live one, and the simulation nudged."""

    simulated: Parts
    live: list[Parts]
    nudges: list[Nudge]

    @property
    def stable(self) -> bool:
        """Neither a nudge nor the repeats of the live run move what is done."""
        steps = [part.steps for part in self.live]
        apart = (max(steps) - min(steps)) / max(steps) if steps else 0.0
        return apart <= MOST_STEPS and not any(nudge.moved for nudge in self.nudges)

    def verdict(self) -> str:
        """What of the free runs' error is whose, in words; empty if there is no such run."""
        if not self.live:
            return ""
        work, engine, outside = (
            float(np.mean([getattr(part, name) for part in self.live])) - 1 for name in FACTORS
        )
        said = [
            "the step times are right"
            if abs(engine) <= _RIGHT
            else f"steps take {abs(engine):.0%} {'longer' if engine > 0 else 'less'} than the "
            "profile says"
        ]
        if not self.stable:
            said.append("the schedule is not stable at this load")
        elif abs(work) > _RIGHT:
            said.append(f"other steps are taken than simulated, {work:+.0%} in time")
        else:
            said.append("the schedule is the simulated one")
        if outside > _RIGHT:
            said.append(f"planning and the loop around the engine add {outside:.0%}")
        return "; ".join(said)

    def summary(self) -> dict:
        """As plain values."""
        return {**asdict(self), "stable": self.stable, "verdict": self.verdict()}
