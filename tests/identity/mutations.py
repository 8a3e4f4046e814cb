"""Seeded breaks of single rules: a method's source is rewritten in one place and bound to one
object.

A mutation test is only as good as its aim, so an edit whose text is not found exactly once is an
error, never a mutation that does nothing. The same tool breaks vLLM's scheduler and our own policy.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


class MutationMisses(AssertionError):
    """The code to break is not there: the mutated code has changed and the mutation must be written
    anew."""


def rewrite_method(owner: object, method: str, edits: Sequence[tuple[str, str]]) -> None:
    """Give `owner` (an instance) its own copy of `method` with each (old, new) text edit applied.

    Each `old` must occur exactly once in the dedented source, else MutationMisses. Other instances
    of the class keep the original. Methods that use zero-argument super() cannot be rewritten this
    way.
    """
    original = inspect.getattr_static(type(owner), method)
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if kind else original
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        if source.count(old) != 1:
            raise MutationMisses(
                f"{type(owner).__name__}.{method} holds {source.count(old)} copies of {old!r}, "
                "not one; write this mutation anew"
            )
        source = source.replace(old, new)
    if kind:
        source = source[source.index("def ") :]  # drop the decorator; bound by hand below
    namespace = dict(sys.modules[function.__module__].__dict__)
    code = compile(source, inspect.getsourcefile(function), "exec", annotations.compiler_flag)
    exec(code, namespace)  # noqa: S102 - running an edited copy of a method is the point
    target = type(owner) if kind is classmethod else owner
    mutated = namespace[function.__name__]
    setattr(owner, method, mutated if kind is staticmethod else types.MethodType(mutated, target))


@dataclass(frozen=True)
class Mutation:
    """A break of one rule.

    rule     one of RULES
    witness  generator (its name in `scenarios`) and seed of a scenario in which the break must show
    edits    (path from the root to the object, method, old text, new text); "" is the root itself
    setting  what else the run is, where a section of the table has several kinds
    """

    name: str
    rule: str
    witness: tuple[str, int]
    edits: tuple[tuple[str, str, str, str], ...]
    setting: str = ""

    def apply(self, root: object) -> None:
        """Break the rule in this one `root` and the objects it owns."""
        grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for path, method, old, new in self.edits:
            grouped.setdefault((path, method), []).append((old, new))
        for (path, method), edits in grouped.items():
            owner = root
            for part in path.split(".") if path else ():
                owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
            rewrite_method(owner, method, edits)


def mutations(section: str) -> tuple[Mutation, ...]:
    """A section of mutations.yaml: paths are those from `OurScheduler` and the like, or from vLLM's
    scheduler."""
    found = []
    for row in _table()[section]:
        generator, seed, *setting = row["witness"]
        edits = tuple((*at.rpartition(".")[::2], old, new) for at, old, new in row["edits"])
        found.append(Mutation(row["name"], row["rule"], (generator, seed), edits, *setting))
    return tuple(found)


@cache
def _table() -> dict[str, list[dict]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    # read by each worker of each call of pytest; in Python that takes most of a second
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


# Every rule whose break the comparison must be shown to see, on either side.
RULES = (
    "victim", "resumption order", "no admission after preemption", "waiting order", "token budget",
    "chunk cap", "admission check", "watermark", "memory accounting", "eviction order", "hit rule",
    "last-token rule",
)  # fmt: skip
