"""What both sides of the identity test are given and what they must show after each step.

Plain data without vLLM or torch, so that scenarios and our own side can be used where vLLM is not
installed.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class EngineSettings:
    """The scheduler's configuration; names follow vLLM where vLLM has one.

    num_blocks                    usable KV blocks (vLLM's own count is one more: it keeps a null
                                  block)
    block_tokens                  tokens a block
    max_num_seqs                  requests that may run together
    max_num_batched_tokens        new tokens a step
    long_prefill_token_threshold  most prompt tokens one request gets in a step while it has
                                  company; 0: no cap
    watermark                     share of the blocks (null block included) to keep free when
                                  admitting to a non-empty batch
    reserve_full_isl              admit a request only if all its known tokens would fit now
    max_model_len                 prompt plus output tokens of one request; must fit in num_blocks
    async_scheduling              a step is scheduled while the one before it runs
    draft_tokens                  drafts of a request a step; 0: no speculation
    draft_method                  whose drafts, of twinserve.policies.drafting.METHODS
    drafts_by_batch               (first, last, drafts) of batch sizes, as vLLM's
                                  num_speculative_tokens_per_batch_size; empty: always draft_tokens
    draft_rate                    share of drafts that are right, each after a right one
    pipeline_stages               as many batches are under way
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_tokens: int = 16
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = False
    policy: str = "fcfs"
    watermark: float = 0.0
    reserve_full_isl: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    draft_tokens: int = 0
    draft_method: str = "ngram"
    drafts_by_batch: tuple[tuple[int, int, int], ...] = ()
    draft_rate: float = 0.7
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"EngineSettings.policy is {self.policy!r}; use 'fcfs' or 'priority'")
        if self.max_model_len > self.num_blocks * self.block_tokens:
            raise ValueError(
                f"EngineSettings.max_model_len {self.max_model_len} exceeds the cache of "
                f"{self.num_blocks * self.block_tokens} tokens; a request could never end"
            )


@dataclass(frozen=True, eq=False)
class RequestSpec:
    """One request of a scenario.

    prefix        int64 content ids, one for each block of the prompt (a partial last block
                  included): equal ids mean equal text from the start up to the end of that block;
                  None: shares nothing
    priority      smaller is more urgent (used by policy 'priority' only)
    arrival_step  index of the step before which it is submitted
    arrival_s     its arrival time in seconds; breaks ties of priority, and may tie itself
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    prefix: np.ndarray | None = None
    priority: int = 0
    arrival_step: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """`requests` are in order of submission."""

    name: str
    settings: EngineSettings
    requests: list[RequestSpec] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Observed:
    """One step as seen from outside. With asynchronous scheduling: one schedule, and then the end
    of the step before it, if there was one. With pipeline stages: one schedule, and then the end
    of the oldest batch, if as many are under way.

    scheduled    request id -> new tokens, in the order in which the scheduler granted them
    preempted    victims in the order in which they were preempted
    free_blocks  after the schedule, before ended requests give theirs back; without the null block
    hits         request id -> prefix tokens found, for each request (new or resumed) admitted in
                 this step
    finished     ids that ended with this step's tokens (asynchronous: the step before), in order
    running      the batch in order, after ended requests left it
    waiting      requests queued after the step, preempted ones included
    """

    scheduled: dict[str, int]
    preempted: tuple[str, ...]
    free_blocks: int
    hits: dict[str, int]
    finished: tuple[str, ...]
    running: tuple[str, ...]
    waiting: int


class Side(Protocol):
    """One of the two schedulers under comparison."""

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        prefix: np.ndarray | None,
        priority: int,
        arrival: float,
    ) -> None: ...

    def withdraw(self, request_id: str) -> None:
        """Its client leaves, before the next step."""

    def step(self) -> Observed: ...
