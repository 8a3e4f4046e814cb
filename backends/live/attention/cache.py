"""The engine's KV tensors, seen the same way whatever their layout."""


def split_cache(kv_cache, head_size: int):
    """Return (keys, values) of one layer, both views of shape [num_blocks, block_tokens, kv_heads,
    head_size].

    Takes the shapes that vLLM hands to an attention layer. From 0.32 (in any memory order) and on
    the CPU engine: [num_blocks, kv_heads, block_tokens, 2 * head_size]. In 0.25, and for this
    backend there: [num_blocks, 2, block_tokens, kv_heads, head_size]. Older: [2, num_blocks,
    block_tokens, kv_heads, head_size]. Raises ValueError for any other shape.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 4 and shape[-1] == 2 * head_size:
        slots_first = kv_cache.transpose(1, 2)
        return slots_first[..., :head_size], slots_first[..., head_size:]
    if len(shape) == 5 and shape[-1] == head_size:
        if shape[1] == 2:
            return kv_cache[:, 0], kv_cache[:, 1]
        if shape[0] == 2:
            return kv_cache[0], kv_cache[1]
    raise ValueError(f"a KV cache of shape {list(shape)} is not known for head size {head_size}")


def write_slots(keys, values, key, value, slots) -> None:
    """Store new tokens (PyTorch, any device).

    keys, values  of `split_cache`      key, value  [t, kv_heads, head_size]
    slots         int64[t] of `slots.slot_mapping`
    """
    block_tokens = keys.shape[1]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    keys[blocks, offsets] = key.to(keys.dtype)
    values[blocks, offsets] = value.to(values.dtype)
