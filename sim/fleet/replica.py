"""A replica of a fleet: its engine, what it is made of, its role, and its life."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from twinserve.backends.ports import Port
from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.request import Request


class Role(StrEnum):
    """What a replica does for requests."""

    SERVE = "serve"  # prompts and outputs
    PREFILL = "prefill"  # prompts, for others
    DECODE = "decode"  # outputs, and prompts that are not computed apart


class Life(StrEnum):
    WARMING = "warming"  # starts up; takes no requests yet
    UP = "up"
    DRAINING = "draining"  # takes no more requests, and finishes those that it has
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Network:
    """A replica's ports to others."""

    out: Port
    into: Port

    @classmethod
    def of(cls, replica: int, bytes_per_s: float, latency_s: float) -> Network:
        """Full duplex: so many bytes each way. latency_s: of a transfer, half of it at either
        end."""
        return cls(
            Port(f"network out of replica {replica}", bytes_per_s, latency_s / 2),
            Port(f"network into replica {replica}", bytes_per_s, latency_s / 2),
        )

    def lose(self, now: float) -> None:
        self.out.lose(now)
        self.into.lose(now)


@dataclass(slots=True, eq=False)
class Replica:
    """made_of  for readers: policy, profile, pool of a fleet file
    model    its step times, as measured beforehand; None: unknown
    life, since_s  its state, and when (seconds) each part of its life began
    requests       by row of the engine's table, without settled ones (`Requests`)
    network        to other replicas; None: nothing goes there"""

    engine: Engine
    role: Role = Role.SERVE
    made_of: dict[str, str] = field(default_factory=dict)
    model: StepTimeModel | None = None
    life: Life = Life.WARMING
    since_s: dict[Life, float] = field(default_factory=dict)
    failed: bool = False
    requests: dict[int, Request] = field(default_factory=dict)
    network: Network | None = None

    @property
    def prefills(self) -> bool:
        """Return whether the replica only computes prompts. Clients get none of its tokens."""
        return self.role is Role.PREFILL

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
        """Return its row of replicas.parquet. NaN seconds: this state was not reached."""
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
