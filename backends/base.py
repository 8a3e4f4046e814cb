"""The interface between an engine's loop and what executes plans: simulation or a live engine."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.profiles.composition import StepComposition


@dataclass(slots=True)
class Executed:
    """An outcome with its details, for step records and for requests held back by transfers."""

    outcome: StepOutcome
    work: StepComposition
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    # rows that wait for a transfer -> when it lands
    ready_s: dict[int, float] = field(default_factory=dict)
    # rows with a transfer for which no step waits -> when the last of them lands
    lands_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Transfers:
    """When the transfers of a plan end. Bytes; seconds on the engine's clock.

    ready_s  rows that wait for a transfer -> when it lands
    lands_s  rows with a transfer for which no step waits -> when the last of them lands
    before   when the step may start
    beside   the earliest end of the step
    """

    to_host_bytes: int
    to_device_bytes: int
    ready_s: dict[int, float]
    lands_s: dict[int, float]
    before: float
    beside: float


class Backend(Protocol):
    """Executes the plans of one engine. Only the backend knows how long an output will be."""

    # True: the outcome of `execute` is known when the step begins, so that the next plan can be
    # made while it runs (asynchronous scheduling)
    plans_ahead: bool = False
    # True: steps of a run end when `execute` said, if they are not slowed (`slow`)
    keeps_time: bool = False

    @property
    def draws_drafts(self) -> bool:
        """Return whether the backend draws at random which drafts are right (speculation)."""
        return False

    def expect(self, row: int, output_tokens: int) -> None:
        """The request in `row`, just submitted, will emit `output_tokens` tokens."""
        ...

    def withdraw(self, row: int) -> None:
        """The request in `row` ended before its last token."""
        ...

    def fetched(self, row: int) -> None:
        """All KV of `row` but that of its last token has come from another engine, so its first
        step is a decode. By default no row fetches."""

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        """Run `plan`, and as many further steps as it stands for, from `now` (seconds).

        emitting: bool[n], rows that emit. overhead_s: passes before the step begins.
        """
        ...

    def transfer(self, plan: StepPlan, now: float) -> Transfers:
        """Queue the transfers of a plan without a step at `now`."""
        ...

    def exposed_s(self, plan: StepPlan) -> float:
        """Seconds that the first step of an idle engine takes longer, if later ones hide them."""
        return 0.0

    def fail(self, now: float) -> None:
        """The engine dies at `now`, and transfers to and from it are lost. By default the backend
        keeps no record."""

    def slow(self, factor: float) -> None:
        """Steps that begin from now on take `factor` times as long; 1 restores their length. By
        default a backend cannot do this."""
        raise TypeError(f"{type(self).__name__} cannot make its steps slower")

    def cut(self, executed: Executed, steps: int) -> None:
        """Only the first `steps` steps of a run happened, because something arrived."""
        ...
