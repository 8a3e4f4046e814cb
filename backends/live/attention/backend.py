"""The attention backend for vLLM V1 (0.25 and 0.32; model runners V1 and V2). Imports vLLM: load it
through `registration`.

All that it needs beyond a stock backend is in the block table. A worker copies the scheduler's
numbers, flags included, and uses them only for attention. The slot mapping that the worker works
out from them is left aside, since it knows no directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from twinserve.backends.live.attention import cells, vectorised
from twinserve.backends.live.attention.cache import split_cache, write_slots

PARTIAL_BLOCKS = "twinserve_partial_blocks"  # key of vLLM's additional_config


class BidirectionalBackend(AttentionBackend):
    """Causal decoder attention over blocks filled from either end; no sliding window, no quantised
    cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True  # else vLLM would write by its own slot mapping

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BidirectionalImpl]:
        return BidirectionalImpl

    @staticmethod
    def get_builder_cls() -> type[BidirectionalBuilder]:
        return BidirectionalBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 16 <= head_size <= 256 and head_size & (head_size - 1) == 0

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Asked by vLLM 0.25 only; 0.32 has one shape for all backends."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


@dataclass
class BidirectionalMetadata:
    """One step. tokens: new ones in the batch. On a CPU `plan`, else `batch` is set."""

    tokens: int
    plan: vectorised.Plan | None = None
    batch: object = None


class BidirectionalBuilder(AttentionMetadataBuilder[BidirectionalMetadata]):
    """With additional_config {"twinserve_partial_blocks": true} the blocks of a sequence may end
    before they are full, where `cells` says so. It costs a few small operations a step; directions
    alone cost nothing."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold: int | None = 1  # decodes first

    def __init__(
        self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_tokens = kv_cache_spec.block_size
        self._kv_heads = kv_cache_spec.num_kv_heads
        self._max_seqs = vllm_config.scheduler_config.max_num_seqs
        extra = vllm_config.additional_config
        self._partial = bool(extra.get(PARTIAL_BLOCKS)) if isinstance(extra, dict) else False
        # one buffer for ever: CUDA graphs remember where it lies
        self._first: torch.Tensor | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BidirectionalMetadata:
        return self._metadata(common_attn_metadata, common_attn_metadata.max_seq_len)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> BidirectionalMetadata:
        metadata = self._metadata(common_attn_metadata, self.vllm_config.model_config.max_model_len)
        if metadata.batch is not None:
            # capturing runs the kernels; a graph's shape does not depend on lengths
            metadata.batch.seq_lens.fill_(1)
        return metadata

    def _metadata(self, common: CommonAttentionMetadata, longest: int) -> BidirectionalMetadata:
        rows, tokens = common.num_reqs, common.num_actual_tokens
        table, lengths = common.block_table_tensor[:rows], common.seq_lens[:rows]
        starts = common.query_start_loc_cpu[: rows + 1].numpy()
        first = self._first_positions(table) if self._partial else None
        if table.device.type == "cpu":
            arrays = (
                table.numpy(),
                lengths.numpy(),
                starts,
                self._block_tokens,
                None if first is None else first.numpy(),
            )
            return BidirectionalMetadata(int(starts[-1]), plan=vectorised.plan(*arrays))

        from twinserve.backends.live.attention.launch import Batch, splits_for

        longer = np.flatnonzero(np.diff(starts) > 1)
        decodes = int(longer[0]) if len(longer) else rows
        splits = splits_for(decodes, self._kv_heads, longest, table.device)
        batch = Batch(
            table, lengths, common.query_start_loc[: rows + 1], tokens, decodes, splits, first
        )
        return BidirectionalMetadata(tokens, batch=batch)

    def _first_positions(self, table: torch.Tensor) -> torch.Tensor:
        rows, width = table.shape
        if self._first is None:
            self._first = torch.zeros(
                (max(self._max_seqs, rows), width + 1), dtype=torch.int32, device=table.device
            )
        # not known yet while memory is being measured
        num_blocks = self.vllm_config.cache_config.num_gpu_blocks or 1
        return cells.of_device(num_blocks, self._block_tokens, table.device).first_positions(
            table, self._first[:rows]
        )


class BidirectionalImpl(AttentionImpl):
    """One layer's attention. Raises ValueError for what it cannot do, when the layer is built."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra,
    ) -> None:
        asked = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap of the logits": logits_soft_cap,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"a KV cache of type {kv_cache_dtype}": kv_cache_dtype
            not in BidirectionalBackend.supported_kv_cache_dtypes,
            "attention sinks": extra.get("sinks") is not None,
        }
        missing = [name for name, value in asked.items() if value]
        if missing:
            raise ValueError(
                f"the bidirectional attention backend has no {', '.join(missing)}; use another "
                "model"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._cache: torch.Tensor | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BidirectionalMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new tokens' KV, write attention into `output` [tokens, heads, head_size]."""
        if attn_metadata is None:
            return output.fill_(0)  # memory is being measured
        if kv_cache is not self._cache:
            self._cache, (self._keys, self._values) = (
                kv_cache,
                split_cache(kv_cache, self.head_size),
            )
        keys, values, step = self._keys, self._values, attn_metadata
        writes = self.kv_sharing_target_layer_name is None
        if step.plan is not None:
            if writes:
                write_slots(
                    keys, values, key[: step.tokens], value[: step.tokens], step.plan.new_slots
                )
            vectorised.attend(output, query, keys, values, step.plan, self.scale)
        else:
            from twinserve.backends.live.attention import launch

            launch.check_shapes(query, keys)
            if writes:
                launch.store(key, value, keys, values, step.batch)
            launch.attend(output, query, keys, values, step.batch, self.scale)
        return output
