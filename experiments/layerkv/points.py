"""The grids of the LayerKV study.

Contexts, output length, the rate at which contexts vary, and objectives are the paper's. The rates
of its ShareGPT sweeps can only be read off plots; here they go from half of the capacity to beyond
it.
"""

from collections.abc import Mapping
from typing import Any

from twinserve.experiments.layerkv.runs import (
    CELLS,
    CONTEXTS,
    HISTORY,
    KNOWN,
    MODELS,
    NO_SLO,
    OUTPUT,
    VLLM,
)
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid

LLAMA, YI, LARGE = MODELS
ENGINES = {model: {"model": model, "tp": tp} for model, tp in MODELS.items()}
DATA = texts(__file__, "data.yaml")
SWEEPS, REQUESTS, RULES = DATA.SWEEPS, DATA.REQUESTS, DATA.RULES
PARKED, SHARING = DATA.PARKED, DATA.SHARING
DEGREES = (2, 4, 8)
ALL = (VLLM, *CELLS, NO_SLO)
# prompts of one length, 1 request/s, beside an engine for the longest; and ShareGPT lengths
FIXED = {"longest": max(CONTEXTS) + OUTPUT, "rate": 1.0, "requests": 100}
CHATS = {"lengths": "sharegpt", "longest": 4096}


def fixed(*contexts: int) -> dict[int, dict[str, str]]:
    return {tokens: {"lengths": f"fixed:{tokens},{OUTPUT}"} for tokens in contexts}


def chats(*models: str) -> dict[str, dict[str, Any]]:
    return {model: ENGINES[model] | {"requests": REQUESTS[model]} for model in models}


def variants(of: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"policy": policy} for name, policy in of.items()}


def grid(vary: Mapping[Any, Any], common: Mapping[str, Any], requests: Any = 12, **more) -> Grid:
    """requests: of the smallest grid."""
    return Grid(vary, common, quick={"requests": requests}, **more)


# -- Figs. 1 and 4 to 8 ----------------------------------------------------------------------------
READINGS = (VLLM, *CELLS, HISTORY, KNOWN)
BY_CONTEXT = grid(
    {"model": ENGINES, "context": fixed(*CONTEXTS), "policy": READINGS},
    FIXED,
    where=lambda at: at["model"] == LLAMA or at["policy"] not in (HISTORY, KNOWN),
    few={"model": 1, "context": (128, 8192)},
)
# The paper does not give the context.
BY_DEGREE = grid(
    {"context": fixed(1024, 4096), "tp": DEGREES, "policy": (VLLM, *CELLS, HISTORY, KNOWN, NO_SLO)},
    {"model": YI, **FIXED},
    few={"context": (4096,), "tp": 2},
)
BY_RATE = grid(
    {
        ("model", "rate"): {
            (model, rate): {**of_model, "rate": rate}
            for model, of_model in chats(*MODELS).items()
            for rate in SWEEPS[model]
        },
        "policy": ALL,
    },
    CHATS,
    150,
    few={("model", "rate"): ((LLAMA, 4.0), (LLAMA, 8.0))},
)
ONE = {**chats(LLAMA)[LLAMA], **CHATS}
# the onset of overload, where the paper's gain is largest
TRADE = grid({"rate": (6.0, 6.5, 7.0, 7.5, 8.0), "policy": ALL}, ONE, 150, few={"rate": (8.0,)})

# -- variants of Algorithm 1, Llama-2-7B -----------------------------------------------------------
OF_RULES = grid({"rate": (6.5, 8.0), "variant": variants(RULES)}, ONE, 150, few={"rate": (8.0,)})
PARKING = grid(
    {"context": fixed(2048, 4096), "variant": variants(PARKED)},
    ENGINES[LLAMA] | FIXED,
    few={"context": (4096,)},
)
# Runs of Fig. 4 that go on: beyond vLLM's capacity waits grow with the run. And which of LayerKV's
# limits ends the gain: late requests, requests that are parked, or both.
BY_REQUESTS = grid(
    {"context": fixed(2048, 4096), "requests": (50, 100, 200, 400, 800), "policy": (VLLM, *CELLS)},
    ENGINES[LLAMA] | FIXED,
    lambda requests: requests // 4,
    few={"context": (4096,), "requests": 2},
)
# -- several GPUs ----------------------------------------------------------------------------------
# Prompts that do not fit, KV transfers and all-reduces on one link: no Algorithm 1, so that memory
# binds and layers move. Model and degree -> all-reduces' share of a prompt's time
# (`allreduce_seconds` of the profile's model over `step_seconds`).
SHARES = {(YI, 2): 0.23, (YI, 4): 0.77, (LARGE, 4): 0.72}
CONTENTION = grid(
    {
        ("engine", "variant"): {
            (f"{model}, {tp} GPUs", name): {"model": model, "tp": tp}
            | {"policy": policy.format(share=share), "contention": on}
            for (model, tp), share in SHARES.items()
            for name, (policy, on) in SHARING.items()
        }
    },
    FIXED | fixed(4096)[4096],
    few={("engine", "variant"): len(SHARING)},
)
