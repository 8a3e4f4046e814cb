"""What our scheduler must know of its vLLM engine, and which engines it cannot schedule."""

from twinserve.backends.live.serving.options import EngineFacts
from twinserve.backends.live.versions import LiveEngineError


def unsupported(vllm_config, asynchronous: bool) -> str:
    """Why this engine cannot be scheduled by a policy, in one line; empty if it can."""
    scheduling, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    connector = vllm_config.kv_transfer_config
    if scheduling.async_scheduling and not asynchronous:
        return "PolicyScheduler steps synchronously: start vllm serve with --no-async-scheduling"
    if asynchronous and not scheduling.async_scheduling:
        return (
            "PolicyAsyncScheduler plans ahead of the last tokens: start vllm serve with "
            "--async-scheduling"
        )
    reasons = {
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "a pooling model": vllm_config.model_config.runner_type == "pooling",
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "whole prompts (--no-enable-chunked-prefill)": not scheduling.enable_chunked_prefill,
        "a watermark (--watermark)": bool(getattr(scheduling, "watermark", 0.0)),
        "--long-prefill-token-threshold": scheduling.long_prefill_token_threshold > 0,
        "a KV connector other than TwinserveConnector": (
            connector is not None and connector.kv_connector not in (None, "TwinserveConnector")
        ),
    }
    for what, given in reasons.items():
        if given:
            return f"a policy's scheduler does not support {what}; drop it"
    return ""


def engine_facts(scheduler) -> EngineFacts:
    """Of a vLLM Scheduler that has been made."""
    config = scheduler.kv_cache_config
    if (
        len(config.kv_cache_groups) != 1
        or getattr(scheduler, "hash_block_size", scheduler.block_size) != scheduler.block_size
    ):
        raise LiveEngineError(
            "the model has more than one kind of KV cache; a policy's scheduler supports full "
            "attention only"
        )
    (group,) = config.kv_cache_groups
    block_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
    ranks = scheduler.vllm_config.parallel_config.tensor_parallel_size
    connector = scheduler.connector
    return EngineFacts(
        # one is vLLM's null block
        num_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        block_tokens=scheduler.block_size,
        max_num_seqs=getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs),
        max_step_tokens=scheduler.max_num_scheduled_tokens,
        max_model_len=scheduler.max_model_len,
        kv_bytes_per_token=block_bytes * ranks // scheduler.block_size,
        prefix_caching=scheduler.kv_cache_manager.enable_caching,
        host_blocks=connector.free_tokens // scheduler.block_size if connector is not None else 0,
    )
