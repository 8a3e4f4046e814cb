"""What an engine does in one step, as its runner hears of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decided:
    """grants: request id -> tokens, in order. hits: of requests that joined the batch, tokens that
    they had before. preempted: in order. free_blocks: after the plan."""

    grants: dict[str, int]
    hits: dict[str, int]
    preempted: tuple[str, ...]
    free_blocks: int

    def differs(self, other: Decided) -> str:
        """Return the difference in one line, or an empty text."""
        if list(self.grants.items()) != list(other.grants.items()):
            return f"grants {_few(self.grants, other.grants)}"
        if self.hits != other.hits:
            return f"prefix hits {_few(self.hits, other.hits)}"
        if self.preempted != other.preempted:
            return f"victims {', '.join(self.preempted)} / {', '.join(other.preempted)}"
        if self.free_blocks != other.free_blocks:
            return f"free blocks {self.free_blocks} / {other.free_blocks}"
        return ""


@dataclass(frozen=True, slots=True)
class Ended:
    """finished: ids, in order. tokens: request id -> token ids emitted. handed_over: request id ->
    what the engine that goes on needs to know."""

    finished: tuple[str, ...]
    tokens: dict[str, list[int]]
    handed_over: dict[str, dict]


def _few(one: dict[str, int], other: dict[str, int]) -> str:
    """Entries that differ, or the order."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return f"in the order {', '.join(one)} / {', '.join(other)}"
    shown = [f"{name} {one.get(name, '-')} / {other.get(name, '-')}" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
