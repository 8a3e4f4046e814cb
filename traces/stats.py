"""Numbers that characterise a workload: for `trace inspect`, the replica tables and their tests."""

from collections import OrderedDict

import numpy as np

from twinserve.traces.workload import PrefixBlocks, Workload

CACHE_TOKENS = (1_000_000, 3_000_000, 10_000_000)


def lru_hit_rate(prefix: PrefixBlocks, cache_tokens: float | None = None) -> float:
    """Fraction of all prompt blocks found cached when rows come in order, one at a time.

    A cache of `cache_tokens` (None = unlimited) holds whole blocks and evicts the least recently
    used. A row hits the blocks of its longest cached prefix; then all its blocks are touched, last
    to first, so that a prompt's tail leaves the cache before its head (the order in which engines
    free blocks).
    """
    capacity = float("inf") if cache_tokens is None else int(cache_tokens) // prefix.block_tokens
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    bounds, ids = prefix.offsets.tolist(), prefix.ids.tolist()
    for low, high in zip(bounds, bounds[1:], strict=False):
        row = ids[low:high]
        for block in row:
            if block not in cached:
                break
            hits += 1
        for block in reversed(row):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / len(ids) if ids else 0.0


def _spread(values: np.ndarray) -> dict:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }


def statistics(w: Workload) -> dict:
    """Return rows, rate (requests/s over the span of the arrivals), lengths (tokens) and bursts.
    With prefix blocks, also the block hit rate of LRU caches of CACHE_TOKENS and of an unlimited
    one."""
    known, span = w.known_arrivals_s, w.span_s
    moments, together = np.unique(known, return_counts=True)
    gaps = np.diff(known)
    out = {
        "rows": len(w),
        "closed_loop_rows": len(w) - len(known),
        "groups": len(w.group_names),
        "concurrency": w.concurrency,
        "best_effort_rows": int((w.service_class == 1).sum()),
        "first_arrival_s": float(known[0]) if len(known) else 0.0,
        "span_s": span,
        "rate_per_s": len(known) / span if span > 0 else float("nan"),
        "gap_cv": float(gaps.std() / gaps.mean()) if span > 0 else float("nan"),
        "arrival_moments": len(moments),
        "per_moment": {
            "mean": float(together.mean()) if len(moments) else 0.0,
            "max": int(together.max()) if len(moments) else 0,
        },
        "prompt_tokens": _spread(w.prompt_tokens),
        "output_tokens": _spread(w.output_tokens),
        "total_tokens": int(w.prompt_tokens.sum() + w.output_tokens.sum()),
    }
    if w.prefix is not None:
        out["block_tokens"] = w.prefix.block_tokens
        out["prompt_blocks"] = len(w.prefix.ids)
        out["distinct_blocks"] = w.prefix.distinct
        rates = {str(c): lru_hit_rate(w.prefix, c) for c in CACHE_TOKENS}
        out["lru_hit_rate"] = {**rates, "unlimited": lru_hit_rate(w.prefix)}
    return out
