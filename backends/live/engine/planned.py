"""A plan under the live engine's request ids, and what the engine made of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

if TYPE_CHECKING:
    from twinserve.backends.live.physical.layout import Layout


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What the scheduler shall do in one step.

    grants      {request id: tokens}, in order
    hits        {request id: prefix tokens} of those admitted
    preempted   (request id, kind), in order
    swapped_in  request ids whose KV comes back from the host
    layout      where all KV lies and what moves, for an engine with a physical layout; None: vLLM
                lays it out
    """

    grants: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    preempted: tuple[tuple[str, Preemption], ...] = ()
    swapped_in: tuple[str, ...] = ()
    layout: Layout | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        grants: Iterable[tuple[int, int]],
        admitted: Iterable[tuple[int, int]],
        preempted: Iterable[tuple[int, Preemption]],
        swapped_in: Iterable[int],
    ) -> PlannedStep:
        """A decision about rows whose request ids are `ids`; parts as those of a StepPlan."""
        return cls(
            {ids[row]: tokens for row, tokens in grants},
            {ids[row]: hit for row, hit in admitted},
            tuple((ids[row], kind) for row, kind in preempted),
            tuple(ids[row] for row in swapped_in),
        )

    def split(self, room: int, alive: Container[str]) -> tuple[PlannedStep, PlannedStep]:
        """What goes into an engine step of `room` tokens, and the rest; of the requests in `alive`.
        Memory is taken with the first part. Prefix hits and KV from the host come with a request's
        first grant."""
        now, later = {}, {}
        for name, tokens in self.grants.items():
            if name in alive:
                part = min(tokens, room)
                room -= part
                now |= {name: part} if part else {}
                later |= {name: tokens - part} if tokens > part else {}

        def part_of(grants: dict[str, int], preempted, first: bool) -> PlannedStep:
            hits = {name: hit for name, hit in self.hits.items() if (name in now) is first}
            back = tuple(name for name in self.swapped_in if (name in now) is first)
            return PlannedStep(grants, hits, preempted, back)

        return part_of(now, self.preempted, True), part_of(later, (), False)


class EngineRequests:
    """Which requests hold memory on the engine. Plans come under its ids, and take there what plans
    without a step have taken on paper.

    holds   id -> row
    """

    def __init__(self, requests: RequestTable) -> None:
        self.requests = requests
        self.holds: dict[str, int] = {}
        # swapped in on paper, not granted yet; only asked, never walked through
        self._coming: set[str] = set()

    def planned(self, plan: StepPlan, gone: Container[int] = ()) -> PlannedStep:
        """`plan` as the engine's next step, without grants to rows in `gone`. A row may come back
        some steps before it is granted anything; its KV then comes with the first grant."""
        requests, ids, holds = self.requests, self.requests.ids, self.holds
        taken = {ids[row]: kind for row, kind in plan.preempted}
        # memory taken by a plan without a step, and given back by this one
        taken |= {ids[row]: Preemption.RECOMPUTE for row, _ in plan.admitted}
        taken |= {ids[row]: Preemption.SWAP for row in plan.swapped_in}
        for name, row in holds.items():  # also rows that began anew
            if name not in taken and requests.state[row] != State.RUNNING:
                swapped = requests.state[row] == State.SWAPPED
                taken[name] = Preemption.SWAP if swapped else Preemption.RECOMPUTE
        preempted = tuple((name, kind) for name, kind in taken.items() if name in holds)
        for name, _ in preempted:
            del holds[name]
        self._coming |= {ids[row] for row in plan.swapped_in}
        pairs = zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        grants = [(row, tokens) for row, tokens in pairs if row not in gone]
        back = [row for row, _ in grants if ids[row] in self._coming]
        self._coming.difference_update(ids[row] for row, _ in [*grants, *plan.preempted])
        holds |= {ids[row]: row for row, _ in grants}
        return replace(PlannedStep.of(ids, grants, plan.admitted, (), back), preempted=preempted)

    def forget(self, name: str) -> None:
        """The request is no more."""
        self.holds.pop(name, None)
        self._coming.discard(name)


@dataclass(slots=True)
class ScheduledStep:
    """What vLLM's scheduler did. free_blocks: of its own pool, after it. unplanned: victims that
    nobody named; unfilled: requests that should have come back from the host and did not."""

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
            names = [
                n
                for n in {**planned.grants, **self.grants}
                if planned.grants.get(n) != self.grants.get(n)
            ]
            name = names[0]
            return (
                f"{name}: {planned.grants.get(name, 0)} tokens planned, "
                f"{self.grants.get(name, 0)} scheduled"
                f" ({len(names)} requests differ)"
            )
        for name in self.hits:
            if name not in planned.hits and name not in planned.swapped_in:
                return f"{name}: holds no memory, and was planned as if it did"
        for name, hit in planned.hits.items():
            if self.hits.get(name) != hit:
                return f"{name}: {hit} prefix tokens planned, {self.hits.get(name)} found"
        return ""
