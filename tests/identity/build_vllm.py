"""Builds vLLM's V1 `Scheduler` without a model, a tokenizer or a download."""

import functools
import json
import os
import tempfile
from unittest import mock

from tests.identity.protocol import EngineSettings
from tests.identity.release import batches_under_way, seats, with_fields

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@functools.cache
def _model_config(max_model_len: int):
    """vLLM's ModelConfig of a tiny Llama: read from a local config.json, no weights and no
    tokenizer."""
    from vllm.config import ModelConfig

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(TINY_LLAMA, file)
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        )


def _speculative_config(config, settings: EngineSettings):
    """vLLM's SpeculativeConfig. Of all methods but n-grams the scheduler asks for no more than the
    method's name, which is set here: a drafter's own model is not at hand."""
    from vllm.config import SpeculativeConfig

    made = SpeculativeConfig(
        method="ngram",
        prompt_lookup_max=3,
        num_speculative_tokens=settings.draft_tokens,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    made.method = settings.draft_method
    made.num_speculative_tokens_per_batch_size = [list(r) for r in settings.drafts_by_batch] or None
    return made


def build_scheduler(settings: EngineSettings, kv_transfer: dict | None = None):
    """A vLLM `Scheduler` or `AsyncScheduler` with one full-attention KV group, configured as
    `settings` (`known_settings`) say. kv_transfer: fields of its KVTransferConfig; None: no
    connector.

    Raises RuntimeError when vLLM changed a setting on the way, naming it: the comparison would be
    void.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    blocks = settings.num_blocks + 1  # vLLM sets block 0 aside as the null block
    config = VllmConfig(
        model_config=_model_config(settings.max_model_len),
        scheduler_config=with_fields(
            SchedulerConfig,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            policy=settings.policy,
            watermark=settings.watermark,
            scheduler_reserve_full_isl=settings.reserve_full_isl,
            async_scheduling=settings.async_scheduling,
        ),
        cache_config=CacheConfig(
            block_size=settings.block_tokens, enable_prefix_caching=settings.enable_prefix_caching
        ),
    )
    if kv_transfer is not None:
        from vllm.config import KVTransferConfig

        config.kv_transfer_config = KVTransferConfig(**kv_transfer)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True  # there is one group
    if settings.draft_tokens:
        config.speculative_config = _speculative_config(config, settings)
    config.cache_config.num_gpu_blocks = blocks
    # vLLM's CPU platform turns it off because its workers cannot; the scheduler needs no worker.
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.parallel_config.pipeline_parallel_size = settings.pipeline_stages
    spec = FullAttentionSpec(
        block_size=settings.block_tokens, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    kind = AsyncScheduler if settings.async_scheduling else Scheduler
    # what GPUs have: with the other one vLLM turns stages or asynchronous scheduling off
    second = settings.pipeline_stages > 1 and settings.async_scheduling
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if second else {}
    with mock.patch.dict(os.environ, runner):
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=settings.block_tokens,
            log_stats=False,
        )
        manager = scheduler.kv_cache_manager
        in_force = {
            "num_blocks": manager.block_pool.get_num_free_blocks(),
            "block_tokens": scheduler.block_size,
            "max_num_seqs": seats(scheduler),
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "long_prefill_token_threshold": scheduler.scheduler_config.long_prefill_token_threshold,
            "enable_prefix_caching": manager.enable_caching,
            "policy": scheduler.policy.value,
            "watermark": getattr(scheduler.scheduler_config, "watermark", 0.0),
            "reserve_full_isl": getattr(scheduler, "scheduler_reserve_full_isl", False),
            "enable_chunked_prefill": scheduler.scheduler_config.enable_chunked_prefill,
            "max_model_len": scheduler.max_model_len,
            "async_scheduling": batches_under_way(config) > settings.pipeline_stages,
            "pipeline_stages": batches_under_way(config) - settings.async_scheduling,
        }
    if settings.draft_tokens:
        in_force["draft_tokens"] = scheduler.num_spec_tokens
    for name, value in in_force.items():
        if value != getattr(settings, name):
            raise RuntimeError(
                f"vLLM runs with {name}={value!r}, not the {getattr(settings, name)!r} asked for; "
                "choose a setting it keeps"
            )
    return scheduler
