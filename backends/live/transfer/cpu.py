"""Which elements of a block belong to which token in vLLM's CPU attention. Imports vLLM.

Its kernels keep the keys of a block as [dim, tokens] tiles, and with AMX interleave pairs of tokens
or dimensions. Rather than repeat those orders here, a scratch block is written with the kernels'
own operator and read back.
"""

import torch
from vllm import _custom_ops as ops

_BASE = 250  # digits that bfloat16 and float16 hold exactly


def slot_elements(tensor: torch.Tensor, isa: str) -> torch.Tensor:
    """int64[slots, content] for a layer's cache `tensor` [blocks, heads, slots, content]: the place
    of each slot's content within the block's last two axes. Keys come first, then values, both by
    dimension.

    isa: the kernels' name for their layout (the attention layer has it). Raises ValueError for a
    cache that holds other than plain floats, or one the operator does not fill exactly.
    """
    slots, content = tensor.shape[2:]
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"a CPU engine's KV cache of {tensor.dtype} cannot be swapped; use an unquantised one"
        )
    dim = content // 2
    # slot, key or value, head, dimension
    names = torch.arange(slots * content).view(slots, 2, 1, dim)
    found = torch.zeros(slots * content, dtype=torch.int64)
    power = 1
    while power < slots * content:
        digits = (names // power % _BASE + 1).to(tensor.dtype)
        block = torch.zeros((1, 1, 2 * slots, dim), dtype=tensor.dtype)
        keys, values = block.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            digits[:, 0].contiguous(),
            digits[:, 1].contiguous(),
            keys,
            values,
            torch.arange(slots),
            isa,
        )
        found += (block.flatten().to(torch.int64) - 1) * power
        power *= _BASE
    places = found.argsort()
    if not torch.equal(found[places], torch.arange(slots * content)):
        raise ValueError(
            f"the CPU attention kernel {isa!r} does not store each token once; its KV cannot be "
            "swapped"
        )
    return places.view(slots, content)
