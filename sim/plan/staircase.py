"""The least prefill and decode replicas together that are enough, by a walk along a staircase.

Where more replicas of either role are never worse, the splits that are enough lie above and to the
right of a staircase. The walk goes down the diagonal of all splits with one replica less than the
best so far, from few prefill replicas to many. A split of it that is enough begins the next
diagonal; those that it has passed cannot hold there, since they would have fewer decode replicas.

Like `search.smallest` it is a generator: it yields the split to try and is sent the answer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple


class Split(NamedTuple):
    """Replicas that compute prompts, and replicas that decode."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        """As `--fleet` takes it."""
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class Answer:
    """keeps: whether the split is enough. of_decode: where it is not, only tokens after the first
    are late, and so prefill replicas are not why. Late first tokens may be those of either role: a
    computed prompt waits for memory where it is decoded."""

    keeps: bool
    of_decode: bool = False


Walk = Generator[Split, Answer, Split | None]


def staircase(first: Split, most: int) -> Walk:
    """From `first` up, by what was late, to a split that is enough; then down the staircase.

    most  replicas of both roles together, at most; 2 at least

    Returns a split with the fewest replicas; None where none is enough.
    """
    tried: dict[Split, bool] = {}
    best = yield from _climb(_within(first, most), most, tried)
    total = most if best is None else best.total - 1
    prefill = 1
    while total > prefill:
        split = Split(prefill, total - prefill)
        if not any(_covers(other, split) for other, keeps in tried.items() if not keeps):
            tried[split] = (yield split).keeps
            if tried[split]:
                best, total = split, total - 1
                continue
        prefill += 1
    return best


def _climb(
    split: Split, most: int, tried: dict[Split, bool]
) -> Generator[Split, Answer, Split | None]:
    while True:
        answer = yield split
        tried[split] = answer.keeps
        if answer.keeps:
            return split
        if split.total >= most:
            return None
        more = Split(
            split.prefill + (1 + split.prefill // 2) * (not answer.of_decode),
            split.decode + 1 + split.decode // 2,
        )
        split = _above(split, more, most)


def _above(split: Split, more: Split, most: int) -> Split:
    """`more`, with no more than `most` together and one more than `split` at least."""
    over = more.total - most
    if over <= 0:
        return more
    decode = max(more.decode - over, split.decode)
    return Split(most - decode, decode)


def _within(split: Split, most: int) -> Split:
    """As near to its shares as there is room; one of each at least."""
    if split.total <= most:
        return Split(max(split.prefill, 1), max(split.decode, 1))
    prefill = min(max(round(most * split.prefill / split.total), 1), most - 1)
    return Split(prefill, most - prefill)


def _covers(other: Split, split: Split) -> bool:
    return other.prefill >= split.prefill and other.decode >= split.decode
