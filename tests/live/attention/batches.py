"""Random batches over shared blocks, to check attention kernels with. Needs torch.

Every slot that no sequence owns holds NaN, and so does every owned slot of a text's future: an
answer that is finite and right has read nothing else.
"""

from dataclasses import dataclass

import numpy as np
import torch

from twinserve.backends.live.attention import reference, slots
from twinserve.backends.live.attention.cache import split_cache
from twinserve.backends.live.attention.cells import CellCounts

# of the cache's memory: [blocks, 2, slots, heads, dim], [2, blocks, ...], or vLLM 0.32's, where a
# head's keys and values lie side by side
LAYOUTS = ("split", "outer", "joint")


@dataclass
class Batch:
    """A step in which the last new[i] tokens of every sequence are computed; their KV is not in the
    cache yet. Arrays and tensors as `reference.paged_attention` takes them; key, value: of the new
    tokens. shared: blocks that two sequences are in."""

    table: np.ndarray
    lengths: np.ndarray
    new: np.ndarray
    query_start: np.ndarray
    first: np.ndarray | None
    counts: CellCounts
    kv_cache: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    shared: int

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[1]

    def slots_of(self, row: int) -> torch.Tensor:
        """int64[length] of one sequence's text."""
        length = int(self.lengths[row])
        return torch.from_numpy(
            slots.slot_mapping(
                self.table, np.full(length, row), np.arange(length), self.block_tokens, self.first
            ).astype(np.int64)
        )

    def answer(self, keys=None, values=None) -> torch.Tensor:
        """By the reference."""
        return reference.paged_attention(
            self.query,
            self.keys if keys is None else keys,
            self.values if values is None else values,
            self.table,
            self.lengths,
            self.query_start,
            self.scale,
            self.first,
        )


def make_batch(
    seed: int,
    sequences: int,
    block_tokens: int,
    kv_heads: int,
    group: int,
    head: int,
    dtype=torch.float32,
    partial: bool = False,
    longest: int = 70,
    layout: str = "split",
    decodes_only: bool = False,
) -> Batch:
    """`partial`: sequences may leave any block early. Directions are drawn for each block."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, sequences).astype(np.int32)
    held = [_held(rng, int(n), block_tokens, partial) for n in lengths]
    num_blocks = sum(map(len, held)) + 2
    used = np.zeros((2, num_blocks), np.int64)  # tokens on either side of a block
    entries = [[_place(rng, used, count, block_tokens) for count in counts] for counts in held]
    width = max(map(len, entries)) + 2
    table = slots.entries_of(
        rng.integers(0, num_blocks, (sequences, width)), rng.random((sequences, width)) < 0.5
    )  # a worker's table holds leftovers behind a sequence's blocks
    counts = CellCounts(num_blocks, block_tokens, torch.device("cpu"))
    for i, (row, tokens) in enumerate(zip(entries, held, strict=True)):
        table[i, : len(row)] = row
        if partial:
            counts.set(row[:-1], tokens[:-1])
    first = None
    if partial:
        room = torch.empty((sequences, width + 1), dtype=torch.int32)
        first = counts.first_positions(torch.from_numpy(table), room).numpy()

    new = np.where(rng.random(sequences) < 0.5, 1, rng.integers(1, lengths + 1)).astype(np.int32)
    if decodes_only:
        new[:] = 1
    new = new[order := np.argsort(new != 1, kind="stable")]  # as vLLM sorts: decodes first
    table, lengths = table[order], lengths[order]
    first = None if first is None else first[order]
    query_start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)

    shape = {
        "split": (num_blocks, 2, block_tokens, kv_heads, head),
        "outer": (2, num_blocks, block_tokens, kv_heads, head),
        "joint": (num_blocks, kv_heads, block_tokens, 2 * head),
    }[layout]
    kv_cache = torch.full(shape, torch.nan, dtype=dtype)
    keys, values = split_cache(kv_cache, head)
    torch.manual_seed(seed)
    total = int(query_start[-1])

    def draw(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, head).to(dtype)

    batch = Batch(
        table, lengths, new, query_start, first, counts, kv_cache, keys, values,
        draw(total, kv_heads * group), draw(total, kv_heads), draw(total, kv_heads),
        head**-0.5, int((used > 0).all(0).sum()),
    )  # fmt: skip
    for row in range(sequences):
        old = batch.slots_of(row)[: lengths[row] - new[row]]
        for cache in (keys, values):
            cache[old // block_tokens, old % block_tokens] = draw(len(old), kv_heads)
    return batch


def _held(rng, length: int, block_tokens: int, partial: bool) -> list[int]:
    """Tokens in each block of a text."""
    held = []
    while length:
        most = min(block_tokens, length)
        held.append(int(rng.integers(1, most + 1)) if partial and rng.random() < 0.6 else most)
        length -= held[-1]
    return held


def _place(rng, used: np.ndarray, count: int, block_tokens: int) -> int:
    """An entry with room for `count` tokens on a free side, beside another sequence if there is."""
    fits = (used == 0) & (used[::-1] + count <= block_tokens)
    beside = fits & (used[::-1] > 0)
    side, block = rng.choice(np.argwhere(beside if beside.any() else fits))
    used[side, block] = count
    return int(slots.entries_of(block, side == 1))
