"""Speculative decoding as a scheduler sees it: how many drafts a row may have, and what they take.

Source: vLLM 0.32, `v1/core/sched/scheduler.py`, `config/speculative.py`
(`max_num_new_slots_for_drafting`), `config/vllm.py` (`num_lookahead_tokens`),
`v1/spec_decode/dynamic/utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twinserve.policies.base import EngineLimits

Method = Literal["ngram", "draft_model", "eagle", "mtp"]
METHODS: tuple[str, ...] = get_args(Method)
_HEADS = ("eagle", "mtp")  # drafters that read the target's hidden states


@dataclass(frozen=True)
class Drafting:
    """Drafts that a row has after each step in which it got a token.

    tokens      most drafts of a row; a step verifies them with the row's next token
    lookahead   KV slots beyond the tokens of a step, for the drafter's own
    slots       of the token budget that each row of a step takes besides
    drops_hit   the drafter needs the target's hidden states before the first new token, so the last
                block of a prefix hit is computed again (EAGLE, MTP)
    by_batch    drafts by rows of the step that makes them, from one row on; the last one holds for
                larger batches. None: always `tokens`
    """

    tokens: int
    lookahead: int = 0
    slots: int = 0
    drops_hit: bool = False
    by_batch: tuple[int, ...] | None = None

    @classmethod
    def of(cls, method: str, tokens: int, by_batch: tuple[int, ...] | None = None) -> Drafting:
        """As vLLM has it for a drafter of this kind; n-grams leave no KV, on either processor."""
        heads, model = method in _HEADS, method == "draft_model"
        return cls(tokens, tokens if heads or model else 0, int(model), heads, by_batch)

    def after(self, rows: int) -> int:
        """Drafts for the rows of a step of so many."""
        if self.by_batch is None:
            return self.tokens
        return self.by_batch[min(max(rows, 1), len(self.by_batch)) - 1]

    @property
    def pads(self) -> bool:
        """Return whether a row admitted with one token to compute gets drafts that cannot be right.
        All decodes of a step then have the same length (CUDA graphs)."""
        return self.by_batch is None


@dataclass(frozen=True)
class DraftingLimits(EngineLimits):
    """Limits of an engine that speculates."""

    drafting: Drafting = Drafting(0)
