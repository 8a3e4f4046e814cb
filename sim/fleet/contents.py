"""What a request's KV blocks hold, by name: content ids of the trace's prefix blocks."""

from __future__ import annotations

import numpy as np

from twinserve.traces.workload import Workload, WorkloadError


def content_ids(workload: Workload, row: int, block_tokens: int) -> np.ndarray | None:
    """int64[n]: ids of the row's full KV blocks of `block_tokens` tokens, from the trace's prefix
    blocks.

    Trace ids name everything up to their block's end. A KV block inside a trace block is named by
    (trace block, place in it); one that spans several is named by the last of them.
    """
    prefix = workload.prefix
    if prefix is None or not _nest(prefix.block_tokens, block_tokens):
        return None  # a ledger that would use them has refused already (shared_contents)
    blocks = prefix.of(row)
    full = int(workload.prompt_tokens[row]) // block_tokens
    if prefix.block_tokens % block_tokens == 0:
        parts = prefix.block_tokens // block_tokens
        return (blocks[:, None] * parts + np.arange(parts)).ravel()[:full]
    parts = block_tokens // prefix.block_tokens
    return blocks[parts - 1 :: parts][:full]


def _nest(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def shared_contents(workload: Workload, block_tokens: int) -> int:
    """How many content ids `content_ids` can give. Raises WorkloadError where the block sizes do
    not fit together."""
    prefix = workload.prefix
    if prefix is None:
        return 0
    if not _nest(prefix.block_tokens, block_tokens):
        raise WorkloadError(
            f"{workload.provenance.name}: prefix blocks of {prefix.block_tokens} tokens and KV "
            "blocks of "
            f"{block_tokens} tokens do not nest; choose --block-tokens so that one divides the "
            "other"
        )
    return prefix.distinct * max(1, prefix.block_tokens // block_tokens)
