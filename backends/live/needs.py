"""All that the live twin needs from vLLM, and a check that the installed release has it. Importing
this module does not import vLLM.

vLLM has no stable interface here, and changes monthly. So a use of the twin begins with `require`:
what is missing is said in one line then, not by a traceback in the middle of a run.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib import import_module

from twinserve.backends.live.versions import LiveEngineError, installed_vllm, known_to_work


@dataclass(frozen=True)
class Need:
    """A name of vLLM's.

    where       its module, and a colon before what is in it; "A|B": one of these is enough
    parameters  a function or method takes them by name (a class: its constructor); an argument
                that takes any name will do
    holds       attributes of a class, members of an enumeration, or fields of a dataclass
    """

    where: str
    parameters: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


_SCHED = "vllm.v1.core.sched"
_KV = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_STEERING = (
    Need(f"{_SCHED}.request_queue:SchedulingPolicy", holds=("FCFS",)),
    Need(f"{_SCHED}.request_queue:create_request_queue", ("policy",)),
    Need(f"{_SCHED}.scheduler:Scheduler.schedule"),
    Need(f"{_SCHED}.scheduler:Scheduler.add_request", ("request",)),
    Need(
        f"{_SCHED}.scheduler:Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
    ),
    Need(f"{_SCHED}.scheduler:Scheduler.finish_requests", ("request_ids", "finished_status")),
    Need(f"{_SCHED}.scheduler:Scheduler._preempt_request", ("request", "timestamp")),
    # the hook at which a chunk is cut to its grant
    Need(f"{_SCHED}.scheduler:Scheduler._mamba_block_aligned_split", ("request", "num_new_tokens")),
    Need("vllm.v1.core.kv_cache_manager:KVCacheBlocks", holds=("blocks",)),
    Need("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", ("request",)),
    Need("vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", ("request_id",)),
    Need("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", ("num_new_tokens",)),
    Need("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks"),
    Need("vllm.v1.core.block_pool:BlockPool.free_blocks", ("ordered_blocks",)),
    Need("vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block", ("block",)),
    Need("vllm.v1.request:RequestStatus", holds=("WAITING", "RUNNING", "PREEMPTED")),
)
_ENGINE = (
    *_STEERING,
    Need("vllm.config:KVTransferConfig"),
    Need(
        "vllm.engine.arg_utils:EngineArgs",
        holds=(
            "model",
            "load_format",
            "skip_tokenizer_init",
            "generation_config",
            "dtype",
            "enforce_eager",
            "disable_log_stats",
            "async_scheduling",
            "scheduler_cls",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "num_gpu_blocks_override",
            "kv_transfer_config",
        ),
    ),  # fmt: skip
    Need("vllm.engine.arg_utils:EngineArgs.create_engine_config"),
    Need(
        "vllm.v1.engine.llm_engine:LLMEngine.from_vllm_config", ("vllm_config", "disable_log_stats")
    ),
    Need("vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache"),
    Need(
        "vllm:SamplingParams", ("max_tokens", "temperature", "ignore_eos", "logprobs", "detokenize")
    ),
    Need(
        "vllm.v1.engine:EngineCoreRequest",
        (
            "request_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "arrival_time",
            "lora_request",
            "cache_salt",
            "data_parallel_rank",
        ),
    ),  # fmt: skip
    Need("vllm.distributed:cleanup_dist_env_and_memory"),
)
_SWAP = (
    Need("vllm.config:get_layers_from_vllm_config"),
    Need(
        f"{_KV}:KVConnectorBase_V1",
        ("vllm_config", "role", "kv_cache_config"),
        (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
            "register_kv_caches",
            "handle_preemptions",
            "build_connector_worker_meta",
            "reset_cache",
        ),
    ),  # fmt: skip
    Need(f"{_KV}:KVConnectorBase_V1.handle_preemptions", ("kv_connector_metadata",)),
    Need(f"{_KV}:KVConnectorMetadata"),
    Need(f"{_KV}:KVConnectorRole", holds=("SCHEDULER",)),
    Need(f"{_KV}:KVConnectorWorkerMetadata", holds=("aggregate",)),
    Need("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),
    Need("vllm.v1.kv_cache_interface:FullAttentionSpec"),
)
_DRAFTS = (
    # not the proposer itself: to look at it loads numba, which a worker must not meet (engine.py)
    Need("vllm.engine.arg_utils:EngineArgs", holds=("speculative_config",)),
    Need(
        f"{_SCHED}.scheduler:Scheduler.make_spec_decoding_stats",
        ("num_accepted_tokens", "request_id"),
    ),
)
_SERVING = (
    *_STEERING,
    Need(f"{_SCHED}.async_scheduler:AsyncScheduler"),
    Need(f"{_SCHED}.interface:PauseState", holds=("UNPAUSED", "PAUSED_NEW", "PAUSED_ALL")),
    Need(
        f"{_SCHED}.scheduler:Scheduler._handle_blocked_waiting_request|"
        f"{_SCHED}.scheduler:Scheduler._try_promote_blocked_waiting_request",
        ("request",),
    ),
    Need(f"{_SCHED}.scheduler:Scheduler.reset_prefix_cache"),
    Need(f"{_SCHED}.scheduler:Scheduler.shutdown"),
    Need("vllm.v1.engine:EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason")),
    Need("vllm.v1.engine:EngineCoreOutputs", holds=("outputs",)),
    Need("vllm.v1.request:Request.get_finished_reason"),
    Need("vllm.v1.request:RequestStatus", holds=("FINISHED_ERROR",)),
)
_EMULATING = (
    Need("vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor"),
    Need("vllm.v1.worker.worker_base:WorkerBase", holds=("execute_model", "sample_tokens")),
    Need(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        ("block_size", "num_kv_heads", "head_size", "dtype"),
    ),
    Need("vllm.v1.outputs:AsyncModelRunnerOutput", holds=("get_output",)),
    Need("vllm.v1.outputs:ModelRunnerOutput", ("req_ids", "req_id_to_index", "sampled_token_ids")),
    Need(f"{_SCHED}.output:SchedulerOutput", holds=("num_scheduled_tokens", "finished_req_ids")),
    Need(
        f"{_SCHED}.output:CachedRequestData",
        holds=("req_ids", "num_computed_tokens", "num_output_tokens"),
    ),
)
_PHYSICAL = (
    *_ENGINE,
    *_SWAP,
    Need("vllm.v1.attention.backend:AttentionBackend"),
    Need("vllm.v1.attention.backends.registry:AttentionBackendEnum", holds=("CUSTOM",)),
    Need("vllm.v1.attention.backends.registry:register_backend"),
    Need("vllm.v1.attention.selector:_cached_get_attn_backend"),
    Need("vllm.model_executor.models.utils:extract_layer_index", ("layer_name",)),
)
# of a Scheduler that has been made; steering reads and sets them
_STATE = (
    "running", "waiting", "requests", "kv_cache_manager", "block_size", "connector", "policy",
    "need_mamba_block_aligned_split", "max_num_scheduled_tokens", "max_model_len",
)  # fmt: skip
# what the twin is used for -> what that needs
NEEDS = {
    "engine": _ENGINE,  # an engine in this process: live runs, locked replay, calibration
    "swapping": _SWAP,  # requests whose KV goes to the host and back
    "drafts": _DRAFTS,  # n-gram drafts of an engine in this process
    "physical": _PHYSICAL,  # an engine that keeps KV where the ledger says
    "serving": _SERVING,  # a policy under vllm serve
    "emulating": _EMULATING,  # a worker whose forward pass only waits
}


def missing(use: str) -> list[str]:
    """Names of `NEEDS[use]` that the installed vLLM lacks, as far as one can see without an
    engine; with the parameter or field in brackets, where it is that."""
    found = []
    for need in NEEDS[use]:
        lacks = [_lack(where, need) for where in need.where.split("|")]
        if all(lacks):
            found.append(lacks[0])
    return found


@functools.cache
def require(*uses: str) -> None:
    """Raises LiveEngineError, one line, if the installed vLLM lacks what one of `uses` needs."""
    installed_vllm()
    for use in uses:
        lacks = missing(use)
        if lacks:
            raise LiveEngineError(_said(lacks, use))


def require_state(scheduler) -> None:
    """Raises LiveEngineError, one line, if a Scheduler that was made lacks a field."""
    lacks = [
        f"{type(scheduler).__name__}.{name}" for name in _STATE if not hasattr(scheduler, name)
    ]
    if lacks:
        raise LiveEngineError(_said(lacks, "engine"))


def _said(lacks: list[str], use: str) -> str:
    more = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    return (
        f"vLLM {installed_vllm()} lacks {lacks[0]}{more}, which {use} needs; known to work: "
        f"{known_to_work(use)}: install one of these (docs/invariants.md)"
    )


def _lack(where: str, need: Need) -> str:
    """What of `need` is not at `where`; empty where all is."""
    module, _, path = where.partition(":")
    name = f"{module}.{path}"
    try:
        found = import_module(module)
    except ImportError as error:
        # the module, or something that it needs and is not installed
        return module if f"{module}.".startswith(f"{error.name}.") else f"{module} ({error})"
    for part in path.split("."):
        if not hasattr(found, part):
            return name
        found = getattr(found, part)
    known = _parameters(found) if need.parameters else None
    if known is not None:
        for parameter in need.parameters:
            if parameter not in known:
                return f"{name} ({parameter})"
    for field in need.holds:
        if not hasattr(found, field) and field not in _fields(found):
            return f"{name} ({field})"
    return ""


def _parameters(function) -> set[str] | None:
    """Names that a call can use; None where it takes any, or does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _fields(kind) -> set[str]:
    dataclass_fields = getattr(kind, "__dataclass_fields__", {})
    return {*dataclass_fields, *getattr(kind, "__struct_fields__", ())}
