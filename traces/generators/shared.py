"""Prompts that begin with one of a few shared texts, such as system prompts, as prefix blocks."""

from __future__ import annotations

import numpy as np

from twinserve.traces.prefix import blocks_needed, dense, offsets_of
from twinserve.traces.workload import PrefixBlocks

BLOCK_TOKENS = 16  # the KV block of vLLM


def with_shared_text(
    prompt_tokens: np.ndarray,
    group: np.ndarray,
    shared_tokens: np.ndarray,
    block_tokens: int = BLOCK_TOKENS,
) -> PrefixBlocks:
    """Blocks of prompts of which row i begins with `shared_tokens[i]` tokens of text `group[i]`
    (int64[rows] each; rows of one group may share more or less of it). A block with both shared and
    own text is the row's own.
    """
    counts = blocks_needed(prompt_tokens, block_tokens)
    offsets = offsets_of(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(offsets[-1]) - offsets[row]
    common = place < (np.minimum(shared_tokens, prompt_tokens) // block_tokens)[row]
    most = int(counts.max(initial=0)) + 1
    keys = np.where(common, group[row] * most + place, 0)
    own = int(keys.max(initial=0)) + 1
    keys = np.where(common, keys, own + np.arange(len(keys)))
    return PrefixBlocks(dense(keys), offsets, block_tokens)
