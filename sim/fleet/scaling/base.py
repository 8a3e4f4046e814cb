"""The interface of an autoscaler: a small object that says how many replicas there shall be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from twinserve.policies.base import Options
from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.results.recorder import Load

ScalerOptions = TypeVar("ScalerOptions", bound="Ticking")


class Ticking(Options):
    """every  seconds from one decision to the next"""

    every: float = Field(30.0, ge=0.1, le=86_400)


@dataclass(frozen=True)
class Demand:
    """Work of requests that arrive from one time to another (seconds), in seconds of one replica;
    their mean prompt, in tokens."""

    seconds: Callable[[float, float], float]
    prompt_tokens: Callable[[float, float], float]


@dataclass(frozen=True)
class Seen:
    """What an autoscaler looks at.

    now       seconds
    loads     of each replica that takes requests; its KV memory is that of `block_tokens` a block
    starting  replicas that start up
    models    of those replicas' step times
    start_up_s  how long a start takes
    """

    now: float
    loads: list[Load]
    starting: int
    models: list[StepTimeModel]
    block_tokens: int
    start_up_s: float
    demand: Demand

    @property
    def replicas(self) -> int:
        return len(self.loads) + self.starting


class Scaler(ABC, Generic[ScalerOptions]):
    """Decisions only. It may keep what it saw."""

    name: ClassVar[str]
    Options: type[ScalerOptions] = Ticking  # type: ignore[assignment]

    def __init__(self, options: ScalerOptions | None = None) -> None:
        self.options: ScalerOptions = options or self.Options()
        self.setup()

    def setup(self) -> None:
        """The state of a new one; its options are set."""

    @abstractmethod
    def wants(self, seen: Seen) -> int:
        """Replicas that there shall be, those that start up counted."""
