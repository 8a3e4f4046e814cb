"""A plan under the live engine's request ids, and what the engine made of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinserve.policies.plan import Preemption, StepPlan

if TYPE_CHECKING:
    from twinserve.backends.live.physical.layers import LayerLayout
    from twinserve.backends.live.physical.layout import Layout


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What the scheduler shall do in one step.

    grants      {request id: tokens}, in order
    hits        {request id: prefix tokens} of those admitted
    preempted   (request id, kind), in order
    swapped_in  request ids whose KV comes back from the host
    forgotten   request ids whose KV on the host counts no more
    layout      where all KV lies and what moves, for an engine with a physical layout; None: vLLM
                lays it out
    """

    grants: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    preempted: tuple[tuple[str, Preemption], ...] = ()
    swapped_in: tuple[str, ...] = ()
    layout: Layout | LayerLayout | None = None
    forgotten: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether KV goes over the link in this step."""
        if self.layout is not None:
            return self.layout.moves
        return bool(self.swapped_in) or any(kind is Preemption.SWAP for _, kind in self.preempted)

    def split(self, room: int, alive: Container[str]) -> tuple[PlannedStep, PlannedStep]:
        """Return the part that fits into an engine step of `room` tokens, and the rest, for the
        requests in `alive`. The first part takes the memory. Prefix hits and KV from the host come
        with a request's first grant."""
        grants = self.grants
        whole = sum(grants.values()) <= room and all(name in alive for name in grants)
        # one that has left since the plan was made may have been admitted by it
        if whole and all(name in grants for name in (*self.hits, *self.swapped_in)):
            return self, PlannedStep()
        now, later = {}, {}
        for name, tokens in self.grants.items():
            if name in alive:
                part = min(tokens, room)
                room -= part
                now |= {name: part} if part else {}
                later |= {name: tokens - part} if tokens > part else {}

        def part_of(grants: dict[str, int], preempted, forgotten, first: bool) -> PlannedStep:
            hits = {name: hit for name, hit in self.hits.items() if (name in now) is first}
            back = tuple(name for name in self.swapped_in if (name in now) is first)
            return PlannedStep(grants, hits, preempted, back, forgotten=forgotten)

        return (part_of(now, self.preempted, self.forgotten, True), part_of(later, (), (), False))


class EngineRequests:
    """Translate plans into an engine's request ids: for a decision log, a run in this process, and
    a server.

    An engine moves KV only in its steps, and gives a request memory with its first grant. So events
    between two steps add up until the next one: pass every plan without grants to `follow`, every
    other one to `planned`.

    holds   ids with KV on the engine's device
    away    ids with KV on its host
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids  # of rows; may grow
        # of these and those below no order is asked but that of `_lost`
        self.holds: set[str] = set()
        self.away: set[str] = set()
        self._lost: dict[str, Preemption] = {}  # of those in `holds`: on paper they do not any more
        self._forgotten: list[str] = []  # their copies on the host count no more
        self._hits: dict[str, int] = {}  # admitted, and not granted anything yet
        self._coming: set[str] = set()  # on paper back from the host, and not granted anything yet

    def follow(
        self,
        preempted: Iterable[tuple[int, Preemption]],
        admitted: Iterable[tuple[int, int]],
        swapped_in: Iterable[int],
    ) -> None:
        """Apply what a plan does to memory. Arguments are parts of a StepPlan."""
        for row, kind in preempted:
            self._lose(self.ids[row], kind)
        for row, hit in admitted:
            name = self.ids[row]
            self._lose(name, Preemption.RECOMPUTE)  # what the engine still has of it
            self._hits[name] = hit
        self._coming |= {self.ids[row] for row in swapped_in}

    def planned(
        self,
        grants: Iterable[tuple[int, int]],
        preempted: Iterable[tuple[int, Preemption]],
        admitted: Iterable[tuple[int, int]],
        swapped_in: Iterable[int],
    ) -> PlannedStep:
        """A plan as the engine's next step. grants: (row, tokens), in order."""
        self.follow(preempted, admitted, swapped_in)
        granted = {self.ids[row]: tokens for row, tokens in grants}
        lost, self._lost = self._lost, {}
        forgotten, self._forgotten = self._forgotten, []
        self.holds -= lost.keys()
        self.away |= {name for name, kind in lost.items() if kind is Preemption.SWAP}
        back = tuple(name for name in granted if name in self._coming and name in self.away)
        hits = {name: self._hits.pop(name) for name in granted if name in self._hits}
        self.away.difference_update(back)
        self._coming -= granted.keys()
        self.holds |= granted.keys()
        return PlannedStep(granted, hits, tuple(lost.items()), back, forgotten=tuple(forgotten))

    def of_plan(self, plan: StepPlan, gone: Container[int] = ()) -> PlannedStep:
        """`planned` for a StepPlan, without grants to rows in `gone`."""
        pairs = zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        grants = [(row, tokens) for row, tokens in pairs if row not in gone]
        return self.planned(grants, plan.preempted, plan.admitted, plan.swapped_in)

    def begin_anew(self, name: str) -> None:
        """The request now is another row, which holds nothing."""
        self._lose(name, Preemption.RECOMPUTE)

    def forget(self, name: str) -> None:
        """The request has ended; the engine gives back what it has of it."""
        for names in (self.holds, self.away, self._coming):
            names.discard(name)
        self._lost.pop(name, None)
        self._hits.pop(name, None)
        if name in self._forgotten:
            self._forgotten.remove(name)

    def _lose(self, name: str, kind: Preemption) -> None:
        if name in self.holds:
            self._lost[name] = kind
        if kind is Preemption.RECOMPUTE:
            self._hits.pop(name, None)
            if name in self.away:
                self.away.remove(name)
                self._forgotten.append(name)
        self._coming.discard(name)


@dataclass(slots=True)
class ScheduledStep:
    """What vLLM's scheduler did. free_blocks: of its own pool, after it. unplanned: victims that
    without a name; unfilled: requests that should have come back from the host and did not. drafts:
    {request id: drafts to verify} of those that have some, padding not counted."""

    grants: dict[str, int]
    hits: dict[str, int]
    free_blocks: int
    unplanned: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    drafts: dict[str, int] = field(default_factory=dict)

    def drift(self, planned: PlannedStep) -> str:
        """Return how the step differs from `planned`, or an empty text."""
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
