"""How many replicas of one kind keep the objectives: the search of one candidate.

Bounds are for the requests that must keep the objectives, taken to be the easiest ones: if 90 %
must keep theirs, the most demanding tenth is not counted. Prompts that share texts may come from a
cache, so a load with prefixes has no bound but one replica.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel, isolated_prefill_seconds
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.search import Smallest, smallest
from twinserve.sim.plan.trial import Trial, TrialSpec, needed
from twinserve.sim.results.options import Objective, spoken
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import with_objectives
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.traces.workload import REAL_TIME, Workload

_SLACK = 0.999  # step times of a form may dip by a rounding
_STEPS = 64  # batch sizes that are looked at
_WHOLE = 2**16  # tokens of prompts in a step, of policies that compute them whole


def least_replicas(load: Workload, objectives: Sequence[Objective], hardware: Hardware) -> int:
    """From work (prompts, tokens) and memory; 1 if nothing is known.

    load  the requests that are judged, with their objectives, as one replica's hardware has them
    """
    ttft, tpot = _of(objectives, "ttft"), _of(objectives, "tpot")
    if load.prefix is not None or (load.group >= 0).any() or not load.span_s or ttft is None:
        return 1
    until_first = load.span_s + float(np.nanmax(load.slo_ttft_s))
    prompts = _easiest(load.prompt_tokens, ttft)
    shares = [float(prompts.sum()) * _seconds_a_prompt_token(hardware) / until_first]
    if tpot is not None:
        # of requests that must keep both, at least so many keep them at once
        both = max(needed(ttft, len(load)) + needed(tpot, len(load)) - len(load), 0)
        outputs = np.sort(load.output_tokens)[:both]
        slowest = float(np.nanmax(load.slo_tpot_s))
        until_last = until_first + float(load.output_tokens.max()) * slowest
        tokens = float(np.maximum(outputs - 1, 0).sum())
        shares.append(tokens * _seconds_a_token(hardware) / until_last)
        alone = _alone(hardware.model, 1)
        held = np.sort((load.prompt_tokens + load.output_tokens / 2) * (load.output_tokens - 1))
        busy = float(held[:both].sum()) * alone
        shares.append(busy / (hardware.kv_tokens * until_last))
    return max(1, math.ceil(_SLACK * max(shares)))


def hopeless(load: Workload, objectives: Sequence[Objective], hardware: Hardware) -> str | None:
    """Why no number of replicas keeps the objectives; None if it may. Alone on a replica, too
    many requests would miss one of them."""
    online = load.service_class == REAL_TIME
    ttft, tpot = _of(objectives, "ttft"), _of(objectives, "tpot")
    if ttft is not None and load.prefix is None and not (load.group >= 0).any():
        alone = _alone_ttft(load.prompt_tokens, hardware)
        said = _too_many(online, alone * _SLACK, load.slo_ttft_s, ttft)
        if said:
            return f"TTFT: a prompt alone takes {said}"
    if tpot is not None:
        step = np.where(load.output_tokens > 1, _alone(hardware.model, 1) * _SLACK, 0.0)
        said = _too_many(online, step, load.slo_tpot_s, tpot)
        if said:
            return f"TPOT: a request alone takes {said} a token"
    return None


def estimated_replicas(seconds_of_one: float, span_s: float) -> int:
    """A first guess: how many replicas are busy all the time, and an eighth more."""
    return max(1, math.ceil(1.125 * seconds_of_one / span_s)) if span_s > 0 else 1


def _of(objectives: Sequence[Objective], metric: str) -> Objective | None:
    return next((o for o in objectives if o.metric == metric), None)


def _easiest(asked: np.ndarray, objective: Objective) -> np.ndarray:
    return np.sort(asked)[: needed(objective, len(asked))]


def _too_many(
    online: np.ndarray, seconds: np.ndarray, bound: np.ndarray, objective: Objective
) -> str | None:
    """`1.3 s (p90), over 1 s` where more requests than may take longer than their bound."""
    due = online & ~np.isnan(bound)
    n = int(due.sum())
    if not n or int((seconds <= bound)[due].sum()) >= needed(objective, n):
        return None
    value = np.sort(seconds[due])[max(needed(objective, n), 1) - 1]
    return (
        f"{spoken(float(f'{value:.3g}'))} ({objective.statistic}), over {spoken(objective.bound_s)}"
    )


def _alone(model: StepTimeModel, context: int) -> float:
    """Seconds of a step with one decode."""
    return model.step_seconds(StepComposition(1, context, context))


def _alone_ttft(prompts: np.ndarray, hardware: Hardware) -> np.ndarray:
    """float64[n]: seconds of each prompt alone, of the next shorter multiple of 256 tokens."""
    grid, place = np.unique(np.maximum(prompts // 256 * 256, 1), return_inverse=True)
    chunks = (hardware.limits.max_num_batched_tokens, None)  # some policies compute prompts whole
    seconds = [
        min(isolated_prefill_seconds(hardware.model, int(n), chunk) for chunk in chunks)
        for n in grid
    ]
    return np.array(seconds)[place]


def _seconds_a_prompt_token(hardware: Hardware) -> float:
    """In the step that does most for its time."""
    most = max(hardware.limits.max_num_batched_tokens, _WHOLE)
    zero = np.zeros(1, np.int64)
    return min(
        hardware.model.step_seconds(
            StepComposition(prefill_new=np.array([n]), prefill_resident=zero)
        )
        / n
        for n in _sizes(most)
    )


def _seconds_a_token(hardware: Hardware) -> float:
    """Of one decode's share in a step, in the batch that does most for its time."""
    model = hardware.model
    return min(
        model.step_seconds(StepComposition(n, n, 1)) / n
        for n in _sizes(hardware.limits.max_num_seqs)
    )


def _sizes(most: int) -> list[int]:
    return np.unique(np.geomspace(1, most, _STEPS).round().astype(int)).tolist()


Trials = Generator[TrialSpec, Trial, Any]


@dataclass
class Size:
    """A candidate during the search for its number of replicas.

    least, guess  from work and memory, before any trial
    most          replicas that may be tried
    hopeless      why no number is enough; None if one may be
    trials        of each number, one a peak; fewer after a failure
    found         None if the search was given up
    """

    candidate: Candidate
    peaks: Sequence[Peak]
    least: int
    guess: int
    most: int
    hopeless: str | None
    trials: dict[int, list[Trial]] = field(default_factory=dict)
    found: Smallest | None = None

    @classmethod
    def of(
        cls, candidate: Candidate, peaks: Sequence[Peak], objectives: Sequence[Objective], most: int
    ) -> Size:
        least = guess = 1
        reason = None
        hardware = candidate.hardware
        for peak in peaks:
            load = with_objectives(peak.judged, hardware, objectives)
            reason = reason or hopeless(load, objectives, hardware)
            least = max(least, peak.crashes + least_replicas(load, objectives, hardware))
            busy = service_seconds(load, hardware)
            guess = max(guess, least, peak.crashes + estimated_replicas(busy, load.span_s))
        if reason is None and least > most:
            reason = f"{least:,} or more replicas are needed, and --most-gpus allows {most:,}"
        return cls(candidate, peaks, least, guess, most, reason)

    @property
    def at_least(self) -> int:
        """Return the least number that the trials so far leave, if more is never worse."""
        good = [n for n, trials in self.trials.items() if _all_keep(trials)]
        bad = [n for n, trials in self.trials.items() if not _all_keep(trials)]
        below = [n for n in bad if not good or n < min(good)]
        least = max(below, default=0) + 1
        return least if good and min(good) < self.least else max(least, self.least)

    @property
    def at_most(self) -> int | None:
        """Return the smallest number that was seen to be enough."""
        return min((n for n, trials in self.trials.items() if _all_keep(trials)), default=None)

    @property
    def number(self) -> int | None:
        """Return the smallest sufficient number, once it is known."""
        if self.found is not None:
            return self.found.number
        return self.at_most if self.at_most == self.at_least else None

    @property
    def monotone(self) -> bool:
        tried = {n: _all_keep(trials) for n, trials in self.trials.items()}
        return Smallest(self.at_most, tried).monotone

    def search(self, above: bool = True) -> Trials:
        """Yield trials until the smallest number is `found`. A search that is taken up again
        repeats no trial. above: as of `smallest`."""
        numbers = smallest(self.guess, self.least, self.most, above)
        try:
            n = next(numbers)
            while True:
                if n not in self.trials:
                    self.trials[n] = yield from on_peaks(self.candidate, self.peaks, n)
                n = numbers.send(_all_keep(self.trials[n]))
        except StopIteration as end:
            self.found = end.value
        return self.found

    def usd_per_hour(self, n: int) -> float | None:
        one = self.candidate.usd_per_hour
        return None if one is None else n * one

    def cost(self, n: int, priced: bool) -> tuple[float, int]:
        """Return the rank of `n` replicas: dollars, then GPUs; or GPUs alone."""
        gpus = n * self.candidate.tp
        return (n * self.candidate.usd_per_hour if priced else 0.0, gpus)  # type: ignore[operator]


def on_peaks(
    candidate: Candidate,
    peaks: Sequence[Peak],
    n: int,
    *,
    speed: float = 1.0,
    whole: bool = False,
    fails: bool = True,
    fleet: str | None = None,
    **how: Any,
) -> Trials:
    """Yield one trial for each peak with `n` replicas, up to the first that fails, or on all if
    `whole`.

    speed  a further factor on the rate; fails: what is to fail does; how: further fields of
           TrialSpec
    fleet  as `--fleet` takes it, of pools with these replicas; None: they are equal
    """
    trials = []
    for peak in peaks:
        settings = candidate.config.model_dump(mode="json") | peak.settings(n, speed, fails)
        settings["rate_scale"] = settings["rate_scale"] * speed
        if fleet is not None:
            settings |= {"fleet": fleet, "replicas": 1}
        trials.append((yield TrialSpec(settings, peak.since_s / speed, early=not whole, **how)))
        if not trials[-1].keeps and not whole:
            break
    return trials


def _all_keep(trials: Sequence[Trial]) -> bool:
    return all(trial.keeps for trial in trials)
