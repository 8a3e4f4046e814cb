"""What a policy answers (StepPlan) and what the engine reports back (StepOutcome): plain data,
logged and replayed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from twinserve.policies.kv.offload.connector import Jobs


class Preemption(Enum):
    """What happens to the KV of a request that loses its place. A request left out of a plan is
    only paused."""

    RECOMPUTE = "recompute"  # dropped; computed again later
    SWAP = "swap"  # copied to the host, back when resumed


class Place(NamedTuple):
    """Where KV can lie, as seen from the engine that the plan is for.

    number  which one of its kind; 0 is the engine's own
    """

    kind: Literal["device", "host"]
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if self.number else self.kind


DEVICE, HOST = Place("device"), Place("host")


class Hold(Enum):
    """Which rows wait for a transfer."""

    NOTHING = "nothing"  # its destination is not needed yet
    REQUEST = "request"  # the request is not ready before it ended; the step goes on
    STEP = "step"  # overlaps with the step's execution, which ends no earlier (BROS: max of both)
    BEFORE_STEP = "before"  # the step starts only when it is done (vLLM 0.x's blocking swap)


@dataclass(frozen=True, slots=True)
class KvMove:
    """One transfer of KV from one place to another.

    tokens  slots moved; bytes are tokens * the engine's KV bytes a token (* len(layers) / all
            layers)
    blocks, slots   device blocks touched and, for each, the half-open slot range (int64[n],
                    int64[n, 2]); None if only the amount is known
    layers  indices of the layers moved, None for all
    """

    row: int
    source: Place
    target: Place
    tokens: int
    hold: Hold = Hold.STEP
    blocks: np.ndarray | None = None
    slots: np.ndarray | None = None
    layers: tuple[int, ...] | None = None

    def held(self, hold: Hold) -> KvMove:
        """Return the same transfer with `hold` set. It replaces `dataclasses.replace`, which takes
        several times as long: plans with scarce memory have thousands of transfers."""
        if self.hold is hold:
            return self
        return KvMove(
            self.row,
            self.source,
            self.target,
            self.tokens,
            hold,
            self.blocks,
            self.slots,
            self.layers,
        )


_NO_ROWS = np.zeros(0, np.int64)


@dataclass(slots=True)
class StepPlan:
    """The decision for one step.

    rows, tokens  int64[n]: grants in order. A row computes `tokens` tokens, and emits one if it
                  catches up with its known text
    admitted      (row, tokens found in the prefix cache) of rows that had no KV, in order of
                  admission
    preempted     (row, kind), in order
    swapped_in    rows whose KV returns from the host
    fetched       (row, tokens found in the prefix cache) of rows that had no KV and take memory for
                  KV that another engine computed (`RequestTable.remote_tokens`). They are not ready
                  before that has landed
    offload       transfers between the device and a host tier of KV blocks (policies/kv/offload)
    begun         fetched rows that compute for the first time
    moves         transfers that start with this step
    valid_for     number of further steps for which the decision holds if nothing arrives, ends or
                  lands. Each row computes as many tokens again; rows that emit decode one token
    chunked       with `valid_for`: some rows are prompts, none of which ends in these steps
    valid_until_s further steps must start before this time (seconds on the engine's clock)

    outlasts_ends: with `valid_for`, requests that end with the step under way change nothing.
    """

    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    tokens: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[tuple[int, Preemption]] = field(default_factory=list)
    swapped_in: list[int] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    offload: Jobs | None = None
    moves: list[KvMove] = field(default_factory=list)
    valid_for: int = 0
    chunked: bool = False
    outlasts_ends: bool = False
    valid_until_s: float = math.inf

    def once(self) -> StepPlan:
        """Return the same plan for a single step."""
        return StepPlan(
            self.rows,
            self.tokens,
            self.admitted,
            self.preempted,
            self.swapped_in,
            self.fetched,
            self.begun,
            self.offload,
            self.moves,
            chunked=self.chunked,
            valid_until_s=self.valid_until_s,
        )

    def __bool__(self) -> bool:
        return len(self.rows) > 0

    @property
    def changes_memory(self) -> bool:
        """Return whether the plan does more than grant tokens."""
        return bool(
            self.moves
            or self.preempted
            or self.admitted
            or self.swapped_in
            or self.fetched
            or self.offload
        )


@dataclass(slots=True)
class Verified:
    """What a step made of drafts, for each row that got tokens. Arrays are int64[e], `certain` is
    bool[e].

    tokens    tokens that the row got: accepted drafts and one more, up to the row's last token
    drafted   drafts that the step verified
    accepted  leading drafts that were right, those behind the row's last token included (as in
              vLLM's counts)
    certain   the row ends with this step even if no draft is right; known when the step begins
    ahead     drafts of the row in its next step, if the drafter finds as many as it can (n-grams in
              a text); None: as `Drafting.after` says
    """

    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    certain: np.ndarray
    ahead: np.ndarray | None = None

    def only(self, chosen: np.ndarray) -> Verified:
        """Return the entries of the rows `chosen` (bool[e])."""
        return Verified(
            self.tokens[chosen],
            self.drafted[chosen],
            self.accepted[chosen],
            self.certain[chosen],
            None if self.ahead is None else self.ahead[chosen],
        )


@dataclass(slots=True)
class StepOutcome:
    """The result of executing a plan. It covers several steps if the engine used `valid_for`.

    ends_s    float64[k], increasing: when each step ended, on the engine's clock
    start_s   when the first step began
    emitted   int64[e]: rows that got a token in every one of these steps, in plan order
    finished  rows that ended with the last step, in plan order
    verified  if the engine speculates: what each of `emitted` got; None: one token each
    """

    start_s: float
    ends_s: np.ndarray
    emitted: np.ndarray
    finished: list[int]
    verified: Verified | None = None

    @property
    def seconds(self) -> np.ndarray:
        """Return float64[k]: the duration of each step."""
        durations = self.ends_s.copy()
        durations[1:] -= self.ends_s[:-1]
        durations[0] -= self.start_s
        return durations
