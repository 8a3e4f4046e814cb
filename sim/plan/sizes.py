"""How many replicas of one kind keep the objectives: the search of one candidate."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinserve.sim.plan.bounds import estimated_replicas, hopeless, least_replicas
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.search import Smallest, smallest
from twinserve.sim.plan.trial import Trial, TrialSpec
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.inputs import with_objectives
from twinserve.sim.setup.offered_load import service_seconds

Trials = Generator[TrialSpec, Trial, Any]


@dataclass
class Size:
    """A candidate on its way to a number of replicas.

    least, guess  from work and memory, before any trial
    most          replicas that may be tried
    hopeless      why no number is enough; None where one may be
    trials        of each number, one a peak; fewer where one has failed
    found         None where the search was given up
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
            least = max(least, least_replicas(load, objectives, hardware))
            busy = service_seconds(load, hardware)
            lost = 0 if peak.trouble is None else peak.trouble.crashes
            guess = max(guess, least, lost + estimated_replicas(busy, load.span_s))
        if reason is None and least > most:
            reason = f"{least:,} or more replicas are needed, and --most-gpus allows {most:,}"
        return cls(candidate, peaks, least, guess, most, reason)

    @property
    def at_least(self) -> int:
        """What the trials so far leave, where more is never worse."""
        good = [n for n, trials in self.trials.items() if _all_keep(trials)]
        bad = [n for n, trials in self.trials.items() if not _all_keep(trials)]
        below = [n for n in bad if not good or n < min(good)]
        least = max(below, default=0) + 1
        return least if good and min(good) < self.least else max(least, self.least)

    @property
    def at_most(self) -> int | None:
        """The smallest that was seen to be enough."""
        return min((n for n, trials in self.trials.items() if _all_keep(trials)), default=None)

    @property
    def number(self) -> int | None:
        """The smallest that is enough, once that is known."""
        if self.found is not None:
            return self.found.number
        return self.at_most if self.at_most == self.at_least else None

    @property
    def monotone(self) -> bool:
        tried = {n: _all_keep(trials) for n, trials in self.trials.items()}
        return Smallest(self.at_most, tried).monotone

    def search(self, above: bool = True) -> Trials:
        """Trials, until the smallest number is `found`. What a search that was given up has tried
        is not tried again. above: as of `smallest`."""
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
        """What `n` replicas are ranked by: dollars, then GPUs; or GPUs alone."""
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
    """One trial a peak with `n` replicas, up to the first that fails, or on all where `whole`.

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
