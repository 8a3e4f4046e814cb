"""Sarathi-Serve: chunked prefills and stall-free batching.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"
(OSDI 2024), Sec. 4.1 to 4.3, Alg. 3; on other points the authors'
`sarathi/core/scheduler/sarathi_scheduler.py`.

A step has `chunk_size` tokens, the paper's token budget. All decodes come first, so that none is
ever held up by a prompt; then prompts that have begun; then new ones, first come, first served,
each with as much of its prompt as the budget has left. A new one begins only if there is memory for
all of its prompt. If a decode finds no memory, the request behind all others is recomputed.

Ours: at most `chunk_size` requests run at once, since the decodes of more would not fit into a
step; with drafts fewer, as each decode takes more of it. A prompt's memory must be there when it
begins, but is taken chunk by chunk. Left out: the authors' dynamic chunk sizes and pipeline stages.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from twinserve.policies.base import SystemView
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queue_policy import QueueOptions, QueuePolicy, _Batch
from twinserve.policies.parts.queues import FcfsQueue
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable


class SarathiOptions(QueueOptions):
    """chunk_size  tokens of a step, decodes included (the paper's token budget: 512 for strict
       objectives, 2048 for relaxed
    ones); --max-num-batched-tokens bounds it too
    """

    chunk_size: int = Field(512, ge=1)
    enable_chunked_prefill: Literal[True] = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"


class SarathiPolicy(QueuePolicy[SarathiOptions]):
    name = "sarathi"
    Options = SarathiOptions
    waiting: FcfsQueue

    def setup(self) -> None:
        tokens = min(self.options.chunk_size, self.limits.max_num_batched_tokens)
        seats = min(self.limits.max_num_seqs, self._most_decodes(tokens))
        self.limits = replace(self.limits, max_num_batched_tokens=tokens, max_num_seqs=seats)
        super().setup()
        self.waiting = FcfsQueue()
        self._partial: list[int] = []  # rows in the batch whose prompts are not computed yet

    def _most_decodes(self, tokens: int) -> int:
        """So many requests, and any fewer, decode in a step of `tokens`, each with its drafts."""
        if not isinstance(self.limits, DraftingLimits):
            return tokens
        drafting = self.limits.drafting
        if tokens <= drafting.slots:
            raise PolicyError(
                f"policy {self.name!r}, option chunk_size={self.options.chunk_size}: a draft model "
                f"takes {drafting.slots} of {tokens} tokens for each request of a step, and leaves "
                f"none to compute; give {drafting.slots + 1} or more"
            )
        most = 0
        while (most + 1) * (1 + drafting.after(most + 1) + drafting.slots) <= tokens:
            most += 1
        return max(most, 1)  # alone in a step too short for them a request gets fewer drafts

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self.waiting.add(row, requests)

    def rank(self, row: int) -> tuple:
        return row in self._partial, row

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        if self._partial:
            left = (
                view.requests.known_tokens(self._partial)
                - view.requests.computed_tokens[self._partial]
            )
            partial = [
                row
                for row, n in zip(self._partial, left.tolist(), strict=True)
                if n > 1 and row in self.running
            ]
            if partial != self._partial:
                self._partial = partial
                self.reorder()
        return super().plan(view, ledger)

    def _run(self, row: int, new: int, batch: _Batch) -> None:
        self._partial.append(row)
        super()._run(row, new, batch)
