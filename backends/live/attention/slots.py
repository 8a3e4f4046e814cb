"""The physical KV slot of a token, if a block may be filled from either end.

A *block-table entry* is an int32: the block's number, plus BACKWARD if the sequence fills that
block from the right (BROS, IEEE version, Sec. V; there the direction has a table of its own). So
the direction travels with the block numbers, also to a worker in another process. An entry without
the flag is that of any paged cache.

In a forward block the sequence's n-th token of that block lies in slot n, in a backward one in slot
block_tokens - 1 - n. A sequence may also leave a block before it is full: `counts` then says how
many tokens each *cell* (one side of a block) holds. Cell b is the forward side of block b, cell
num_blocks + b its backward side, as in the bidirectional ledger.

Everything here works on NumPy arrays; what says "or tensors" also works on PyTorch tensors, and
keeps them on their device. Nothing imports torch.
"""

import numpy as np

# block * block_tokens still fits in int32, with the flag set, up to 256 tokens a block
BACKWARD = 1 << 22


def entries_of(blocks, backward) -> np.ndarray:
    """int32[...]: block-table entries of `blocks` (ints below BACKWARD), `backward` a bool or one
    for each block.

    Raises ValueError for a block number that cannot be encoded.
    """
    blocks = np.asarray(blocks, np.int64)
    if blocks.size and not 0 <= blocks.min() <= blocks.max() < BACKWARD:
        worst = blocks.max() if blocks.max() >= BACKWARD else blocks.min()
        raise ValueError(
            f"block {worst} cannot be put in a block table; blocks are numbered 0 to {BACKWARD - 1}"
        )
    return (blocks + BACKWARD * np.asarray(backward, bool)).astype(np.int32)


def block_of(entries):
    """The blocks of `entries` (arrays or tensors)."""
    return entries & (BACKWARD - 1)


def is_backward(entries):
    """0 or 1 for each of `entries` (arrays or tensors): filled from the right?"""
    return (entries // BACKWARD) & 1


def cell_of(entries, num_blocks: int):
    """Return cells, of 2 * num_blocks (arrays or tensors); of a meaningless entry some cell."""
    return block_of(entries).clip(max=num_blocks - 1) + num_blocks * is_backward(entries)


def first_positions(table, counts, out):
    """Write into `out` where each block's text begins, and return it (arrays or tensors, all of one
    kind).

    table   int32[n, width] entries; what stands behind a sequence's last block does not matter
    counts  int[2 * num_blocks] by cell: tokens that its sequence holds there, at least 1;
            block_tokens in the last block of a sequence, which it still fills
    out     int32[n, width + 1]; out[i, j] becomes the position of the first token in the j-th block
            of sequence i, out[i, j + 1] the end of that block's text
    """
    held = counts[cell_of(table, len(counts) // 2)]
    out[:, 0] = 0
    out[:, 1:] = held.cumsum(1)
    return out


def slot_mapping(table, sequences, positions, block_tokens: int, first=None):
    """int64[t]: for each token the physical slot, block * block_tokens + slot (arrays or tensors).

    table      int32[n, width] entries
    sequences  int64[t] row of the token's sequence       positions  int64[t] its place in the text
    first      `first_positions` of the table, or None if all blocks but the last are full
    """
    if first is None:
        index, rank = positions // block_tokens, positions % block_tokens
    else:
        index = (first[sequences, 1:] <= positions[:, None]).sum(1)
        rank = positions - first[sequences, index]
    entries = table[sequences, index]
    slots = rank + is_backward(entries) * (block_tokens - 1 - 2 * rank)
    return block_of(entries) * block_tokens + slots


def tokens_of_batch(query_start: np.ndarray, seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[t] row, int64[t] position) of every new token in a batch.

    query_start  int[n + 1]: row i's new tokens are those from query_start[i] up to query_start[i +
                 1]
    seq_lens     int[n]: its tokens, the new ones (its last) included
    """
    query_start, seq_lens = np.asarray(query_start, np.int64), np.asarray(seq_lens, np.int64)
    new = np.diff(query_start)
    rows = np.repeat(np.arange(len(new)), new)
    return rows, np.arange(query_start[0], query_start[-1]) - query_start[1:][rows] + seq_lens[rows]
