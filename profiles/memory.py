"""A profile with other settings of the engine's memory: the share that vLLM may use, the longest
request, the KV cache's type, and KV blocks as the engine's own start-up log says them.

The functions change copies; step times change with the KV cache's type alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from twinserve.profiles.operators.model import OperatorForm
from twinserve.profiles.profile import Profile, RooflineForm
from twinserve.profiles.specs import ModelSpec, ProfileError
from twinserve.profiles.stages import layers_of_stages

# vLLM V1, one line an engine core: `GPU KV cache size: 41,408 tokens`; V0: `# GPU blocks: 2588`.
_TOKENS = re.compile(r"GPU KV cache size:\s*([\d,]+)\s*tokens")
# and how many of the longest requests fit, in the same line or the next one of that engine
_BOTH = re.compile(
    _TOKENS.pattern + r"(?:(?!KV cache size)[\s\S])*?"
    r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
)
# What the notes of profiles say whose operators can be asked for once more, of other KV.
TABLES = "composed from the tables of aiconfigurator-core"
_FP8_KV = "With KV in FP8, of which no error is known."
_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks:\s*([\d,]+)")


def with_utilization(profile: Profile, utilization: float) -> Profile:
    """The engine with another `--gpu-memory-utilization`: what the share of each rank's memory
    gives or takes is KV blocks. ProfileError where none are left."""
    changed = utilization - profile.gpu_memory_utilization
    # of pipeline stages, the one with most layers gets fewest blocks
    of_stage = max(layers_of_stages(profile.llm.layers, profile.pp)) / profile.llm.layers
    more = changed * profile.gpu.memory_bytes * profile.tp // (profile.block_bytes * of_stage)
    blocks = profile.num_gpu_blocks + int(more)
    if blocks < 1:
        raise ProfileError(
            f"{profile.name}: --gpu-memory-utilization {utilization:g} leaves no KV memory; "
            f"the profile's {profile.num_gpu_blocks} KV blocks are of "
            f"{profile.gpu_memory_utilization:g}"
        )
    return _with_blocks(profile, blocks, "derived", {"gpu_memory_utilization": utilization})


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
    """The engine with `--kv-cache-dtype fp8`: as many bytes hold more tokens, and fewer are read.
    ProfileError for step times that were tabulated or measured with another type."""
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
    return _with_blocks(changed, int(room // changed.block_bytes), "derived", {})


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


def with_blocks_of_log(profile: Profile, path: Path) -> tuple[Profile, tuple[str, ...]]:
    """The engine with the KV memory that vLLM's own log of its start says, and what is to be known
    of that number. Of several engines the one with the least memory counts. ProfileError if the log
    has no such line."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror})") from None
    found = [_number(size) for size in _TOKENS.findall(text)]
    found = found or [_number(blocks) * profile.block_tokens for blocks in _BLOCKS.findall(text)]
    if not found:
        raise ProfileError(
            f"{path}: no line 'GPU KV cache size: N tokens' (or # GPU blocks: N); give the "
            "log of a vLLM server's start"
        )
    tokens = min(found)
    if tokens < profile.block_tokens:
        raise ProfileError(f"{path}: its KV cache of {tokens} tokens is less than one block")
    notices = tuple(f"{path}: {line}" for line in _contradictions(text, found))
    return _with_blocks(profile, tokens // profile.block_tokens, "measured", {}), notices


def _contradictions(text: str, sizes: list[int]) -> list[str]:
    """Of vLLM's size and the requests that it says fit: layers with a window or a fixed state need
    no KV of all tokens, so that the two differ for a hybrid model."""
    said = []
    if min(sizes) < max(sizes):
        said.append(
            f"KV caches of {min(sizes):,} to {max(sizes):,} tokens: the smallest is used; give "
            "--num-blocks if it is not the engine's"
        )
    for size, length, times in dict.fromkeys(_BOTH.findall(text)):
        tokens, longest = _number(size), _number(length)
        fit = float(times) * longest
        if abs(fit - tokens) > 0.01 * (tokens + longest):  # the factor has two decimals
            said.append(
                f"'GPU KV cache size' is {tokens:,} tokens, and 'Maximum concurrency' {times} x "
                f"{longest:,} tokens is {fit:,.0f}, as of a hybrid model: the first is used; "
                "--num-blocks sets another"
            )
    return said


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _with_blocks(profile: Profile, blocks: int, source: str, more: dict) -> Profile:
    """With the longest request that the blocks hold, up to what the model has."""
    known = blocks * profile.block_tokens
    full = profile.max_model_len == profile.kv_capacity_tokens
    longest = profile.llm.max_positions if full else profile.max_model_len
    return profile.model_copy(
        update={
            "num_gpu_blocks": blocks,
            "num_gpu_blocks_source": source,
            "max_model_len": min(longest, known),
            **more,
        }
    )
