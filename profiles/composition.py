"""What one engine step computes, as far as its duration depends on it, and the interface of a
step-time model."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

NO_PREFILLS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Churn:
    """How a step differs from the one before it: what an engine does for that, the same step
    repeated is spared.

    joined       requests that get KV memory with this step: admitted, or back from the host
    swapped_out  requests whose KV goes to the host
    swapped_in   requests whose KV comes back
    swapped_out_tokens, swapped_in_tokens  of these requests, all that they have computed
    changed      other requests than in the step before, or a prompt in one of the two
    """

    joined: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    changed: bool = False


STEADY = Churn()


@dataclass(slots=True)  # one a step: a frozen one takes three times as long to make
class StepComposition:
    """The work of one step. Never changed.

    prefill_new, prefill_resident   int64[p]: tokens computed now and tokens already resident, per
                                    prefilling
                        request (a chunk, a whole prompt, or a recomputation). More than one token,
                        or the first token's computation.
    decode_requests     requests that compute exactly one token after their first
    decode_context      sum over them of resident tokens (the token being computed not included)
    decode_context_max  largest of those
    churn               against the step before; only for models that ask for it
                        (`watches_churn`)
    """

    decode_requests: int = 0
    decode_context: int = 0
    decode_context_max: int = 0
    prefill_new: np.ndarray = field(default_factory=lambda: NO_PREFILLS)
    prefill_resident: np.ndarray = field(default_factory=lambda: NO_PREFILLS)
    churn: Churn = STEADY

    @property
    def new_tokens(self) -> int:
        return self.decode_requests + int(self.prefill_new.sum())


def decode_work(requests: int, context: float) -> StepComposition:
    """A step in which `requests` requests with `context` resident tokens each decode one token."""
    return StepComposition(requests, int(requests * context), int(context))


def prefill_work(new: int, resident: int = 0) -> StepComposition:
    """A step that computes one chunk of `new` tokens on `resident` ones."""
    return StepComposition(prefill_new=np.array([new]), prefill_resident=np.array([resident]))


class StepTimeModel(Protocol):
    """Seconds of engine steps, host overhead included, transfers over PCIe not.

    `decode_run_seconds` answers a run of `steps` steps in which the same requests each decode one
    token a step. Element j must equal, bit for bit,
    `step_seconds(StepComposition(n, context + n * j, context_max + j))` (the fast path needs it).

    watches_churn  its times depend on `StepComposition.churn`
    knows_host     it can tell the host's part of a step
    under_way      steps that are computed at once, one on each pipeline stage
    knows_drafts   it times steps that verify drafts (`VerifyingComposition`) itself; another one is
                   shown a chunk of a prompt for each request that verifies some
    """

    @property
    def under_way(self) -> int:
        return 1

    @property
    def watches_churn(self) -> bool:
        return False

    @property
    def knows_host(self) -> bool:
        return False

    @property
    def knows_drafts(self) -> bool:
        return False

    @abstractmethod
    def step_seconds(self, work: StepComposition) -> float: ...

    @abstractmethod
    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        """float64[steps], seconds."""

    def interval_seconds(self, work: StepComposition) -> float:
        """From the end of one step to that of the next, where such steps follow each other and none
        waits for another one's outcome."""
        return self.step_seconds(work)

    def host_seconds(self, requests: int) -> float:
        """The host's part of a step with so many requests; 0 if unknown."""
        return 0.0

    def hidden_seconds(self, requests: int) -> float:
        """What a step with so many requests takes longer if no step is under way before it."""
        return 0.0

    def allreduce_seconds(self, work: StepComposition) -> float:
        """How much of the step its all-reduces are; 0 on one rank, and if unknown."""
        return 0.0


class AroundModel(StepTimeModel):
    """Another model with something changed: what is not said here or in a subclass is `model`'s."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model

    @property
    def watches_churn(self) -> bool:
        return self.model.watches_churn

    @property
    def knows_host(self) -> bool:
        return self.model.knows_host

    @property
    def knows_drafts(self) -> bool:
        return self.model.knows_drafts

    def host_seconds(self, requests: int) -> float:
        return self.model.host_seconds(requests)

    def hidden_seconds(self, requests: int) -> float:
        return self.model.hidden_seconds(requests)

    def allreduce_seconds(self, work: StepComposition) -> float:
        return self.model.allreduce_seconds(work)


def isolated_prefill_seconds(
    model: StepTimeModel, prompt_tokens: int, chunk: int | None = None
) -> float:
    """Seconds to prefill one prompt alone on the engine, whole or in chunks of `chunk` tokens."""
    return prefill_seconds(model.step_seconds, prompt_tokens, chunk)


def prefill_seconds(
    seconds: Callable[[StepComposition], float],
    prompt_tokens: int,
    chunk: int | None = None,
    done: int = 0,
    total: float = 0.0,
) -> float:
    """Of all chunks of a prompt together, each of which takes `seconds`. done, total: tokens of
    former chunks, and their seconds."""
    while done < prompt_tokens:
        new = min(chunk or prompt_tokens, prompt_tokens - done)
        work = StepComposition(prefill_new=np.array([new]), prefill_resident=np.array([done]))
        total += seconds(work)
        done += new
    return total
