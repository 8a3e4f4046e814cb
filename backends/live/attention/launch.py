"""Run the Triton kernels on a batch: on a GPU, or on a CPU with TRITON_INTERPRET=1 set before."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from twinserve.backends.live.attention import triton_kernel

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64


@dataclass(frozen=True)
class Tuning:
    """rows: query rows a program (a row is one head of one token); tile: keys it takes at a time;
    warps and stages as Triton means them. Other sizes were not measured on a GPU."""

    rows: int
    tile: int
    warps: int
    stages: int


PREFILL, DECODE = Tuning(128, 64, 8, 2), Tuning(16, 64, 4, 3)
PREFILL_FLOAT32, DECODE_FLOAT32 = Tuning(32, 32, 4, 1), Tuning(16, 32, 4, 2)


@dataclass(frozen=True)
class Batch:
    """One step's sequences, the same for every layer. Tensors lie on the device, int32, last axis
    contiguous.

    table        [n, width] entries (see `slots`)       seq_lens  [n] tokens, new ones included
    query_start  [n + 1] where each sequence's new tokens begin
    tokens       rows of the query tensor to look at, at least query_start[n]
    decodes      this many leading sequences have at most one new token each
    splits       programs among which a decode's text is shared out, a power of two (`splits_for`)
    first        [n, width + 1] of `slots.first_positions`; None if all blocks but the last are full
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    tokens: int
    decodes: int
    splits: int = 1
    first: torch.Tensor | None = None


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits_for(decodes: int, kv_heads: int, longest: int, device: torch.device) -> int:
    """Return splits for two programs a processor, of two tiles or more. `longest` in tokens."""
    programs = max(1, decodes * kv_heads)
    wanted = min(2 * _processors(device) // programs, longest // (2 * DECODE.tile), _MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def check_shapes(query: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ValueError, naming what is wrong, for sizes that the kernels do not take."""
    heads, head = query.shape[1:]
    kv_heads = keys.shape[2]
    if head & (head - 1) or not 16 <= head <= 256:
        raise ValueError(f"head size {head}: the kernel takes powers of two from 16 to 256")
    if heads % kv_heads or heads // kv_heads > 16:
        raise ValueError(
            f"{heads} query heads over {kv_heads} KV heads: the kernel takes whole groups of at "
            "most 16"
        )
    if keys.shape[3] != head:
        raise ValueError(f"the cache holds heads of {keys.shape[3]} elements, the query of {head}")
    if query.stride(-1) != 1 or keys.stride(-1) != 1:
        raise ValueError("the elements of a head must lie side by side in memory")


def attend(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    scale: float,
    prefill: Tuning | None = None,
    decode: Tuning | None = None,
) -> None:
    """Write the attention of all new tokens into `out`; they are in the cache already (`store`).

    out, query    [tokens or more, heads, head_size]; float16, bfloat16 or float32, the cache alike
    keys, values  [num_blocks, block_tokens, kv_heads, head_size], any strides but the last
                  (`cache.split_cache`)
    scale         factor of the scores
    """
    single = query.dtype == torch.float32
    prefill = prefill or (PREFILL_FLOAT32 if single else PREFILL)
    decode = decode or (DECODE_FLOAT32 if single else DECODE)
    rows, width = batch.table.shape
    first = batch.first if batch.first is not None else batch.table
    heads, head = query.shape[1:]
    kv_heads = keys.shape[2]
    strides = (
        *out.stride()[:2],
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        batch.table.stride(0),
        first.stride(0),
    )
    sizes = {
        "GROUP": heads // kv_heads,
        "HEAD": head,
        "BLOCK": keys.shape[1],
        "PARTIAL": batch.first is not None,
        "PRECISION": "ieee" if single else "tf32",
    }
    n = batch.decodes
    if n:
        parts = _parts(n, heads, batch.splits, head, query.device)
        triton_kernel.decode[(n, kv_heads, batch.splits)](
            out,
            *parts,
            query,
            keys,
            values,
            batch.table,
            first,
            batch.seq_lens,
            batch.query_start,
            width,
            scale * _LOG2_E,
            *strides,
            **sizes,
            ROWS=decode.rows,
            TILE=decode.tile,
            SPLITS=batch.splits,
            num_warps=decode.warps,
            num_stages=decode.stages,
        )
        if batch.splits > 1:
            triton_kernel.join_splits[(n, heads)](
                out,
                *parts,
                batch.query_start,
                *out.stride()[:2],
                HEAD=head,
                SPLITS=batch.splits,
                num_warps=4,
            )
    if rows > n:
        tokens = prefill.rows // sizes["GROUP"]
        triton_kernel.prefill[((batch.tokens - n) // tokens + rows - n, kv_heads)](
            out,
            query,
            keys,
            values,
            batch.table,
            first,
            batch.seq_lens,
            batch.query_start,
            n,
            rows - n,
            width,
            scale * _LOG2_E,
            *strides,
            **sizes,
            ROWS=prefill.rows,
            TILE=prefill.tile,
            num_warps=prefill.warps,
            num_stages=prefill.stages,
        )


def _parts(
    n: int, heads: int, splits: int, head: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    if splits == 1:
        nothing = torch.empty(1, dtype=torch.float32, device=device)
        return nothing, nothing, nothing
    weights = torch.empty((2, n, heads, splits), dtype=torch.float32, device=device)
    totals = torch.empty((n, heads, splits, head), dtype=torch.float32, device=device)
    return totals, weights[0], weights[1]


def store(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch
) -> None:
    """Write new tokens' key and value [tokens or more, kv_heads, head_size] into the cache."""
    rows, width = batch.table.shape
    first = batch.first if batch.first is not None else batch.table
    kv_heads, head = key.shape[1:]
    triton_kernel.store[(batch.tokens,)](
        key,
        value,
        keys,
        values,
        batch.table,
        first,
        batch.seq_lens,
        batch.query_start,
        rows,
        width,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        batch.table.stride(0),
        first.stride(0),
        HEADS=kv_heads,
        HEADS_UP=1 << (kv_heads - 1).bit_length(),
        HEAD=head,
        BLOCK=keys.shape[1],
        PARTIAL=batch.first is not None,
        num_warps=4,
    )
