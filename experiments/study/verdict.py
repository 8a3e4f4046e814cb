"""The verdict on a number of a paper and ours: one word, by one rule for all of the studies.

An *effect* is a change against something else (a ratio of 1 or a change of 0 would be none) and has
a direction; an *amount* has none. Words of effects tell its direction and its size apart, so that
two rows with nearly the same numbers never get words that contradict each other.

Sizes are compared as factors: a time that falls by 61 % is 2.6 times as fast, one that falls by
99.9 % a thousand times. Of increases the factor and the change have the same size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

# best first
Verdict = Literal[
    "agrees", "near", "direction only", "not significant", "no effect", "differs", "not reproduced"
]
CLOSE = 0.1  # of the paper's number: as good as the same
NEAR = 0.25  # of an amount
FACTOR = 2.0  # of the size of an effect
NONE = 0.05  # of the whole: no effect
WIDE = 0.25  # of the paper's number: an interval as wide to a side does not stand for a number

MEANING = {
    "agrees": "same direction, and a size within 10 % of the paper's or with it in the interval",
    "near": "an effect of half to twice the paper's, a reduction taken as a speed-up (61 % less is "
    "x 2.6, 1.6 above none); an amount within 25 % of it",
    "direction only": "same direction, another size",
    "not significant": "the interval holds no effect (of an amount: is too wide, and holds it)",
    "no effect": "within 5 % of none",
    "differs": "the other direction; an amount further off",
    "not reproduced": "no run speaks to it",
}


@dataclass(frozen=True)
class Claim:
    """One number of a paper, and ours.

    where     figure, table or section of the paper
    what      the quantity, with its unit and its setting
    paper     as printed
    ours      mean and 95 % interval over seeds, see `grid.shown`
    verdict   see `judge`, `judge_direction` and `judge_bound`
    why       if it is not `agrees`: the run that shows what makes the difference, or `not known`
    directed  the paper says that one thing is more or less than another; False: it says an amount
              or a bound, or the row is a variant of ours
    """

    where: str
    what: str
    paper: str
    ours: str
    verdict: Verdict
    why: str = ""
    directed: bool = True

    @classmethod
    def judged(
        cls,
        where: str,
        what: str,
        paper: str,
        ours: str,
        verdict: Verdict,
        why: str,
        directed: bool = True,
    ) -> Claim:
        """With `why` only if needed."""
        why = "" if verdict == "agrees" else why
        return cls(where, what, paper, ours, verdict, why, directed)


def judge(
    ours: float, half: float, paper: float, neutral: float | None = 0.0, whole: float = 1.0
) -> Verdict:
    """Compare a number of ours, with the half width of its 95 % interval, with the paper's.

    neutral  what would be no effect (0 for a change, 1 for a ratio); None: an amount
    whole    what a change of 100 % is (100 if given in per cent); of effects only

    The words are those of `MEANING`. The size of an effect is that of `factor`. An interval wider
    to a side than a quarter of the paper's number never stands for that number; one seed has no
    interval (nan) and no verdict. A number that is not there (nan) differs. ValueError if the
    paper's number is `neutral` itself: such a claim is an amount.
    """
    if paper == neutral:
        raise ValueError(
            f"a paper's number of {paper} is no effect: judge it as an amount (neutral=None)"
        )
    if not np.isfinite(ours):
        return "differs"
    half = half if np.isfinite(half) else np.inf
    if neutral is None:
        return _amount(ours, half, paper)
    return _effect(ours - neutral, half, paper - neutral, whole)


def factor(change: float) -> float:
    """Return how far a change (a part of 1, at least -1) is from none, as a factor less 1: 1.0 for
    twice as much, -1.0 for half."""
    left = max(1 + change, 1e-9)
    return change if change >= 0 else 1 - 1 / left


def _same(ours: float, half: float, paper: float) -> bool:
    size = abs(paper)
    return half <= WIDE * size and abs(ours - paper) <= max(half, CLOSE * size)


def _amount(ours: float, half: float, paper: float) -> Verdict:
    if _same(ours, half, paper):
        return "agrees"
    off = abs(ours - paper)
    if max(half, off) <= NEAR * abs(paper):
        return "near"
    return "not significant" if off <= half else "differs"


def _effect(ours: float, half: float, paper: float, whole: float) -> Verdict:
    told = half < abs(ours)
    size, printed = factor(ours / whole), factor(paper / whole)
    room = max(
        factor((ours + half) / whole) - size, size - factor((ours - half) / whole)
    )  # to either side
    if told and _same(size, room, printed):
        return "agrees"
    if abs(ours) + half <= NONE * whole or (told and abs(ours) < NONE * whole):
        return "no effect"
    if not told:
        return "not significant"
    if ours * paper < 0:
        return "differs"
    sure = room <= abs(printed) / FACTOR
    return "near" if sure and 1 / FACTOR <= size / printed <= FACTOR else "direction only"


def judge_direction(effect: float, half: float, whole: float = 1.0) -> Verdict:
    """A claim that prints no number, only a direction: `effect`, of `whole`, is above 0 where ours
    has the same. It agrees, is no effect, differs, or not significant."""
    if not np.isfinite(effect):
        return "differs"
    half = half if np.isfinite(half) else np.inf
    if abs(effect) + half <= NONE * whole or half < abs(effect) < NONE * whole:
        return "no effect"
    return judge_bound(effect, half)


def judge_bound(margin: float, half: float) -> Verdict:
    """A claim that something is at least, or at most, so much: `margin` is by how much ours is on
    the right side. It agrees, differs, or not significant."""
    half = half if np.isfinite(half) else np.inf
    return "agrees" if margin > half else "not significant" if margin > -half else "differs"


def worst(*verdicts: Verdict) -> Verdict:
    """Of a claim with several parts."""
    return max(verdicts, key=get_args(Verdict).index)


def counted(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims of a direction got each word that any of them got, best first."""
    found = Counter(claim.verdict for claim in claims if claim.directed)
    return {verdict: found[verdict] for verdict in get_args(Verdict) if found[verdict]}


def summary(claims: Iterable[Claim]) -> str:
    """`counted` as a sentence, with the number of rows that it leaves out."""
    claims = list(claims)
    words = counted(claims)
    rest = len([claim for claim in claims if not claim.directed])
    said = ", ".join(f"{number} {verdict}" for verdict, number in words.items())
    return f"{sum(words.values())} claims of a direction: {said or 'none'}. {rest} others."
