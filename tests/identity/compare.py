"""Step two schedulers in lockstep on one scenario and say where they first differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np

from tests.identity import scenarios
from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings, Observed, RequestSpec, Side
from tests.identity.real_scheduler import Counters, RealScheduler
from tests.identity.release import known_settings

COMPARED = tuple(f.name for f in fields(Observed))
STALL_STEPS = 50


class Stalled(RuntimeError):
    """The real scheduler granted nothing for STALL_STEPS steps while requests waited: a scenario
    that cannot end."""


@dataclass
class Report:
    """What a run saw: compared steps, mismatching ones (the run ends at the first) and phenomena on
    vLLM's side."""

    steps: int = 0
    mismatches: int = 0
    first_mismatch: str = ""
    requests: int = 0
    granted_tokens: int = 0
    counters: Counters = field(default_factory=Counters)

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in Counters.__dataclass_fields__:
            raise AttributeError(name)
        return getattr(self.counters, name)

    @property
    def hits(self) -> int:
        """Prefix tokens found, by new and by returning requests."""
        return self.counters.hit_tokens + self.counters.resumed_hit_tokens

    def __add__(self, other: Report) -> Report:
        counters = {
            f.name: getattr(self.counters, f.name) + getattr(other.counters, f.name)
            for f in fields(Counters)
        }
        return Report(
            self.steps + other.steps,
            self.mismatches + other.mismatches,
            self.first_mismatch or other.first_mismatch,
            self.requests + other.requests,
            self.granted_tokens + other.granted_tokens,
            Counters(**counters),
        )


def difference(real: Observed, ours: Observed) -> str:
    """The fields in which two steps differ, one a line; empty when they agree in content and in
    order."""
    lines = []
    for name in COMPARED:
        a, b = _ordered(getattr(real, name)), _ordered(getattr(ours, name))
        if a == b:
            continue
        if isinstance(a, tuple) and isinstance(b, tuple):
            at = next(
                (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            lines.append(
                f"{name}: from position {at} on, vLLM {list(a[at : at + 4])} ({len(a)} in all), "
                f"ours {list(b[at : at + 4])} ({len(b)} in all)"
            )
        else:
            lines.append(f"{name}: vLLM {a}, ours {b}")
    return "\n".join(lines)


def _ordered(value):
    """A form in which equal means equal in order too: dictionaries compare without it."""
    if isinstance(value, dict):
        return tuple((key, int(amount)) for key, amount in value.items())
    return tuple(value) if isinstance(value, (list, tuple)) else int(value)


def _leaving(rng: np.random.Generator, names: list[str]) -> list[str]:
    """One of `names`; every tenth time up to five of them."""
    count = int(rng.integers(1, 6)) if rng.random() < 0.1 else 1
    return rng.permutation(names)[:count].tolist()


def submit_due(requests: list[RequestSpec], submitted: int, clock: int, *sides: Side) -> int:
    """Submit to each side what has arrived by step `clock`, behind the first `submitted`. How many
    are submitted then."""
    while submitted < len(requests) and requests[submitted].arrival_step <= clock:
        spec = requests[submitted]
        for side in sides:
            side.submit(
                spec.request_id,
                spec.prompt_tokens,
                spec.output_tokens,
                spec.prefix,
                spec.priority,
                spec.arrival_s,
            )
        submitted += 1
    return submitted


def run_identity(
    settings: EngineSettings,
    requests: list[RequestSpec],
    make_ours: Callable[[EngineSettings], Side],
    hashing: str = "content",
    max_steps: int | None = None,
    leaving: float = 0.0,
    make_real: Callable[[EngineSettings], RealScheduler] | None = None,
) -> Report:
    """Run `requests` on the real scheduler and on `make_ours(settings)` until both are done or
    first differ.

    Both have the settings that the installed release knows. A step is one schedule of both sides
    while a request is unfinished; idle gaps between arrivals are skipped and not counted. `hashing`
    as in RealScheduler. An exception on our side is a mismatch at that step.

    leaving  share of the steps before which some client, chosen at random among all, leaves (now
             and then several)
    make_real  another RealScheduler, as one with a connector
    """
    settings = known_settings(settings)
    real = RealScheduler(settings, hashing=hashing) if make_real is None else make_real(settings)
    ours = make_ours(settings)
    report = Report(counters=real.counters)
    clock, submitted, idle = 0, 0, 0
    rng = np.random.default_rng([6, len(requests)])
    while submitted < len(requests) or real.unfinished:
        if not real.unfinished:
            clock = max(clock, requests[submitted].arrival_step)
        submitted = submit_due(requests, submitted, clock, real, ours)
        gone = _leaving(rng, real.names) if rng.random() < leaving else []
        for name in gone:
            real.withdraw(name)
        seen = real.step()
        try:
            for name in gone:
                ours.withdraw(name)
            found = difference(seen, ours.step())
        except Exception as error:  # noqa: BLE001 - a broken rule may crash our side
            found = f"our side raised {type(error).__name__}: {error}"
        report.steps += 1
        report.granted_tokens += sum(seen.scheduled.values())
        report.requests = submitted
        if found:
            report.mismatches += 1
            report.first_mismatch = (
                f"step {report.steps - 1} (clock {clock}, {len(seen.running)} running, "
                f"{seen.waiting} waiting, {submitted} submitted):\n{found}"
            )
            break
        idle = 0 if seen.scheduled or seen.preempted else idle + 1
        if idle > STALL_STEPS:
            raise Stalled(
                f"{idle} empty steps at clock {clock} with {real.unfinished} requests unfinished"
            )
        clock += 1
        if max_steps is not None and report.steps >= max_steps:
            break
    return report


def compare(
    generate: str,
    seed: int,
    stages: int = 1,
    leaving: float = 0.0,
    asynchronous: bool = False,
    make: Callable[[EngineSettings], Side] = OurScheduler,
    **options,
) -> Report:
    """`run_identity` of one scenario of the class `generate`; options: further ones of it."""
    scenario = getattr(scenarios, generate)(seed)
    settings = replace(scenario.settings, pipeline_stages=stages, async_scheduling=asynchronous)
    return run_identity(settings, scenario.requests, make, leaving=leaving, **options)
