"""Step 2 of Echo's toolkit (Sec. 5.4): a day with both offline and online requests.

A day is its load over time, as a share of the peak's. A trace of a day gives it, else the tide of
`traces/generators/tidal.py`. The day is not run second by second. The peak's requests run at LEVELS
of the load, with a closed loop of offline requests. The loop's tokens between two levels are
interpolated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.closer import Sized, sized
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.savings import Needed
from twinserve.sim.plan.search import smallest
from twinserve.sim.plan.sizes import Size, Trials
from twinserve.sim.plan.trial import Trial, TrialSpec
from twinserve.sim.plan.waves import Task, Waves, in_waves
from twinserve.sim.results.options import Objective
from twinserve.traces.generators.tidal import DAY_S, tide

LEVELS = (1 / 6, 0.45, 0.7, 1.0)  # of the peak: the corners of the tide
_MINUTE_S = 60.0
_AT_ONCE = 2  # candidates that are looked at while it is not known which one is the cheapest


@dataclass(frozen=True)
class Day:
    """A candidate with offline work added.

    replicas  the smallest number, from that of step 1 on, that keeps the objectives at the peak
              beside the offline work; None: not even the most allowed
    levels    (share of the peak's rate, offline tokens/s, what the online requests keep)
    offline_tokens_per_day  prompt and output tokens
    profile   what the day is
    """

    candidate: Candidate
    replicas: int | None
    levels: tuple[tuple[float, float, Sized], ...]
    offline_tokens_per_day: float
    profile: str

    @property
    def holds(self) -> bool:
        """Return whether the objectives are kept at every level."""
        return self.replicas is not None and all(
            trial.keeps for _, _, one in self.levels for trial in one.trials
        )


def plan_day(
    sizes: Sequence[Size],
    cost: Callable[[Size, int], Any],
    objectives: Sequence[Objective],
    pool: int,
) -> Waves:
    """Return (Day | None, list[Needed]): the cheapest candidate that keeps its objectives with
    offline work (None if there is none), and the need of each policy's cheapest.

    sizes   candidates after step 1. One that was given up there may be the cheapest here, and is
            then sized, unless it must cost more than another candidate of its policy
    pool    requests in a batch of the closed loop
    """
    looks = [_Beside(size, pool, cost, i) for i, size in enumerate(sizes) if size.hopeless is None]

    def rank(look: _Beside) -> Any | None:
        policy = look.size.candidate.policy
        same = (one for one in looks if one.size.candidate.policy == policy)
        best = min((one.known for one in same if one.known is not None), default=None)
        return None if best is not None and look.least > best else look.least

    tasks = [Task(look.search(), partial(rank, look)) for look in looks]
    yield from in_waves(tasks, _AT_ONCE)
    ranked = [one for one in looks if one.known is not None]
    if not ranked:
        return None, []
    ranked.sort(key=lambda one: one.known)  # type: ignore[arg-type, return-value]
    # a trial that keeps the objectives has run to its end
    needed = [
        Needed(one.size.candidate, n, sized(n, objectives, [one.tried[n]]).answer)
        for one in ranked
        if (n := one.smallest) is not None
    ]
    size, number = ranked[0].size, needed[0].replicas
    at_peak = ranked[0].tried[number]
    below = (share for share in LEVELS if share < 1)
    lower = [Task(_level(size, number, s, pool, whole=True), lambda: 0) for s in below]
    yield from in_waves(lower)
    levels = tuple(
        (share, min(t.offline_tokens_per_s for t in found), sized(number, objectives, [found]))
        for share, found in zip(LEVELS, [*(task.found for task in lower), at_peak], strict=True)
    )
    load, profile = day_load(size.peaks)
    a_second = np.interp(load, [share for share, *_ in levels], [got for _, got, _ in levels])
    per_day = float(a_second.mean() * DAY_S)
    return Day(size.candidate, number, levels, per_day, profile), needed


def day_load(peaks: Sequence[Peak]) -> tuple[np.ndarray, str]:
    """Return float64[1440], the load in each minute of a day as a share of the peak's, and what
    that load is. For several traces it is the tide."""
    if len(peaks) == 1 and peaks[0].day is not None:
        return peaks[0].day, f"the first day of {peaks[0].trace}"
    minutes = (np.arange(round(DAY_S / _MINUTE_S)) + 0.5) * _MINUTE_S
    why = "there are several traces" if len(peaks) > 1 else "the trace lasts less than a day"
    return tide(minutes), f"tide of the generator tidal, as {why}"


@dataclass
class _Beside:
    """A candidate in the search for the smallest number of replicas with offline work.

    place  among all candidates: of two that cost the same, with offline work and without, the first
           is taken
    tried  trials of each number at the peak, with offline work
    """

    size: Size
    pool: int
    cost: Callable[[Size, int], Any]
    place: int
    tried: dict[int, Sequence[Trial]] = field(default_factory=dict)

    def keeps(self, n: int) -> bool:
        return all(trial.keeps for trial in self.tried[n])

    @property
    def known(self) -> tuple | None:
        """What the smallest number that was seen to be enough is ranked by."""
        good = self.smallest
        return None if good is None else self._key(good)

    @property
    def smallest(self) -> int | None:
        """The smallest number that was seen to be enough."""
        return min((n for n in self.tried if self.keeps(n)), default=None)

    @property
    def least(self) -> tuple:
        """What no number can be ranked before, where more replicas are never worse."""
        good = min((n for n in self.tried if self.keeps(n)), default=math.inf)
        bad = max((n for n in self.tried if n < good and not self.keeps(n)), default=0)
        return self._key(max(bad + 1, self._alone))

    @property
    def _alone(self) -> int:
        """The number of step 1, or what it is not below."""
        return self.size.at_least if self.size.number is None else self.size.number

    def _key(self, n: int) -> tuple:
        return self.cost(self.size, n), self.cost(self.size, self._alone), self.place

    def search(self) -> Trials:
        """From the number of step 1 on."""
        if self.size.number is None:
            yield from self.size.search(above=False)
        n = self.size.number
        if n is None:
            return
        numbers: Any = smallest(n, n, self.size.most, above=False)
        try:
            number = next(numbers)
            while True:
                if number < n:  # step 1 has said that it is too small
                    number = numbers.send(False)
                    continue
                self.tried[number] = yield from _level(self.size, number, 1.0, self.pool)
                number = numbers.send(self.keeps(number))
        except StopIteration:
            return


def _level(size: Size, n: int, share: float, pool: int, whole: bool = False) -> Trials:
    """The first requests of each peak at a share of its rate, for as long as the peak lasts."""
    trials = []
    for peak in size.peaks:
        grow = size.candidate.config.rate_scale or 1.0
        start, end = peak.window_s
        begin = start + peak.since_s * grow
        settings = size.candidate.config.model_dump(mode="json") | peak.settings(n)
        settings |= {
            "window": (max(begin - (begin - start) * share, 0.0), begin + (end - begin) * share),
            "rate_scale": grow * share,
            "pool": pool,
        }
        trials.append((yield TrialSpec(settings, peak.since_s, early=not whole)))
        if not trials[-1].keeps and not whole:
            break
    return trials
