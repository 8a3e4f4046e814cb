"""A plan under the live engine's request ids, and what the engine made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...policies.plan import Preemption

if TYPE_CHECKING:
    from .physical_layout import Layout


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What the scheduler shall do in one step.

    grants      {request id: tokens}, in order
    hits        {request id: prefix tokens} of those admitted
    preempted   (request id, kind), in order
    swapped_in  request ids whose KV comes back from the host
    layout      where all KV lies and what moves, for an engine with a physical layout; None: vLLM lays it out
    """

    grants: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    preempted: tuple[tuple[str, Preemption], ...] = ()
    swapped_in: tuple[str, ...] = ()
    layout: Layout | None = None


@dataclass(slots=True)
class ScheduledStep:
    """What vLLM's scheduler did. free_blocks: of its own pool, after it. unplanned: victims that nobody named; unfilled:
    requests that should have come back from the host and did not."""

    grants: dict[str, int]
    hits: dict[str, int]
    free_blocks: int
    unplanned: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)

    def drift(self, planned: PlannedStep) -> str:
        """How this differs from `planned`; empty where it does not."""
        if self.unplanned:
            return f"vLLM preempted {', '.join(self.unplanned)} by itself"
        if self.unfilled:
            return f"{', '.join(self.unfilled)} did not come back from the host"
        if self.grants != planned.grants:
            names = [n for n in {**planned.grants, **self.grants} if planned.grants.get(n) != self.grants.get(n)]
            name = names[0]
            return (
                f"{name}: {planned.grants.get(name, 0)} tokens planned, {self.grants.get(name, 0)} scheduled"
                f" ({len(names)} requests differ)"
            )
        for name in self.hits:
            if name not in planned.hits and name not in planned.swapped_in:
                return f"{name}: holds no memory, and was planned as if it did"
        for name, hit in planned.hits.items():
            if self.hits.get(name) != hit:
                return f"{name}: {hit} prefix tokens planned, {self.hits.get(name)} found"
        return ""
