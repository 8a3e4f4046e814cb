"""The attention kernels that vLLM ships, on plain forward blocks, to compare ours with. Needs vLLM
and a GPU."""

from __future__ import annotations

from collections.abc import Callable

SEGMENTS = 16  # of a decode's text, as vLLM's Triton backend shares it out
_FEW_PROGRAMS = 128  # it does so where fewer programs than this would run


def stock_kernels() -> tuple[dict[str, Callable], dict[str, str]]:
    """(kernels by name, reasons by name of one that is not there). A kernel takes (out, query,
    keys, values, batch, longest, max_new, scale) as `launch.attend`, and returns a function of no
    arguments that runs once; longest in tokens, max_new the most new tokens of a sequence."""
    kernels, missing = {}, {}
    for name, find in (("flash_attention_3", _flash), ("triton_unified", _unified)):
        try:
            kernels[name] = find()
        except Exception as error:  # noqa: BLE001 - a build may lack any of vLLM; ours is measured all the same
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return kernels, missing


def _flash() -> Callable:
    from vllm.vllm_flash_attn import flash_attn_interface

    if not flash_attn_interface.FA3_AVAILABLE:
        raise RuntimeError(
            f"FlashAttention 3 is not there: {flash_attn_interface.FA3_UNAVAILABLE_REASON}"
        )

    def prepare(out, query, keys, values, batch, longest, max_new, scale):
        return lambda: flash_attn_interface.flash_attn_varlen_func(
            query,
            keys,
            values,
            max_seqlen_q=max_new,
            cu_seqlens_q=batch.query_start,
            max_seqlen_k=longest,
            seqused_k=batch.seq_lens,
            block_table=batch.table,
            softmax_scale=scale,
            causal=True,
            out=out,
            fa_version=3,
        )

    return prepare


def _unified() -> Callable:
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    def prepare(out, query, keys, values, batch, longest, max_new, scale):
        heads, head = query.shape[1:]
        few = _FEW_PROGRAMS // keys.shape[2]

        def room(*more: int):
            return torch.empty(
                (few, heads, SEGMENTS, *more), dtype=torch.float32, device=query.device
            )

        segments = {
            "softmax_segm_output": room(head),
            "softmax_segm_max": room(),
            "softmax_segm_expsum": room(),
        }
        return lambda: unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=max_new,
            seqused_k=batch.seq_lens,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=few,
            num_par_softmax_segments=SEGMENTS,
            **segments,
        )

    return prepare
