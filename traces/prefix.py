"""Prefix blocks: from the hash ids of a file to dense chained ids, cut and joined with rows."""

from collections.abc import Sequence
from itertools import chain as flattened

import numpy as np

from twinserve.traces.ranges import PrefixRanges
from twinserve.traces.workload import Prefix, PrefixBlocks

LOW_ID, HIGH_ID = -(2**63), 2**64 - 1


def blocks_needed(prompt_tokens: np.ndarray, block_tokens: int) -> np.ndarray:
    """Blocks that a prompt fills, the last one perhaps in part: ceil(prompt / block)."""
    return -(-np.asarray(prompt_tokens, np.int64) // block_tokens)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def concatenate_ids(rows: Sequence[np.ndarray], block_tokens: int) -> PrefixBlocks:
    """PrefixBlocks from one int64 array of dense ids a row."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.concatenate(rows) if len(rows) else np.zeros(0, np.int64)
    return PrefixBlocks(flat.astype(np.int64), offsets_of(counts), block_tokens)


def dense(keys: np.ndarray) -> np.ndarray:
    """Keys renamed 0 .. distinct - 1 in sorted order; what is dense already stays as it is."""
    if len(keys) and keys.min() >= 0 and keys.max() < 4 * len(keys):  # counted, not sorted
        there = np.zeros(int(keys.max()) + 1, bool)
        there[keys] = True
        return (np.cumsum(there) - 1)[keys]
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _dense_of_list(flat: list[int]) -> np.ndarray:
    for dtype in (np.int64, np.uint64):
        try:
            return dense(np.array(flat, dtype=dtype))
        except OverflowError:
            pass
    # Signed and unsigned views in one file: keep them apart, as they are different numbers.
    names = {key: i for i, key in enumerate(sorted(set(flat)))}
    return np.fromiter(map(names.__getitem__, flat), np.int64, len(flat))


def parents(prefix: Prefix) -> np.ndarray:
    """The id before each entry of `prefix.ids` in its row; -1 for the first of a row."""
    ids = prefix.ids
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    starts = prefix.offsets[:-1]
    before[starts[starts < len(before)]] = -1
    return before


def is_chained(prefix: Prefix) -> bool:
    """Return whether each id always follows the same id, so that it names all text before it."""
    before, ids = parents(prefix), prefix.ids
    expected = np.empty(prefix.distinct, np.int64)
    expected[ids] = before
    return bool((expected[ids] == before).all())


def chain(prefix: PrefixBlocks) -> PrefixBlocks:
    """Ids of (everything before, this block), from ids that name a block's own text only."""
    names: dict[tuple[int, int], int] = {}
    flat = []
    bounds = prefix.offsets.tolist()
    ids = prefix.ids.tolist()
    for low, high in zip(bounds, bounds[1:], strict=False):
        last = -1
        for block in ids[low:high]:
            last = names.setdefault((last, block), len(names))
            flat.append(last)
    return PrefixBlocks(np.array(flat, np.int64), prefix.offsets, prefix.block_tokens)


def from_lists(
    rows: Sequence[list[int]], prompt_tokens: np.ndarray, block_tokens: int
) -> tuple[PrefixBlocks, bool]:
    """PrefixBlocks from the hash ids of every row, and whether they had to be chained.

    A row may carry fewer ids than its prompt has blocks: the rest become blocks of this row alone.
    """
    need = blocks_needed(prompt_tokens, block_tokens)
    have = np.fromiter(map(len, rows), np.int64, len(rows))
    known = _dense_of_list(list(flattened.from_iterable(rows)))
    offsets = offsets_of(need)
    if (have == need).all():
        prefix = PrefixBlocks(known, offsets, block_tokens)
    else:
        row_of = np.repeat(np.arange(len(need)), need)
        given = np.arange(offsets[-1]) - offsets[row_of] < have[row_of]
        distinct = int(known.max()) + 1 if len(known) else 0
        ids = np.empty(offsets[-1], np.int64)
        ids[given] = known
        ids[~given] = distinct + np.arange(int((~given).sum()))
        prefix = PrefixBlocks(ids, offsets, block_tokens)
    if is_chained(prefix):
        return prefix, False
    return chain(prefix), True


def unshared(prompt_tokens: np.ndarray, block_tokens: int) -> PrefixRanges:
    """A prefix in which no two blocks are equal."""
    offsets = offsets_of(blocks_needed(prompt_tokens, block_tokens))
    nothing = np.zeros(len(offsets) - 1, np.int64)
    return PrefixRanges(nothing, nothing, offsets[:-1], offsets, block_tokens)


def take(prefix: Prefix, rows: np.ndarray) -> Prefix:
    """The prefix of some rows (indices, any order), with dense ids again."""
    if isinstance(prefix, PrefixRanges):
        return prefix.take(rows)
    counts = np.diff(prefix.offsets)[rows]
    offsets = offsets_of(counts)
    at = np.repeat(prefix.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
    return PrefixBlocks(dense(prefix.ids[at]), offsets, prefix.block_tokens)


def truncate(prefix: Prefix, before: np.ndarray, after: np.ndarray) -> PrefixBlocks:
    """Return the prefix of prompts cut from `before` to `after` tokens, int64[rows] each.

    A block that is cut through is renamed: its rest equals another row's only if that row's block
    was the same and was cut at the same token.
    """
    size = prefix.block_tokens
    counts = blocks_needed(after, size)
    offsets = offsets_of(counts)
    at = np.repeat(prefix.offsets[:-1] - offsets[:-1], counts) + np.arange(offsets[-1])
    left = np.zeros(offsets[-1], np.int64)
    cut = (after < before) & (after % size != 0)
    left[offsets[1:][cut] - 1] = after[cut] % size
    keys = prefix.ids[at] * size + left  # left < size; ids are dense, so this cannot overflow
    return PrefixBlocks(dense(keys), offsets, size)


def join(a: Prefix, b: Prefix) -> Prefix:
    """The rows of a, then those of b; blocks of one never equal blocks of the other."""
    if isinstance(a, PrefixRanges) and isinstance(b, PrefixRanges):
        return a.joined(b)
    return PrefixBlocks(
        np.concatenate([a.ids, b.ids + a.distinct]),
        np.concatenate([a.offsets, b.offsets[1:] + a.offsets[-1]]),
        a.block_tokens,
    )
