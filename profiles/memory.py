"""A profile with other memory settings: the share that vLLM may use, the longest request, the KV
cache's type, KV blocks from the engine's log.

The functions change copies; step times change with the KV cache's type alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinserve.profiles.gpus import GPUS
from twinserve.profiles.kv_memory.derive import (
    BLOCK_TOKENS,
    KvBlocks,
    ServerFlags,
    blocks_or_none,
    kept_tokens,
    prints_longest,
)
from twinserve.profiles.kv_memory.releases import (
    Release,
    default_budgets,
    default_utilization,
    parse_release,
)
from twinserve.profiles.operators.model import OperatorForm
from twinserve.profiles.profile import Profile, RooflineForm
from twinserve.profiles.ranks import layers_of_stages
from twinserve.profiles.specs import ModelSpec, ProfileError

if TYPE_CHECKING:
    from twinserve.profiles.kv_memory.start_log import StartLog

# What the notes of profiles say whose operators can be asked for once more, of other KV.
TABLES = "composed from the tables of aiconfigurator-core"
_FP8_KV = "With KV in FP8, of which no error is known."
SCALED = "Scaled on purpose"  # of a number that no derivation gives
# The end of a line that says a number is derived.
EXACT = "the line 'Available KV cache memory' of the server's log makes it exact (--kv-from-log)"


def with_server_flags(
    profile: Profile,
    *,
    engine_version: str | None = None,
    utilization: float | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    enforce_eager: bool = False,
) -> Profile:
    """Return the engine with other flags of `vllm serve`; None: as the profile has it. ProfileError
    if no KV memory is left.

    Derived KV blocks are derived anew. Another number of an engine on a known GPU moves by what the
    terms of both sets of flags differ. With another release, flags that stand at the defaults of
    the old one take those of the new one.
    """
    changes: dict[str, Any] = {
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": enforce_eager or None,
        "engine_version": engine_version,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if engine_version is not None:
        changes = _defaults_that_move(profile, engine_version) | changes
    changed = profile.model_copy(update=changes)
    old, new = profile.server_flags, changed.server_flags
    derived = profile.num_gpu_blocks_source == "derived" and SCALED not in profile.notes
    said = {name: value for name, value in changes.items() if value != getattr(profile, name)}
    if derived and said:
        found = _blocks(profile, new)
        _check_some(profile, found.blocks, f": {found.terms}")
        return _with_blocks(changed, found.blocks, "derived", {}, (found.low, found.high))
    if not said or not (_moves_by_terms(profile) or utilization is not None):
        return changed
    if _moves_by_terms(profile):
        more = _blocks(profile, new).blocks - _blocks(profile, old).blocks
    else:  # a GPU whose memory is all that is known
        more = _of_share(profile, new.utilization - old.utilization)
    _check_some(profile, profile.num_gpu_blocks + more)
    if not more:
        return changed
    return _with_blocks(changed, profile.num_gpu_blocks + more, "derived", {})


def least_kv_tokens(profile: Profile) -> int:
    """Return the least KV tokens of a server: the lower end if the number is derived. A file that
    keeps a derived number has at most the lower end of what is derived now."""
    known = profile.kv_capacity_tokens
    if profile.num_gpu_blocks_source != "derived" or SCALED in profile.notes:
        return known
    ends = profile.num_gpu_blocks_range
    low = _blocks(profile, profile.server_flags).low if ends is None else ends[0]
    return min(known, low * profile.block_tokens)


def _defaults_that_move(profile: Profile, engine_version: str) -> dict[str, Any]:
    """Flags that stand at the defaults of the profile's release, at those of `engine_version`."""
    if profile.num_gpu_blocks_source != "derived":
        return {}

    def defaults(release: Release) -> dict[str, Any]:
        tokens, requests = default_budgets(profile.gpu, release)
        return {
            "gpu_memory_utilization": default_utilization(release),
            "max_num_batched_tokens": tokens,
            "max_num_seqs": requests,
        }

    before = defaults(profile.server_flags.release)
    after = defaults(parse_release(engine_version))
    return {name: after[name] for name in after if getattr(profile, name) == before[name]}


def _moves_by_terms(profile: Profile) -> bool:
    """Whether the card is one whose terms are known; of a CPU they say nothing."""
    return profile.gpu.name in GPUS


def _blocks(profile: Profile, flags: ServerFlags) -> KvBlocks:
    """Of profile.block_tokens tokens."""
    ranks = profile.dp, profile.ep, profile.pp
    found = blocks_or_none(profile.llm, profile.gpu, profile.tp, flags, *ranks)
    if profile.block_tokens == BLOCK_TOKENS:
        return found
    of = BLOCK_TOKENS / profile.block_tokens
    low, blocks, high = (int(n * of) for n in (found.low, found.blocks, found.high))
    return replace(found, low=low, blocks=blocks, high=high)


def _of_share(profile: Profile, share: float) -> int:
    """Blocks in that share of each rank's memory. Of pipeline stages, the one with most layers gets
    fewest blocks."""
    of_stage = max(layers_of_stages(profile.llm.layers, profile.pp)) / profile.llm.layers
    gives = share * profile.gpu.memory_bytes * profile.tp
    return int(gives // (profile.block_bytes * of_stage))


def _check_some(profile: Profile, blocks: int, terms: str = "") -> None:
    if blocks < 1:
        raise ProfileError(
            f"{profile.name}: these flags of the server leave no KV memory{terms}; raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, use more "
            "ranks, or give the blocks of a server that did start (--num-blocks)"
        )


def with_max_model_len(profile: Profile, tokens: int, blocks: int, block_tokens: int) -> Profile:
    """The engine with another `--max-model-len` and this KV memory. ProfileError where vLLM would
    not start: more than the model has positions, or than the KV memory holds."""
    if tokens > profile.llm.max_positions:
        raise ProfileError(
            f"{profile.name}: --max-model-len {tokens} is more than the {profile.llm.max_positions}"
            " positions of the model"
        )
    if tokens > blocks * block_tokens:
        raise ProfileError(
            f"{profile.name}: --max-model-len {tokens} is more than the {blocks * block_tokens} "
            f"tokens that {blocks} KV blocks of {block_tokens} hold; lower it, raise "
            "--gpu-memory-utilization, or use more ranks"
        )
    return profile.model_copy(update={"max_model_len": tokens})


def with_fp8_kv(profile: Profile) -> Profile:
    """Return the engine with `--kv-cache-dtype fp8`: the same bytes hold more tokens, and fewer
    bytes are read. ProfileError for step times that were tabulated or measured with another type.
    """
    if profile.llm.kv_value_bytes == 1:
        return profile
    llm = replace(profile.llm, kv_dtype_bytes=1.0)
    form = profile.step_model
    if isinstance(form, OperatorForm) and TABLES in profile.notes:
        form = _tables_of_fp8_kv(profile, llm, form)
    elif not isinstance(form, RooflineForm):
        raise ProfileError(
            f"{profile.name}: its step times ({form.form}) are those of KV of "
            f"{profile.llm.kv_value_bytes:g} bytes a value; choose --step-times roofline"
        )
    room = profile.num_gpu_blocks * profile.block_bytes
    known = {"fit_error": None, "notes": f"{profile.notes} {_FP8_KV}".strip()}
    changed = profile.model_copy(update={"llm": llm, "step_model": form, **known})
    more = changed.block_bytes / profile.block_bytes
    ends = profile.num_gpu_blocks_range
    ends = None if ends is None else (int(ends[0] / more), int(ends[1] / more))
    return _with_blocks(changed, int(room // changed.block_bytes), "derived", {}, ends)


def _tables_of_fp8_kv(profile: Profile, llm: ModelSpec, form: OperatorForm) -> OperatorForm:
    """The same operators with attention over FP8 keys and values."""
    from twinserve.profiles.operators.aic import form_from_aiconfigurator  # with scipy and all

    try:
        return form_from_aiconfigurator(
            llm,
            profile.gpu.name,
            profile.tp,
            capture_tokens=form.capture_tokens,
            host_s=form.host_s,
            host_request_s=form.host_request_s,
        )
    except ProfileError as error:
        raise ProfileError(
            f"--kv-cache-dtype fp8: {error}; or choose --step-times roofline"
        ) from None


def with_blocks_of_log(
    profile: Profile, path: Path, utilization: float | None = None
) -> tuple[Profile, tuple[str, ...]]:
    """The engine with the KV memory that vLLM's own log of its start says, and what is to be known
    of that number. utilization: another one than the server's; None: the same. Of several engines
    the one with the least memory counts. ProfileError if the log has no line that is understood.
    """
    from twinserve.profiles.kv_memory.start_log import read_start_log

    try:
        log = read_start_log(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror})") from None
    if log.release is not None and profile.engine_version is None:
        profile = profile.model_copy(update={"engine_version": log.release})
    llm, moved = profile.llm, utilization not in (None, log.utilization)
    sizes = log.sizes or tuple(n * profile.block_tokens for n in log.block_counts)
    tokens = min(sizes, default=0)
    share = log.utilization if utilization is None else utilization
    more = {} if share is None else {"gpu_memory_utilization": share}
    longest = sizes and profile.pp == 1 and prints_longest(llm, profile.server_flags.release)
    if moved or not sizes or (longest and log.available is not None):
        nbytes = log.available_at(utilization)
        if nbytes is None or profile.pp > 1:
            return _with_terms_of_log(profile, path, log, moved, more)
        tokens = int(kept_tokens(llm, profile.tp, profile.server_flags.release, nbytes))
    if tokens < profile.block_tokens:
        raise ProfileError(f"{path}: its KV cache of {tokens} tokens is less than one block")
    _check_fits(profile, path, tokens)
    notices = tuple(f"{path}: {line}" for line in _contradictions(log, sizes))
    blocks = tokens // profile.block_tokens
    return _with_blocks(profile, blocks, "derived" if moved else "measured", more), notices


def with_kv_bytes(profile: Profile, nbytes: int, engine_version: str | None = None) -> Profile:
    """The engine with so many bytes of KV memory on each rank (`--kv-cache-memory-bytes`).
    ProfileError if they hold no block, or are more than the GPU has."""
    if nbytes > profile.gpu.memory_bytes:
        raise ProfileError(
            f"{profile.name}: --kv-cache-memory-bytes {nbytes} is more than the "
            f"{profile.gpu.memory_bytes:.0f} bytes of the GPU; lower it"
        )
    if engine_version is not None:
        profile = profile.model_copy(update={"engine_version": engine_version})
    # of pipeline stages, the one with most layers gets fewest blocks
    of_stage = max(layers_of_stages(profile.llm.layers, profile.pp)) / profile.llm.layers
    tokens = kept_tokens(profile.llm, profile.tp, profile.server_flags.release, nbytes / of_stage)
    blocks = int(tokens // profile.block_tokens)
    _check_some(profile, blocks)
    return _with_blocks(profile, blocks, "stated", {})


def _check_fits(profile: Profile, path: Path, tokens: int) -> None:
    """ProfileError if a log's KV cache is more than the whole GPU: it is of another engine."""
    if not _moves_by_terms(profile) or prints_longest(profile.llm, profile.server_flags.release):
        return
    memory = profile.gpu.memory_bytes * profile.pp
    most = kept_tokens(profile.llm, profile.tp, profile.server_flags.release, memory)
    if tokens > most:
        raise ProfileError(
            f"{path}: its KV cache of {tokens:,} tokens is more than the {most:,.0f} that all "
            f"memory of {profile.name} would hold; give the log of this model on this GPU, and "
            "its --kv-cache-dtype"
        )


def _with_terms_of_log(
    profile: Profile, path: Path, log: StartLog, moved: bool, more: dict
) -> tuple[Profile, tuple[str, ...]]:
    """KV memory derived with the terms that the log has. ProfileError if it has none, or where
    another utilisation was asked for, which these do not settle."""
    if moved and (log.sizes or log.block_counts or log.available is not None):
        raise ProfileError(
            f"{path}: no line 'Free memory on device ... Actual usage is ...', from which the KV "
            "memory at another --gpu-memory-utilization would follow; drop that flag"
        )
    if log.weights is None and not log.v2 and log.available is not None:
        raise ProfileError(
            f"{path}: 'Available KV cache memory' is of single pipeline stages, and no line has "
            "'GPU KV cache size: N tokens'; give a log that has it, or --num-blocks"
        )
    if log.weights is None and not log.v2:
        raise ProfileError(
            f"{path}: no line 'GPU KV cache size: N tokens' (or # GPU blocks: N), nor 'Available "
            "KV cache memory'; give the log of a vLLM server's start"
        )
    changed = profile.model_copy(update=more)
    flags = replace(changed.server_flags, weights=log.weights, v2=log.v2 or None)
    found = _blocks(profile, flags)
    _check_some(profile, found.blocks)
    said = " and ".join(["weights"] * (log.weights is not None) + ["runner"] * log.v2)
    notice = f"{path}: KV memory is derived, with the {said} of the log; {EXACT}"
    ends = (found.low, found.high)
    return _with_blocks(changed, found.blocks, "derived", {}, ends), (notice,)


def _contradictions(log: StartLog, sizes: tuple[int, ...]) -> list[str]:
    """Report a difference between vLLM's size and its number of fitting requests. For a hybrid
    model they differ: layers with a window or a fixed state need no KV of all tokens."""
    said = []
    if sizes and min(sizes) < max(sizes):
        said.append(
            f"KV caches of {min(sizes):,} to {max(sizes):,} tokens: the smallest is used; give "
            "--num-blocks if it is not the engine's"
        )
    for tokens, longest, times in log.both:
        fit = times * longest
        if abs(fit - tokens) > 0.01 * (tokens + longest):  # the factor has two decimals
            said.append(
                f"'GPU KV cache size' is {tokens:,} tokens, and 'Maximum concurrency' {times:g} x "
                f"{longest:,} tokens is {fit:,.0f}, as of a hybrid model: the first is used; "
                "--num-blocks sets another"
            )
    return said


def _with_blocks(
    profile: Profile, blocks: int, source: str, more: dict, ends: tuple[int, int] | None = None
) -> Profile:
    """With the longest request that the blocks hold, up to what the model has."""
    known = blocks * profile.block_tokens
    full = profile.max_model_len == profile.kv_capacity_tokens
    longest = profile.llm.max_positions if full else profile.max_model_len
    return profile.model_copy(
        update={
            "num_gpu_blocks": blocks,
            "num_gpu_blocks_source": source,
            "num_gpu_blocks_range": ends,
            "max_model_len": min(longest, known),
            **more,
        }
    )
