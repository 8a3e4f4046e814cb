"""Paged attention slot by slot in plain PyTorch: what the kernels must compute. For tests."""

import torch

from twinserve.backends.live.attention.slots import BACKWARD


def gather(cache, row, first_row, length: int) -> torch.Tensor:
    """float32[length, kv_heads, head_size]: one sequence's keys (or values) in order of its text.

    cache      [num_blocks, block_tokens, kv_heads, head_size]
    row        int[width] block-table entries      first_row  int[width + 1] where each block's text
               begins
    Asks of every slot which position it stands for, the other way round than `slots.slot_mapping`.
    """
    block_tokens = cache.shape[1]
    text = torch.full((length, *cache.shape[2:]), torch.nan)
    for index, entry in enumerate(int(e) for e in row):
        begin, end = int(first_row[index]), min(int(first_row[index + 1]), length)
        for slot in range(block_tokens):
            from_the_left = entry < BACKWARD
            position = begin + (slot if from_the_left else block_tokens - 1 - slot)
            if position < end:
                text[position] = cache[entry % BACKWARD, slot].float()
    return text


def paged_attention(
    query, keys, values, table, seq_lens, query_start, scale: float, first=None
) -> torch.Tensor:
    """float32[t, heads, head_size]: causal attention of new tokens over their own sequence, in
    float32.

    query         [t, heads, head_size]; head h reads KV head h // (heads // kv_heads)
    keys, values  [num_blocks, block_tokens, kv_heads, head_size], the new tokens already stored
    table         int[n, width] entries (see `slots`)
    seq_lens      int[n] tokens, new ones included      query_start  int[n + 1] into `query`
    scale         factor of the scores
    first         int[n, width + 1] of `slots.first_positions`; None if all blocks but the last are
                  full
    """
    block_tokens = keys.shape[1]
    if first is None:
        first = (torch.arange(table.shape[1] + 1) * block_tokens).expand(len(table), -1)
    out = torch.zeros(query.shape, dtype=torch.float32)
    group = query.shape[1] // keys.shape[2]
    for i in range(len(table)):
        length = int(seq_lens[i])
        begin, end = int(query_start[i]), int(query_start[i + 1])
        k = gather(keys, table[i], first[i], length)
        v = gather(values, table[i], first[i], length)
        for t in range(begin, end):
            position = length - (end - t)
            for head in range(query.shape[1]):
                scores = k[: position + 1, head // group] @ query[t, head].float() * scale
                out[t, head] = torch.softmax(scores, 0) @ v[: position + 1, head // group]
    return out
