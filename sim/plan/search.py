"""The smallest number that is enough, from as few trials as there can be.

A search is a generator: it yields the number to try next and is sent whether that is enough. So
the caller may run the trials of many searches at once, and may give a search up.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

Trying = Generator[int, bool, "Smallest"]


@dataclass(frozen=True)
class Smallest:
    """number: the smallest that was seen to be enough; None: not even the largest was. tried: every
    number that was, and whether it is enough."""

    number: int | None
    tried: Mapping[int, bool]

    @property
    def monotone(self) -> bool:
        """Return whether all numbers tried below `number` fail and all above are enough."""
        return all(
            ok == (self.number is not None and n >= self.number) for n, ok in self.tried.items()
        )


def smallest(guess: int, least: int, most: int, above: bool = True, stride: int = 1) -> Trying:
    """Search from `guess` by growing strides up or down until the answer changes, then by halves.

    least  none below it should be enough; it is checked, one below the answer, and not believed
    most   the largest that is tried
    above  also try the number above the answer. It never changes the answer, only whether
           `monotone` is seen to be false
    stride the first one

    The number below the answer is always tried. If more is not always better (`monotone`), the
    answer is the smallest of those tried.
    """
    tried: dict[int, bool] = {}
    first = min(max(guess, least, 1), most)
    enough = yield first
    tried[first] = enough
    if enough:
        yield from _down(first, min(max(least, 1), first), tried, stride)
    else:
        yield from _up(first, most, tried, stride)
    good = [n for n, ok in tried.items() if ok]
    if not good:
        return Smallest(None, tried)
    while min(good) > 1 and min(good) - 1 not in tried:
        below = min(good) - 1
        tried[below] = yield below
        good = [n for n, ok in tried.items() if ok]
    more = min(good) + 1
    if above and more <= most and more not in tried:
        tried[more] = yield more
    return Smallest(min(good), tried)


def _up(fails: int, most: int, tried: dict[int, bool], stride: int) -> Generator[int, bool, None]:
    while fails < most:
        number = min(fails + stride, most)
        tried[number] = yield number
        if tried[number]:
            yield from _between(fails, number, tried)
            return
        fails, stride = number, 2 * stride


def _down(good: int, least: int, tried: dict[int, bool], stride: int) -> Generator[int, bool, None]:
    while good > least:
        number = max(good - stride, least)
        tried[number] = yield number
        if not tried[number]:
            yield from _between(number, good, tried)
            return
        good, stride = number, 2 * stride


def _between(fails: int, good: int, tried: dict[int, bool]) -> Generator[int, bool, None]:
    while good - fails > 1:
        middle = (fails + good) // 2
        tried[middle] = yield middle
        fails, good = (fails, middle) if tried[middle] else (middle, good)
