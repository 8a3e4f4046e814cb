"""What changed between vLLM's releases for the memory of a server: defaults, the model runner, and
what the sampler of the profiling step holds.

Read in vLLM's sources, 0.8.5 to 0.32. A change seen between two releases that were at hand counts
from the later one on.
"""

import re

from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError

Release = tuple[int, int, int]

LATEST: Release = (0, 32, 0)
# vllm/config/scheduler.py: asynchronous scheduling is the default from this release on
ASYNCHRONOUS: Release = (0, 14, 0)
LATEST_NAME = ".".join(map(str, LATEST[:2]))
OLDEST: Release = (0, 6, 6)  # before, other rules held
V1_ENGINE: Release = (0, 8, 0)  # the default from there on
# names of releases: 0.8.5.post1, 0.10.1.1 and 0.19.1rc1 have the rules of their first three numbers
_NAME = re.compile(r"v?([0-9]+)\.([0-9]+)(?:\.([0-9]+)(?:\.[0-9]+|\.?(?:post|rc)[0-9]+)?)?")


def parse_release(text: str | None) -> Release:
    """The release that `engine_version` of a profile names. What is no version, or later than
    LATEST, counts as LATEST: no later rules are known."""
    said = _NAME.match(text or "")
    if said is None:
        return LATEST
    return min((int(said[1]), int(said[2]), int(said[3] or 0)), LATEST)


def is_known(text: str) -> bool:
    """Whether `text` is a release from OLDEST to LATEST."""
    said = _NAME.fullmatch(text)
    if said is None:
        return False
    return OLDEST <= (int(said[1]), int(said[2]), int(said[3] or 0)) < (0, LATEST[1] + 1, 0)


def check_release(text: str) -> str:
    """`text` where --engine-version may be it. ProfileError otherwise."""
    if not is_known(text):
        raise ProfileError(
            f"--engine-version {text}: give a release of vLLM from 0.6.6 to 0.32, as 0.19"
        )
    return text


def default_utilization(release: Release) -> float:
    """`CacheConfig.gpu_memory_utilization`, raised between 0.20 and 0.21."""
    return 0.92 if release >= (0, 21, 0) else 0.9


def default_budgets(gpu: GpuSpec, release: Release) -> tuple[int, int]:
    """Tokens and requests of a step of `vllm serve` without flags: `EngineArgs.get_batch_defaults`,
    which has the tier from 160 GiB on since 0.28."""
    gib = gpu.memory_bytes / 2**30
    if gib >= 160 and release >= (0, 28, 0):
        return 16384, 1024
    large = gib >= 70 and (not gpu.name.startswith("a100") or release < (0, 9, 2))
    if large and release >= V1_ENGINE:
        return 8192, 1024
    return 2048, 256


_V2_FIRST = ("qwen3-", "deepseek-r1-0528-qwen3")  # in 0.22
_V2_DENSE = (*_V2_FIRST, "llama", "codellama", "yi-", "mistral-")
_V2_MIXTURES = ("deepseek-v2", "qwen1.5-moe")


def uses_v2_runner(llm: ModelSpec, release: Release) -> bool:
    """Whether Model Runner V2 serves the model by default: `VllmConfig.use_v2_model_runner`, whose
    lists of architectures are here names of models. Weights of few bits came with 0.24, all dense
    models with 0.25, all models with 0.29."""
    if release >= (0, 29, 0):
        return True
    if llm.experts:
        return release >= (0, 24, 0) and llm.name.startswith(_V2_MIXTURES)
    if release >= (0, 25, 0):
        return True
    if release < (0, 22, 0) or (release < (0, 24, 0) and llm.weights is not None):
        return False
    families = _V2_DENSE if release >= (0, 23, 0) else _V2_FIRST
    return llm.name.startswith(families) and not llm.name.startswith("qwen3-vl")


def sampler_bytes(release: Release, requests: int, v2: bool, value_bytes: float) -> float:
    """Return the bytes for each request and word of the vocabulary at the peak of the dummy sampler
    run. value_bytes: of a logit as the model gives it.

    - Model Runner V2: logits alone, sampled greedily (`GPUModelRunner._dummy_sampler_run` of
      `v1/worker/gpu/model_runner.py`).
    - From 0.17 on, and with FlashInfer: logits, their fp32 copy, masked logits, probabilities
      (`v1/sample/ops/topk_topp_sampler.py`).
    - Before: `apply_top_k_top_p` sorts the fp32 copy. The sort returns values (4) and indices (8)
      and works on a copy of each; below 128 requests it takes torch's segmented path, with more.
    """
    if v2:
        return value_bytes
    if release >= (0, 17, 0):
        return value_bytes + 4 + 4 + 4
    if requests >= 128:
        return value_bytes + 4 + (4 + 8 + 8 + 12)
    return value_bytes + 4 + (4 + 8 + 8 + 8 + 4 + 12)


def masks_in_blocks(release: Release, v2: bool) -> bool:
    """Return whether top-k and top-p are a Triton kernel with an fp32 row of the vocabulary for
    each multiprocessor. They are from 0.17 until FlashInfer sampled by default, from 0.21 on
    (`v1/sample/ops/topk_topp_triton.py`)."""
    return not v2 and (0, 17, 0) <= release < (0, 21, 0)
