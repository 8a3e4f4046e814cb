"""Which of a test's parameters `.ci/run` has; `.ci/nightly` has all. And many of them in one test.

A test of every pair of two lists runs a pair for each value of the longer list in `.ci/run`, with
each value of the shorter one in its turn. The other pairs have the mark `nightly`.
"""

from collections.abc import Callable, Collection, Iterable

import pytest

# One policy of each kind, where a property is asked of all of them. BROS takes as long as the
# others together: a test has it where it says so.
SOME_POLICIES = ("vllm", "mlfq", "layerkv", "justitia", "echo-bs")


def each(name: str, values: Collection) -> Callable[[Callable], Callable[[], None]]:
    """One test of all `values`, where a test of each takes longer than what it asks. The error
    has a note of the value with which it came."""

    def of_all(test: Callable) -> Callable[[], None]:
        def one_by_one() -> None:
            assert values
            for value in values:
                try:
                    test(**{name: value})
                except BaseException as error:
                    error.add_note(f"{name}: {value!r}")
                    raise

        one_by_one.__name__, one_by_one.__doc__ = test.__name__, test.__doc__
        one_by_one.__module__ = test.__module__
        return one_by_one

    return of_all


def mostly_nightly(values: Iterable, *kept) -> list:
    """All `values` of a parameter, marked nightly but for those in `kept`. A tuple is the values
    of several parameters."""
    values = list(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"{missing} is none of the values"
    return [value if value in kept else _nightly(value) for value in values]


def mostly_nightly_pairs(pairs: Iterable[tuple], *first) -> list:
    """All `pairs`, marked nightly but for those in turn; first: of these first sides alone."""
    pairs = list(pairs)
    return mostly_nightly(pairs, *in_turn([one for one in pairs if not first or one[0] in first]))


def in_turn(pairs: Iterable[tuple]) -> list[tuple]:
    """Of `pairs` one for each value on either side at least: the first sides take the second ones
    that they are paired with in turn."""
    pairs = list(pairs)
    first, second = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    kept = {}
    for i, value in enumerate(first):
        others = [b for a, b in pairs if a == value]
        turn = second[i % len(second) :] + second[: i % len(second)]
        kept[value, next(b for b in turn if b in others)] = None
    for i, value in enumerate(second):
        if value not in {b for _, b in kept}:
            partners = [a for a, b in pairs if b == value]
            kept[partners[i % len(partners)], value] = None
    return list(kept)


def _nightly(value):
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.nightly)
