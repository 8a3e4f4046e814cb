"""Triton kernels: paged causal attention and the cache write, for blocks filled from either end.

Attention does not depend on the order of keys, so a backward block needs no reversed load. A tile
is laid out by position; only a position's slot depends on the block's direction. Masks and
causality are those of any paged kernel. Slots of another sequence are never loaded.

The direction is a bit of the block-table entry (see `slots`), so it costs no load of its own. The
write finds its slots from the block table: a batch needs no slot mapping. With PARTIAL the blocks
of a sequence may end before they are full; `first` then has the start of each one's text.

`launch` calls these and gives the shapes. All sizes in elements; scores are kept times log2(e).
"""

import triton
import triton.language as tl

from twinserve.backends.live.attention.slots import BACKWARD as _BACKWARD

# Arguments of kernels stand in rows.
# fmt: off
BACKWARD = tl.constexpr(_BACKWARD)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _first_above(values, count, limit):
    """Index of the first of `count` ascending values above `limit`; count if there is none."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(values + middle) > limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _places_to_read(first_row, width, last, BLOCK: tl.constexpr, PARTIAL: tl.constexpr):
    """Places (slots of the sequence's blocks, in order) that hold the positions up to `last`."""
    if PARTIAL:
        return _first_above(first_row, width, last) * BLOCK
    else:
        return last + 1


@triton.jit
def _slot_of(entry, rank, BLOCK: tl.constexpr):
    """Slot of the block's `rank`-th token."""
    return tl.where((entry & BACKWARD) != 0, BLOCK - 1 - rank, rank)


@triton.jit
def _add_tile(
    total, weight, top, tile, queries, query_positions, key, value, table_row, first_row, width,
    last, stride_kb, stride_ks, stride_vb, stride_vs, scale, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one tile of keys and values into the running softmax: sum [ROWS, HEAD], weight and
    maximum [ROWS].

    MASKED False: every query sees all of the tile.
    """
    place = tile * TILE + tl.arange(0, TILE)
    index = place // BLOCK
    rank = place % BLOCK
    if PARTIAL:
        begin = tl.load(first_row + index, mask=index < width, other=last + 1)
        end = tl.load(first_row + index + 1, mask=index < width, other=last + 1)
        position = begin + rank
        seen = (position < end) & (position <= last)
    else:
        position = place
        seen = position <= last
    if MASKED:
        entry = tl.load(table_row + index, mask=seen, other=0)
    else:
        entry = tl.load(table_row + index)
    block = (entry & (BACKWARD - 1)).to(tl.int64)
    slot = _slot_of(entry, rank, BLOCK)
    part = tl.arange(0, HEAD)

    keys_at = key + (block * stride_kb + slot * stride_ks)[None, :] + part[:, None]
    values_at = value + (block * stride_vb + slot * stride_vs)[:, None] + part[None, :]
    if MASKED:
        keys = tl.load(keys_at, mask=seen[None, :], other=0.0)
        values = tl.load(values_at, mask=seen[:, None], other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)

    scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(
            seen[None, :] & (position[None, :] <= query_positions[:, None]), scores, NOTHING
        )
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    weight = weight * fade + tl.sum(shares, 1)
    total = total * fade[:, None] + tl.dot(
        shares.to(values.dtype), values, input_precision=PRECISION
    )
    return total, weight, new_top


# A size that Triton would compile for its value, or for being a multiple of 16, would make it
# compile while serving.
@triton.jit(do_not_specialize=["skip", "sequences", "width"])
def prefill(
    out, query, key, value, table, first, seq_lens, query_start, skip, sequences, width, scale,
    stride_ot, stride_oh, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
    stride_vs, stride_vh, stride_table, stride_first, GROUP: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Any number of new tokens a sequence. A program takes TOKENS of them, with all query heads of
    one KV head.

    The first `skip` rows of the batch are left out, `sequences` more are taken. Grid: (at least new
    tokens // TOKENS + sequences, kv_heads). Sequence i has the programs from (new tokens before it)
    // TOKENS + i on, so the grid needs no plan of the batch. Long sequences' last tokens read most;
    programs are numbered from the end, so that these start early.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    query_start += skip
    origin = tl.load(query_start)
    low = sequences * 0
    high = sequences
    while low < high:  # the first sequence whose programs lie beyond this one
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - origin) // TOKENS + middle > chunk:
            high = middle
        else:
            low = middle + 1
    row = low - 1
    start = tl.load(query_start + row)
    new = tl.load(query_start + row + 1) - start
    token = (chunk - (start - origin) // TOKENS - row) * TOKENS
    if token >= new:
        return
    before = tl.load(seq_lens + skip + row) - new

    lane = tl.arange(0, ROWS)
    tokens = token + lane // GROUP
    heads = kv_head * GROUP + lane % GROUP
    used = (lane < TOKENS * GROUP) & (tokens < new)
    part = tl.arange(0, HEAD)
    at = (start + tokens).to(tl.int64)
    queries = tl.load(
        query + (at * stride_qt + heads * stride_qh)[:, None] + part[None, :],
        mask=used[:, None],
        other=0.0,
    )

    last = before + tl.minimum(token + TOKENS, new) - 1
    table_row = table + (skip + row).to(tl.int64) * stride_table
    first_row = first + (skip + row).to(tl.int64) * stride_first
    places = _places_to_read(first_row, width, last, BLOCK, PARTIAL)
    seen_by_all = 0 if PARTIAL else (before + token + 1) // TILE

    total = tl.zeros([ROWS, HEAD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NOTHING, tl.float32)
    key += kv_head.to(tl.int64) * stride_kh
    value += kv_head.to(tl.int64) * stride_vh
    if not PARTIAL:
        for tile in tl.range(0, seen_by_all):
            total, weight, top = _add_tile(
                total, weight, top, tile, queries, before + tokens, key, value, table_row,
                first_row, width, last, stride_kb, stride_ks, stride_vb, stride_vs, scale, HEAD,
                BLOCK, TILE, PARTIAL, False, PRECISION,
            )
    for tile in tl.range(seen_by_all, tl.cdiv(places, TILE)):
        total, weight, top = _add_tile(
            total, weight, top, tile, queries, before + tokens, key, value, table_row, first_row,
            width, last, stride_kb, stride_ks, stride_vb, stride_vs, scale, HEAD, BLOCK, TILE,
            PARTIAL, True, PRECISION,
        )
    tl.store(
        out + (at * stride_ot + heads * stride_oh)[:, None] + part[None, :],
        (total / weight[:, None]).to(out.dtype.element_ty),
        mask=used[:, None],
    )


@triton.jit(do_not_specialize=["width"])
def decode(
    out, part_total, part_weight, part_top, query, key, value, table, first, seq_lens, query_start,
    width, scale, stride_ot, stride_oh, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_table, stride_first, GROUP: tl.constexpr,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
):
    """One new token a sequence, its text shared out among SPLITS programs (flash decoding).

    Grid: (sequences, kv_heads, SPLITS). With one split the answer goes to `out`, else to
    part_total float32[sequences, heads, SPLITS, HEAD] and part_weight, part_top float32[sequences,
    heads, SPLITS].
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(query_start + row)
    if tl.load(query_start + row + 1) == start:
        return  # a row that only pads the batch
    last = tl.load(seq_lens + row) - 1

    lane = tl.arange(0, ROWS)
    heads = kv_head * GROUP + lane
    used = lane < GROUP
    part = tl.arange(0, HEAD)
    at = start.to(tl.int64)
    queries = tl.load(
        query + at * stride_qt + heads[:, None] * stride_qh + part[None, :],
        mask=used[:, None],
        other=0.0,
    )

    table_row = table + row.to(tl.int64) * stride_table
    first_row = first + row.to(tl.int64) * stride_first
    tiles = tl.cdiv(_places_to_read(first_row, width, last, BLOCK, PARTIAL), TILE)
    share = tl.cdiv(tiles, SPLITS)
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    total = tl.zeros([ROWS, HEAD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NOTHING, tl.float32)
    key += kv_head.to(tl.int64) * stride_kh
    value += kv_head.to(tl.int64) * stride_vh
    positions = tl.zeros([ROWS], tl.int32) + last
    for tile in tl.range(begin, end):
        total, weight, top = _add_tile(
            total, weight, top, tile, queries, positions, key, value, table_row, first_row, width,
            last, stride_kb, stride_ks, stride_vb, stride_vs, scale, HEAD, BLOCK, TILE, PARTIAL,
            True, PRECISION,
        )
    if SPLITS == 1:
        tl.store(
            out + at * stride_ot + heads[:, None] * stride_oh + part[None, :],
            (total / weight[:, None]).to(out.dtype.element_ty),
            mask=used[:, None],
        )
    else:
        place = (row.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * SPLITS + split
        tl.store(part_total + place[:, None] * HEAD + part[None, :], total, mask=used[:, None])
        tl.store(part_weight + place, weight, mask=used)
        tl.store(part_top + place, top, mask=used)


@triton.jit
def join_splits(
    out, part_total, part_weight, part_top, query_start, stride_ot, stride_oh, HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Join the splits of `decode`. Grid: (sequences, heads). An empty split has top -inf."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start + row)
    if tl.load(query_start + row + 1) == start:
        return
    place = (row.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    part = tl.arange(0, HEAD)
    top = tl.load(part_top + place)
    fade = tl.exp2(top - tl.max(top, 0))
    weight = tl.sum(tl.load(part_weight + place) * fade, 0)
    total = tl.sum(tl.load(part_total + place[:, None] * HEAD + part[None, :]) * fade[:, None], 0)
    tl.store(
        out + start.to(tl.int64) * stride_ot + head * stride_oh + part,
        (total / weight).to(out.dtype.element_ty),
    )


@triton.jit(do_not_specialize=["sequences", "width"])
def store(
    key, value, key_cache, value_cache, table, first, seq_lens, query_start, sequences, width,
    stride_kt, stride_kn, stride_vt, stride_vn, stride_kb, stride_ks, stride_kh, stride_vb,
    stride_vs, stride_vh, stride_table, stride_first, HEADS: tl.constexpr, HEADS_UP: tl.constexpr,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Write new keys and values. Grid: (tokens,); those beyond the last sequence only pad."""
    token = tl.program_id(0)
    if token >= tl.load(query_start + sequences):
        return
    row = _first_above(query_start, sequences + 1, token) - 1
    position = tl.load(seq_lens + row) - (tl.load(query_start + row + 1) - token)
    if PARTIAL:
        first_row = first + row.to(tl.int64) * stride_first
        index = _first_above(first_row, width + 1, position) - 1
        rank = position - tl.load(first_row + index)
    else:
        index = position // BLOCK
        rank = position % BLOCK
    entry = tl.load(table + row.to(tl.int64) * stride_table + index)
    block = (entry & (BACKWARD - 1)).to(tl.int64)
    slot = _slot_of(entry, rank, BLOCK)

    heads = tl.arange(0, HEADS_UP)[:, None]
    part = tl.arange(0, HEAD)[None, :]
    used = heads < HEADS
    at = token.to(tl.int64)
    keys = tl.load(key + at * stride_kt + heads * stride_kn + part, mask=used)
    values = tl.load(value + at * stride_vt + heads * stride_vn + part, mask=used)
    keys_at = key_cache + block * stride_kb + slot * stride_ks + heads * stride_kh + part
    values_at = value_cache + block * stride_vb + slot * stride_vs + heads * stride_vh + part
    tl.store(keys_at, keys.to(key_cache.dtype.element_ty), mask=used)
    tl.store(values_at, values.to(value_cache.dtype.element_ty), mask=used)
