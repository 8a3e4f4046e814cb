"""All that the live twin needs from vLLM, and a check that the installed release has it. Importing
this module does not import vLLM.

vLLM has no stable interface here, and changes monthly. So a use of the twin begins with `require`:
what is missing is said in one line then, not by a traceback in the middle of a run.
"""

import functools
import inspect
from dataclasses import dataclass
from importlib import import_module

from twinserve.backends.live.versions import LiveEngineError, installed_vllm, known_to_work
from twinserve.formats import shipped_rows


@dataclass(frozen=True)
class Need:
    """A name of vLLM's: a row of `needs.csv`, which says what its columns mean."""

    where: str
    parameters: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


def _part(name: str) -> tuple[Need, ...]:
    return tuple(
        Need(row["where"], tuple(row["parameters"].split()), tuple(row["holds"].split()))
        for row in shipped_rows(__package__, "needs.csv")
        if row["part"] == name
    )


# of a Scheduler that has been made; steering reads and sets them
_STATE = (
    "running", "waiting", "requests", "kv_cache_manager", "block_size", "connector", "policy",
    "need_mamba_block_aligned_split", "max_num_scheduled_tokens", "max_model_len",
)  # fmt: skip
# what the twin is used for -> what that needs
_ENGINE, _SWAP = (*_part("steering"), *_part("engine")), _part("swap")
NEEDS = {
    "engine": _ENGINE,  # an engine in this process: live runs, locked replay, calibration
    "swapping": _SWAP,  # requests whose KV goes to the host and back
    "drafts": _part("drafts"),  # n-gram drafts of an engine in this process
    # an engine that keeps KV where the ledger says
    "physical": (*_ENGINE, *_SWAP, *_part("physical")),
    "serving": (*_part("steering"), *_part("serving")),  # a policy under vllm serve
    "emulating": _part("emulating"),  # a worker whose forward pass only waits
}


def missing(use: str) -> list[str]:
    """Return the names of `NEEDS[use]` that the installed vLLM lacks, as far as visible without an
    engine. A missing parameter or field is in brackets."""
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
    """Names that a call can use; None if it takes any, or does not tell."""
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
