"""FlashAttention 3 as vLLM ships it, on plain forward blocks, to compare our kernels with. Needs
vLLM and a GPU."""

from __future__ import annotations

from collections.abc import Callable


def flash3() -> Callable:
    """vLLM's function for paged KV. Raises what an import raises, or RuntimeError without it."""
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    if not interface.FA3_AVAILABLE:
        raise RuntimeError(f"FlashAttention 3 is not there: {interface.FA3_UNAVAILABLE_REASON}")
    return interface.flash_attn_varlen_func


def stock_kernels() -> tuple[dict[str, Callable], dict[str, str]]:
    """(kernels by name, reasons by name of one that is not there). A kernel takes (out, query,
    keys, values, batch, longest, max_new, scale) as `launch.attend`, and returns a function of no
    arguments that runs once; longest in tokens, max_new the most new tokens of a sequence."""
    name = "flash_attention_3"
    try:
        flash = flash3()
    except Exception as error:  # noqa: BLE001 - a build may lack it; ours is measured all the same
        return {}, {name: f"{type(error).__name__}: {error}".splitlines()[0]}

    def prepare(out, query, keys, values, batch, longest, max_new, scale):
        lengths = {"max_seqlen_q": max_new, "max_seqlen_k": longest, "seqused_k": batch.seq_lens}
        how = {"causal": True, "softmax_scale": scale, "fa_version": 3, "out": out}
        where = {"cu_seqlens_q": batch.query_start, "block_table": batch.table}
        return lambda: flash(query, keys, values, **lengths, **where, **how)

    return {name: prepare}, {}
