"""An engine of a fleet, with what it was made of, its role, and its life."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.request import Request


class Role(StrEnum):
    """What a replica does for requests."""

    SERVE = "serve"  # prompts and outputs


class Life(StrEnum):
    WARMING = "warming"  # starts up; takes no requests yet
    UP = "up"
    DRAINING = "draining"  # takes no more requests, and finishes those that it has
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Replica:
    """made_of  what a reader is told of it: policy, profile, pool of a fleet file
    model    of its step times, as it was measured beforehand; None: it was not
    life, since_s  what it does, and when (seconds) each part of its life began
    requests       by row of the engine's table
    """

    engine: Engine
    role: Role = Role.SERVE
    made_of: dict[str, str] = field(default_factory=dict)
    model: StepTimeModel | None = None
    life: Life = Life.WARMING
    since_s: dict[Life, float] = field(default_factory=dict)
    failed: bool = False
    requests: list[Request] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.engine.recorder.replica

    @property
    def label(self) -> str:
        return f"replica {self.index}"

    def becomes(self, life: Life, now: float) -> None:
        self.life = life
        self.since_s[life] = now

    def row_of_life(self) -> dict[str, object]:
        """Of replicas.parquet; NaN seconds: did not come to that."""
        ledger = self.engine.core.ledger
        return {
            "replica": self.index,
            "role": self.role.value,
            "policy": self.made_of.get("policy", self.engine.core.policy.name),
            "ledger": ledger.name,
            "profile": self.made_of.get("profile"),
            "num_blocks": ledger.num_blocks,
            "block_tokens": ledger.block_tokens,
            **{f"{life}_s": self.since_s.get(life, math.nan) for life in Life},
            "failed": self.failed,
            **({"pool": self.made_of["pool"]} if "pool" in self.made_of else {}),
        }
