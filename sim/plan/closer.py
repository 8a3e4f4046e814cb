"""More about the chosen size: other draws of the peak, the size below, the effect of wrong step
times, and the rate that one replica keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinserve.profiles.evidence import expected_errors
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.search import smallest
from twinserve.sim.plan.sizes import Size, Trials, on_peaks
from twinserve.sim.plan.trial import Trial
from twinserve.sim.plan.verdicts import Attained, attained, together
from twinserve.sim.results.options import Objective

MORE = 4  # sizes above the chosen one that are looked at until one surely meets the objectives
FARTHEST = 8  # times the chosen size that are looked at with longer steps
_HALVINGS = 5  # of the rate of one replica: to a 16th of its share of the peak


@dataclass(frozen=True)
class Sized:
    """A number of replicas, tried on the peaks. attained: by peak, over all draws."""

    replicas: int
    attained: tuple[tuple[Attained, ...], ...]
    trials: tuple[Trial, ...]

    @property
    def answer(self) -> str:
        return together([one for peak in self.attained for one in peak])


def sized(n: int, objectives: Sequence[Objective], draws: Sequence[Sequence[Trial]]) -> Sized:
    """draws: of each draw, a trial a peak."""
    by_peak = zip(*draws, strict=True)
    found = tuple(attained(objectives, trials) for trials in by_peak)
    return Sized(n, found, tuple(draws[0]))


def drawn(
    size: Size, objectives: Sequence[Objective], n: int, draws: int, fleet: str | None = None
) -> Trials:
    """Return a Sized of `n` replicas, each draw run to its end. fleet: as of `on_peaks`."""
    found, known = [], size.trials.get(n, [])
    for draw in range(draws):
        if draw == 0 and len(known) == len(size.peaks) and not any(t.early for t in known):
            found.append(known)
        else:
            trials = yield from on_peaks(
                size.candidate, size.peaks, n, whole=True, draw=draw, fleet=fleet
            )
            found.append(trials)
    return sized(n, objectives, found)


def surely(size: Size, objectives: Sequence[Objective], n: int, draws: int) -> Trials:
    """Return the sizes from `n` on, until one meets the objectives beyond doubt. The number above
    `n` is always tried, since it may show that more replicas are worse. Returns list[Sized]."""
    found: list[Sized] = []
    for number in range(n, min(n + MORE, size.most) + 1):
        one = yield from drawn(size, objectives, number, draws)
        found.append(one)
        if one.answer == "meets":
            break
    more = n + 1
    if more <= size.most and more not in size.trials:
        seen = [one.trials for one in found if one.replicas == more]
        size.trials[more] = (
            list(seen[0]) if seen else (yield from on_peaks(size.candidate, size.peaks, more))
        )
    return found


def with_error(size: Size, n: int, sign: int) -> Trials:
    """Return the smallest number if all steps take longer (sign 1) or less (-1) by the profile's
    expected error. None: not even `farthest` replicas are enough."""
    off = steps_off(size.candidate, sign, most_decodes(size, n))
    guess = n if sign > 0 else max(n - 1, 1)  # shorter steps: n is enough if n - 1 is
    numbers: Any = smallest(guess, 1, farthest(size, n), above=False)
    try:
        number = next(numbers)
        while True:
            trials = yield from on_peaks(size.candidate, size.peaks, number, off=off, verdict=True)
            number = numbers.send(all(trial.keeps for trial in trials))
    except StopIteration as end:
        return end.value.number


def most_decodes(size: Size, n: int) -> int:
    """Return the most requests that decode at once on one of `n` replicas."""
    return max((trial.most_decodes for trial in size.trials.get(n, ())), default=0)


def steps_off(candidate: Candidate, sign: int, decodes: int = 0) -> tuple[float, float]:
    """Return factors on decode and prefill steps. sign: 1 longer, -1 shorter. decodes: most at
    once."""
    errors = expected_errors(candidate.hardware.profile, decodes=decodes)
    return (1 + errors.decode.error) ** sign, (1 + errors.prefill.error) ** sign


def farthest(size: Size, n: int) -> int:
    """Return the most replicas to try with longer steps, if `n` are enough without."""
    return min(FARTHEST * n, size.most)


def rate_of_one(size: Size, n: int) -> Trials:
    """Return the rate that one replica keeps, as a share of the peak's, or None if it keeps next to
    nothing. The share does not tell how many replicas are enough, because replicas share a burst.
    n: the fewest that keep the whole.
    """
    if n == 1:
        return 1.0

    def kept(share: float) -> Trials:
        trials = yield from on_peaks(
            size.candidate, size.peaks, 1, speed=share, fails=False, verdict=True
        )
        return all(trial.keeps for trial in trials)

    whole = 1.0 / n
    half = whole / 2
    most = (half + whole) / 2  # next after all of it, as one replica seldom keeps less
    if (yield from kept(whole)):
        keeps, fails, more = whole, 1.0, _HALVINGS - 1
    elif (yield from kept(most)):
        keeps, fails, more = most, whole, _HALVINGS - 3
    elif (yield from kept(half)):
        keeps, fails, more = half, most, _HALVINGS - 3
    else:
        keeps, fails, more = 0.0, half, _HALVINGS - 2
    for _ in range(more):
        share = (keeps + fails) / 2
        if fails == 1.0:
            share = min(share, 1.3 * keeps)
        if (yield from kept(share)):
            keeps = share
        else:
            fails = share
    return keeps or None
