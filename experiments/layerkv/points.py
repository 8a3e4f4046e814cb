"""The grids of the LayerKV study.

Contexts, output length, the rate at which contexts vary, and objectives are the paper's. The rates
of its ShareGPT sweeps can only be read off plots; here they go from half of the capacity to beyond
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from twinserve.experiments.layerkv.runs import (
    BOTH,
    CELLS,
    CONTEXTS,
    HISTORY,
    KNOWN,
    MODELS,
    NO_SLO,
    OUTPUT,
    SAVABLE,
    TPOT_S,
    UNBOUND,
    VLLM,
)
from twinserve.experiments.study.study import Scale, points_over
from twinserve.sim.sweep.grid import Point

SWEEPS = {
    "llama-2-7b": (4.0, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0),
    "yi-34b-200k": (2.0, 4.0, 6.0, 8.0),
    "llama-3.1-70b": (0.5, 1.0, 1.5, 2.0),
}
REQUESTS = {"llama-2-7b": 1000, "yi-34b-200k": 500, "llama-3.1-70b": 300}
SHORT = 4096  # longest input of an engine that serves ShareGPT
LONG = max(CONTEXTS) + OUTPUT
DEGREES = (2, 4, 8)
TRADED = (6.0, 6.5, 7.0, 7.5, 8.0)  # requests/s

# What is varied: tokens of prompt, the argument, its values.
VARIED = {
    "factor on KV blocks, 1,024 tokens": (1024, "memory", (0.5, 1.0)),
    "factor on KV blocks, 4,096 tokens": (4096, "memory", (1.0, 2.0, 4.0)),
    "factor on PCIe rate, 8,192 tokens": (8192, "link", (1.0, 4.0)),
    "requests/s, 4,096 tokens": (4096, "rate", (0.2, 0.3, 1.0)),
    "TPOT objective (s), 4,096 tokens": (4096, "tpot_s", (0.1, 0.2, 0.4)),
}
# on one GPU, which has its link for itself
UNCHANGED = {"link": 1.0, "memory": 1.0, "tpot_s": TPOT_S, "contention": True, "allreduce": 1.0}
_over = partial(points_over, unchanged=UNCHANGED)

# KV transfers and all-reduces on one link: no Algorithm 1, so that memory binds and layers move
SHARED = {
    "vLLM": (VLLM, True),
    "LayerKV, link to itself": (NO_SLO, False),
    "LayerKV": (NO_SLO, True),
    "reckons with it": (f"{NO_SLO},allreduce_share={{share}}", True),
    "does not look": (f"{NO_SLO},allreduce_check=false", True),
}
# of a prompt's time
SHARES = {("yi-34b-200k", 2): 0.23, ("yi-34b-200k", 4): 0.77, ("llama-3.1-70b", 4): 0.72}

# Where throughput is higher than vLLM's: what vLLM would do without recomputing, and with more
# memory
HIGHER = {
    "vLLM": (VLLM, 1.0),
    "vLLM swaps": (f"{VLLM}:preemption_mode=swap", 1.0),
    "vLLM, a quarter more blocks": (VLLM, 1.25),
    "LayerKV": ("layerkv", 1.0),
}
WHERE_HIGHER = (
    ("llama-3.1-70b", 512),
    ("llama-3.1-70b", 4096),
    ("yi-34b-200k", 1024),
    ("yi-34b-200k", 16384),
)

# Fig. 5 where all-reduces are faster: the profile's rate of four and eight ranks, that of two, and
# one at which they hardly count
RATES_OF_ALLREDUCE = (1.0, 4.0, 16.0)
LINKED = {  # and whether vLLM has memory enough: factor on the KV blocks
    "vLLM": (VLLM, 1.0),
    "vLLM, four times the memory": (VLLM, 4.0),
    "LayerKV": ("layerkv", 1.0),
    "no Algorithm 1": (NO_SLO, 1.0),
}

# how many may be parked on the host, and nobody: every decode fetches what is there
PARKED = {
    "vLLM": VLLM,
    **{f"{n} parked at most": f"layerkv:max_parked={n}" for n in (0, 4, 16)},
    "LayerKV (64)": "layerkv",
    "any number parked": UNBOUND,
    "nobody waits": "layerkv:park=false",
}

# what is known of lengths, and who counts in Algorithm 1
LENGTHS = {
    "vLLM": VLLM,
    "history": HISTORY,
    "trained": "layerkv",
    "known": KNOWN,
    "history, late ones left out": f"{SAVABLE},predictor=history",
    "known, late ones left out": f"{SAVABLE},predictor=oracle-length",
    "known, TPOT of a request": f"{KNOWN},current_tpot=request",
    "no Algorithm 1": NO_SLO,
}

RULES = {
    "vLLM": VLLM,
    "LayerKV": "layerkv",
    "negative allowances left out": SAVABLE,
    "negative allowances left out, any number parked": BOTH,
    "any number parked": UNBOUND,
    "TPOT of a request": "layerkv:current_tpot=request",
    "lengths from history": HISTORY,
    "lengths known": KNOWN,
    "no Algorithm 1": NO_SLO,
    "Algorithm 1 alone": "layerkv:layer_wise=false",
}


def contexts(scale: Scale) -> list[Point]:
    """Figs. 1 and 4: fixed prompts, 1 request/s, 100 requests."""
    models = {"llama-2-7b": 1} if scale.quick else MODELS
    settings = [
        {
            "model": m,
            "tp": tp,
            "lengths": f"fixed:{c},{OUTPUT}",
            "longest": LONG,
            "rate": 1.0,
            "policy": p,
            "_context": c,
        }
        | {"requests": 12 if scale.quick else 100}
        for m, tp in models.items()
        for c in ((128, 8192) if scale.quick else CONTEXTS)
        for p in (VLLM, "layerkv", *((HISTORY, KNOWN) if m == "llama-2-7b" else ()), SAVABLE)
    ]
    return _over(scale, settings, ("model", "context", "policy"))


def degrees(scale: Scale) -> list[Point]:
    """Fig. 5: Yi-34B-200K on more GPUs; the paper does not give the context."""
    settings = [
        {
            "model": "yi-34b-200k",
            "tp": tp,
            "lengths": f"fixed:{c},{OUTPUT}",
            "longest": LONG,
            "rate": 1.0,
            "policy": p,
        }
        | {"requests": 12 if scale.quick else 100, "_context": c}
        for c in ((4096,) if scale.quick else (1024, 4096))
        for tp in (DEGREES[:2] if scale.quick else DEGREES)
        for p in (VLLM, *CELLS, HISTORY, KNOWN, NO_SLO)
    ]
    return _over(scale, settings, ("context", "tp", "policy"))


def _fixed(model: str, tp: int, context: int, policy: str, requests: int, **other) -> dict:
    """Prompts of `context` tokens, 1 request/s."""
    return {
        "model": model,
        "tp": tp,
        "lengths": f"fixed:{context},{OUTPUT}",
        "longest": LONG,
        "rate": 1.0,
        "policy": policy,
        "requests": requests,
        **other,
    }


def links(scale: Scale) -> list[Point]:
    """Fig. 5's degrees at which all-reduces cross the host bridge, with other rates for them."""
    settings = [
        _fixed("yi-34b-200k", tp, c, p, 12 if scale.quick else 100, allreduce=factor, memory=memory)
        | {"_context": c, "_allreduce": factor, "_variant": name}
        for c in ((4096,) if scale.quick else (1024, 4096))
        for tp in DEGREES[1:]
        for factor in (RATES_OF_ALLREDUCE[:2] if scale.quick else RATES_OF_ALLREDUCE)
        for name, (p, memory) in LINKED.items()
    ]
    return _over(scale, settings, ("context", "tp", "allreduce", "variant"))


def parking(scale: Scale) -> list[Point]:
    """How many requests may wait on the host."""
    settings = [
        _fixed("llama-2-7b", 1, c, p, 12 if scale.quick else 100)
        | {"_context": c, "_variant": name}
        for c in ((8192,) if scale.quick else (2048, 4096))
        for name, p in PARKED.items()
    ]
    return _over(scale, settings, ("context", "variant"))


def lengths(scale: Scale) -> list[Point]:
    """Prompts of 4,096 tokens: why known lengths do not always help."""
    settings = [
        _fixed("llama-2-7b", 1, 4096, p, n) | {"_requests": n, "_variant": name}
        for n in ((12,) if scale.quick else (50, 100))
        for name, p in LENGTHS.items()
    ]
    return _over(scale, settings, ("requests", "variant"))


def requests(scale: Scale) -> list[Point]:
    """Runs of Fig. 4 that go on: beyond vLLM's capacity waits grow with the run. And which of
    LayerKV's limits ends the gain: late requests, requests that are parked, or both."""
    settings = [
        _fixed("llama-2-7b", 1, c, p, n) | {"_context": c, "_requests": n}
        for c in ((4096,) if scale.quick else (2048, 4096))
        for n in ((12, 24) if scale.quick else (50, 100, 200, 400, 800))
        for p in (VLLM, *CELLS)
    ]
    return _over(scale, settings, ("context", "requests", "policy"))


def rates(scale: Scale) -> list[Point]:
    """Figs. 6 to 8: ShareGPT lengths."""
    sweeps = {"llama-2-7b": (4.0, 8.0)} if scale.quick else SWEEPS
    settings = [
        {
            "model": m,
            "tp": MODELS[m],
            "lengths": "sharegpt",
            "longest": SHORT,
            "rate": r,
            "policy": p,
        }
        | {"requests": 150 if scale.quick else REQUESTS[m]}
        for m, found in sweeps.items()
        for r in found
        for p in (VLLM, *CELLS, NO_SLO)
    ]
    return _over(scale, settings, ("model", "rate", "policy"))


def trade(scale: Scale) -> list[Point]:
    """The four cells at the onset of overload, where the paper's gain is largest."""
    settings = [
        {
            "model": "llama-2-7b",
            "tp": 1,
            "lengths": "sharegpt",
            "longest": SHORT,
            "rate": r,
            "policy": p,
        }
        | {"requests": 150 if scale.quick else REQUESTS["llama-2-7b"]}
        for r in ((8.0,) if scale.quick else TRADED)
        for p in (VLLM, *CELLS, NO_SLO)
    ]
    return _over(scale, settings, ("rate", "policy"))


def rules(scale: Scale) -> list[Point]:
    """Variants of Algorithm 1, on the sweep of Llama-2-7B."""
    settings = [
        {
            "model": "llama-2-7b",
            "tp": 1,
            "lengths": "sharegpt",
            "longest": SHORT,
            "rate": r,
            "policy": p,
            "_variant": name,
        }
        | {"requests": 150 if scale.quick else REQUESTS["llama-2-7b"]}
        for r in ((8.0,) if scale.quick else (6.5, 8.0))
        for name, p in RULES.items()
    ]
    return _over(scale, settings, ("rate", "variant"))


def objectives(scale: Scale) -> list[Point]:
    """The larger models at a rate beyond capacity, with other TPOT objectives."""
    settings = [
        {
            "model": m,
            "tp": MODELS[m],
            "lengths": "sharegpt",
            "longest": SHORT,
            "rate": r,
            "policy": p,
            "tpot_s": tpot,
        }
        | {"requests": 40 if scale.quick else REQUESTS[m], "_objective": tpot}
        for m, r in (
            (("yi-34b-200k", 6.0),)
            if scale.quick
            else (("yi-34b-200k", 6.0), ("llama-3.1-70b", 2.0))
        )
        for tpot in (TPOT_S, 0.4, 1.0)
        for p in (VLLM, "layerkv", SAVABLE)
    ]
    return _over(scale, settings, ("model", "objective", "policy"))


def contention(scale: Scale) -> list[Point]:
    """The larger models with prompts that do not fit, all-reduces on the link of the KV transfers
    or not."""
    settings = [
        {
            "model": m,
            "tp": tp,
            "lengths": f"fixed:4096,{OUTPUT}",
            "longest": LONG,
            "rate": 1.0,
            "contention": on,
        }
        | {"requests": 12 if scale.quick else 100, "policy": p.format(share=share)}
        | {"_engine": f"{m}, {tp} GPUs", "_variant": name}
        for (m, tp), share in (list(SHARES.items())[:1] if scale.quick else SHARES.items())
        for name, (p, on) in SHARED.items()
    ]
    return _over(scale, settings, ("engine", "variant"))


def unshared(scale: Scale) -> list[Point]:
    """Figs. 5 to 8 and figure `objective` where all-reduces go over the link of the KV transfers:
    as they are there, and with the link to the transfers alone. vLLM recomputes, and moves
    nothing."""
    shown = (VLLM, "layerkv", SAVABLE, NO_SLO)
    found = {}
    for point in (*degrees(scale), *rates(scale), *objectives(scale)):
        work = point.arguments
        if work["tp"] == 1 or work["policy"] not in shown:
            continue
        axes = {"setting": _said(work), "policy": work["policy"], "seed": work["seed"]}
        for on in (False, True):
            off = {} if on or work["policy"] == VLLM else {"contention": False}
            found[(*axes.values(), on)] = Point({**axes, "contention": on}, {**work, **off})
    return list(found.values())


def _said(work: Mapping[str, Any]) -> str:
    """A setting in words."""
    fixed = work["lengths"].startswith("fixed:")
    load = f"{work['lengths'][6:].partition(',')[0]} tokens" if fixed else f"{work['rate']:g}/s"
    objective = f", TPOT {work['tpot_s']:g} s" if "tpot_s" in work else ""
    return f"{work['model']}, {work['tp']} GPUs, {load}{objective}"


def higher(scale: Scale) -> list[Point]:
    """Contexts of Fig. 4 at which LayerKV's throughput is higher than vLLM's."""
    settings = [
        {
            "model": m,
            "tp": MODELS[m],
            "lengths": f"fixed:{context},{OUTPUT}",
            "longest": LONG,
            "rate": 1.0,
            "memory": memory,
        }
        | {
            "requests": 12 if scale.quick else 100,
            "policy": p,
            "_engine": f"{m}, {context:,} tokens",
            "_variant": name,
        }
        for m, context in WHERE_HIGHER[: 1 if scale.quick else None]
        for name, (p, memory) in HIGHER.items()
    ]
    return _over(scale, settings, ("engine", "variant"))


def varied(scale: Scale) -> list[Point]:
    """One setting at a time, Llama-2-7B."""
    settings = [
        {
            "model": "llama-2-7b",
            "tp": 1,
            "lengths": f"fixed:{context},{OUTPUT}",
            "longest": LONG,
            "rate": 1.0,
            name: value,
        }
        | {"requests": 12 if scale.quick else 100, "policy": p, "_varied": label, "_value": value}
        for label, (context, name, values) in VARIED.items()
        for value in (values[-1:] if scale.quick else values)
        for p in (VLLM, "layerkv", SAVABLE)
    ]
    return _over(scale, settings, ("varied", "value", "policy"))
