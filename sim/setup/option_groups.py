"""The heading of each setting on a page of help, and vLLM's name for the setting."""

from typing import TypeVar

from cyclopts import Group, Parameter
from pydantic import BaseModel

Model = TypeVar("Model", bound=type[BaseModel])


def _group(place: int, name: str) -> Group:
    return Group(name, sort_key=place)


ASKED = _group(1, "What is asked for")
POLICIES = _group(2, "Policies and scheduling")
REQUESTS = _group(3, "Requests")
OBJECTIVES = _group(4, "Objectives and metrics")
HARDWARE = _group(5, "Model and hardware")
MEMORY = _group(6, "Limits of an engine, and its KV memory")
FLEETS = _group(7, "Replicas")
FAILURES = _group(8, "Failures")
SCALING = _group(9, "Autoscaling")
FITTING = _group(10, "Without an engine: fits")
LIVE = _group(11, "The live engine")
CARRYING_OUT = _group(12, "How it is carried out")
RESULTS = _group(13, "What is written and shown")

SETTINGS: dict[Group, str] = {
    ASKED: "from_vllm",
    POLICIES: "policy kv prefix_caching estimator speculate async_scheduling host_time "
    "decision_time exact",
    REQUESTS: "trace format columns seed raw_arrivals offline rate duration requests rate_scale "
    "load window cap_length pool client_timeout",
    OBJECTIVES: "slo",
    HARDWARE: "as_model gpu profile tensor_parallel_size pipeline_parallel_size "
    "data_parallel_size enable_expert_parallel step_times shared_prefix front_end "
    "pcie_contention cold_start",
    MEMORY: "max_num_seqs max_num_batched_tokens max_model_len num_blocks num_gpu_blocks_override "
    "block_tokens kv_cache_memory_bytes gpu_memory_utilization kv_cache_dtype "
    "engine_version enforce_eager kv_from_log host_blocks "
    "kv_offloading_size kv_offloading_backend kv_offloading_options",
    FLEETS: "replicas router fleet",
    FAILURES: "failures mttf mttr on_failure retries detection start_up",
    SCALING: "autoscale min_replicas max_replicas grace",
}
"Settings of a run by group, separated by spaces."

# Names of `vllm serve` and `vllm bench serve` (0.32) that mean a setting of another name here.
VLLM_NAMES = {
    "block_tokens": "block_size",
    "prefix_caching": "enable_prefix_caching",
    "rate": "request_rate",
    "requests": "num_prompts",
}
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
}


def flag(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def grouped(model: Model) -> Model:
    """Show each setting of `model` in its group, and accept vLLM's name for the setting. A setting
    without a group stands below `Parameters`."""
    groups = {name: group for group, names in SETTINGS.items() for name in names.split()}
    for name, field in model.model_fields.items():
        if name in groups:
            field.metadata.append(Parameter(group=groups[name]))
        if name in VLLM_NAMES:
            field.metadata.append(Parameter(name=[flag(name), flag(VLLM_NAMES[name])]))
        if name in SHORT:
            field.metadata.append(Parameter(name=[flag(name), SHORT[name]]))
    return model
