"""The grids of the BROS study.

Models, lengths and objectives are the paper's. Of the rates it gives only the highest, and the size
of a best-effort batch not at all. Traces are of ten minutes, as printed; figure `settings` varies
that and what the paper leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from twinserve.experiments.bros.runs import (
    LLAMA,
    NO_BI_CACHE,
    OPT,
    PAGED_SWAP,
    POLICIES,
    POOL,
    PURE,
    QWEN,
    RATES,
    TGI,
)
from twinserve.experiments.study.study import Scale, points_over
from twinserve.sim.sweep.grid import Point

SECONDS = 600.0  # of arrivals (Sec. VII-A: "10-minute traces")
ABLATION_RATE = 10.0  # Sec. VII-D
ACM = (*OPT, LLAMA)  # models of that version
SLOW = 3.0

UNCHANGED = {"slow": 1.0, "memory": 1.0}
_over = partial(points_over, unchanged=UNCHANGED)

PARTS = {
    "bros": {"policy": "bros"},
    "replacement until one fails": {"policy": "bros:replacement=all"},
    "no replacement": {"policy": "bros:replacement=none"},
    "fixed batch size": {"policy": "bros:adaptive_batch=false"},
    "chunk=fit (ours)": {"policy": "bros:chunk=fit"},
}
HIGH = 15.0
CACHES = {"bi-cache": "bros", "paged, recompute": NO_BI_CACHE, "paged, swap": PAGED_SWAP}

BASE = {
    "profile": QWEN[0],
    "lengths": "sharegpt",
    "rate": ABLATION_RATE,
    "pool": POOL,
    "duration": SECONDS,
}
VARIED = {"pool": (128, 512), "slow": (1.0, 3.0), "duration": (60.0, SECONDS)}


def _seconds(scale: Scale) -> float:
    return 6.0 if scale.quick else SECONDS


def _pool(scale: Scale) -> int:
    return 12 if scale.quick else POOL


def hybrid(scale: Scale) -> list[Point]:
    """Figs. 9 and 10 of the IEEE version."""
    return _hybrid(scale, QWEN[:1] if scale.quick else QWEN)


def acm(scale: Scale) -> list[Point]:
    """Figs. 10 and 11 of the ACM version, ShareGPT lengths."""
    return _hybrid(scale, QWEN[:1] if scale.quick else ACM)


def lmsys(scale: Scale) -> list[Point]:
    """The same with LMSYS lengths, which the ACM version alone has."""
    return _hybrid(scale, QWEN[:1] if scale.quick else ACM, "lmsys")


def _hybrid(
    scale: Scale, models: Iterable[str], lengths: str = "sharegpt", **changes: float
) -> list[Point]:
    settings = [
        {
            "profile": m,
            "lengths": lengths,
            "rate": r,
            "policy": p,
            "duration": _seconds(scale),
            "pool": _pool(scale),
        }
        | changes
        for m in models
        for r in ((6.0, 12.0) if scale.quick else RATES)
        for p in POLICIES
    ]
    return _over(scale, settings, ("profile", "lengths", "rate", "policy"))


def slow(scale: Scale) -> list[Point]:
    """The hybrid loads on OPT with an engine whose steps take three times as long."""
    return _hybrid(scale, OPT[:1] if scale.quick else OPT, slow=SLOW)


def pure(scale: Scale) -> list[Point]:
    """Fig. 11."""
    models, rates = (QWEN[:1], (12.0,)) if scale.quick else ((*QWEN, *OPT), (9.0, 12.0, 15.0, 20.0))
    settings = [
        {"profile": m, "lengths": "sharegpt", "rate": r, "policy": p, "duration": _seconds(scale)}
        | {"_policy": "bros" if p == PURE else p}
        for m in models
        for r in rates
        for p in ("vllm-v0", "vllm", *TGI, PURE)
    ]
    return _over(scale, settings, ("profile", "lengths", "rate", "policy"))


def preemptive(scale: Scale) -> list[Point]:
    """Fig. 2: 512 requests, no best-effort ones."""
    models, rates, n = (
        ((QWEN[0],), (20, 60), 60)
        if scale.quick
        else ((QWEN[0], OPT[0]), (4, 8, 12, 16, 24, 32, 48, 64), 512)
    )
    policies = ("vllm-v0", "vllm", "preemptive-wait", "preemptive-wait:newcomers_preempt=false")
    settings = [
        {"profile": m, "lengths": "sharegpt", "rate": float(r), "policy": p, "requests": n}
        for m in models
        for r in rates
        for p in policies
    ]
    return _over(scale, settings, ("profile", "rate", "policy"))


def caches(scale: Scale) -> list[Point]:
    """Fig. 12."""
    models = OPT[1:] if scale.quick else (QWEN[1], *OPT)
    settings = [
        {"profile": m, "lengths": "sharegpt", "rate": ABLATION_RATE, "policy": p, "_cache": name}
        | {"duration": _seconds(scale), "pool": 60 if scale.quick else POOL}
        for m in models
        for name, p in CACHES.items()
    ]
    return _over(scale, settings, ("profile", "cache"))


def parts(scale: Scale, rate: float = ABLATION_RATE) -> list[Point]:
    settings = [
        {"profile": QWEN[0], "lengths": "sharegpt", "rate": rate, "_variant": name, **choice}
        | {"duration": _seconds(scale), "pool": _pool(scale)}
        for name, choice in PARTS.items()
    ]
    return _over(scale, settings, ("profile", "rate", "variant"))


def parts_high(scale: Scale) -> list[Point]:
    """The same near the highest rate that BROS is stable at."""
    return parts(scale, HIGH)


def varied(scale: Scale) -> list[Point]:
    """One setting at a time is changed from `BASE`."""
    base = BASE | ({"duration": _seconds(scale), "pool": 12} if scale.quick else {})
    values = {"slow": (1.0, 3.0), "memory": (1.0, 0.25)} if scale.quick else VARIED
    settings = [
        {**base, name: value, "policy": p, "_varied": name, "_value": value}
        for name, found in values.items()
        for value in found
        for p in ("vllm-v0", "round-robin", "bros")
    ]
    return _over(scale, settings, ("varied", "value", "policy"))


def overheads(scale: Scale) -> list[Point]:
    """Fig. 13."""
    models, rates = (QWEN[:1], (6.0,)) if scale.quick else (QWEN, (6.0, 10.0))
    settings = [
        {"profile": m, "lengths": "sharegpt", "rate": r, "policy": "bros", "pool": _pool(scale)}
        | {"duration": 3.0 if scale.quick else SECONDS}
        for m in models
        for r in rates
    ]
    return _over(scale, settings, ("profile", "rate"))
