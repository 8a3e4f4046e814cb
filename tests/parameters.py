"""Which of a test's parameters the fast suite has; the slow tests have all others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# One policy of each kind, where a property is asked of all of them. BROS takes as long as the
# others together: a test has it where it says so.
SOME_POLICIES = ("vllm", "mlfq", "layerkv", "justitia", "echo-bs")


def mostly_slow(values: Iterable, *fast) -> list:
    """All `values` of a parameter, marked slow but for those in `fast`. A tuple is the values of
    several parameters."""
    values = list(values)
    missing = [value for value in fast if value not in values]
    assert not missing, f"{missing} is none of the values"
    return [value if value in fast else _slow(value) for value in values]


def _slow(value):
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.slow)
