"""Step 2 of Echo's toolkit (Sec. 5.4): a day with offline work beside the online requests.

A day is its load over time, as a share of the peak's: that of the trace where it lasts a day, else
the tide of `traces/generators/tidal.py`. It is not run second by second: the peak's requests are
run at LEVELS of the load, as slowly as each of them says, beside a closed loop of offline requests.
What the loop gets between two levels lies on the line between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.closer import Sized, sized
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.search import smallest
from twinserve.sim.plan.sizes import Size, Trials
from twinserve.sim.plan.trial import TrialSpec
from twinserve.sim.plan.waves import Task, drive
from twinserve.sim.results.options import Objective
from twinserve.traces.generators.tidal import DAY_S, tide

LEVELS = (1 / 6, 0.45, 0.7, 1.0)  # of the peak: the corners of the tide
_MINUTE_S = 60.0


@dataclass(frozen=True)
class Day:
    """A candidate with offline work beside it.

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
        """At every level."""
        return self.replicas is not None and all(
            trial.keeps for _, _, one in self.levels for trial in one.trials
        )


def plan_day(
    ranked: Sequence[tuple[Size, int]],
    cost: Callable[[Size, int], Any],
    objectives: Sequence[Objective],
    pool: int,
    workers: Executor,
    report: Callable[[int, int], None],
) -> tuple[Day | None, int]:
    """The cheapest candidate that keeps its objectives beside offline work, and the trials it took;
    None where none does.

    ranked  candidates with the numbers of step 1, the cheapest first. One that needs more beside
            offline work may cost more than a later one, so that all that could be cheaper are
            looked at.
    pool    requests in a batch of the closed loop
    """
    best: tuple[Size, int] | None = None
    trials = 0
    for size, n in ranked:
        if best is not None and cost(size, n) >= cost(*best):
            break
        task = Task(_beside(size, n, pool), lambda: 0)
        trials += drive([task], workers, report)
        number = task.found
        if number is not None and (best is None or cost(size, number) < cost(*best)):
            best = size, number
    if best is None:
        return None, trials
    size, number = best
    tasks = [Task(_level(size, number, share, pool, whole=True), lambda: 0) for share in LEVELS]
    trials += drive(tasks, workers, report)
    levels = tuple(
        (
            share,
            min(t.offline_tokens_per_s for t in task.found),
            sized(number, objectives, [task.found]),
        )
        for share, task in zip(LEVELS, tasks, strict=True)
    )
    load, profile = day_load(size.peaks)
    a_second = np.interp(load, [share for share, *_ in levels], [got for _, got, _ in levels])
    return Day(size.candidate, number, levels, float(a_second.mean() * DAY_S), profile), trials


def day_load(peaks: Sequence[Peak]) -> tuple[np.ndarray, str]:
    """(float64[1440]: the load in each minute of a day, as a share of the peak's, and what that
    is). Of several traces the tide is taken."""
    if len(peaks) == 1 and peaks[0].day is not None:
        return peaks[0].day, f"the first day of {peaks[0].trace}"
    minutes = (np.arange(round(DAY_S / _MINUTE_S)) + 0.5) * _MINUTE_S
    why = "there are several traces" if len(peaks) > 1 else "the trace lasts less than a day"
    return tide(minutes), f"tide of the generator tidal, as {why}"


def _beside(size: Size, n: int, pool: int) -> Trials:
    """The smallest number of replicas from `n` on beside offline work at the peak; None."""
    numbers: Any = smallest(n, n, size.most)
    try:
        number = next(numbers)
        while True:
            if number < n:  # step 1 has said that it is too small
                number = numbers.send(False)
                continue
            trials = yield from _level(size, number, 1.0, pool)
            number = numbers.send(all(trial.keeps for trial in trials))
    except StopIteration as end:
        return end.value.number


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
