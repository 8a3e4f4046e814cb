"""Reduces an original trace to the few tables that its embedded replica is drawn from.

    python -m twinserve.traces.generators.fit_replica ORIGINAL traces/data/TABLES.json

No row of the original survives. Kept are quantiles of the marginals, how often a prompt continues
an earlier one, after how long, and how much it grows. `replica.py` describes how a replica is
drawn.
"""

import json
import sys

import numpy as np

from twinserve.traces.readers.formats import read_file
from twinserve.traces.workload import Workload

# Knots crowd towards 1: a length's mean and p99 live in its upper tail.
KNOTS = np.concatenate(
    [np.linspace(0, 0.96, 49), np.linspace(0.965, 0.995, 7), [0.9975, 0.999, 1.0]]
)
COARSE = np.array([0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0])
CLASS_EDGES = (4, 8, 16, 32, 64, 128)  # blocks of the whole prompt


def quantiles(values: np.ndarray, at: np.ndarray = KNOTS) -> list[float]:
    return [round(float(v), 3) for v in np.quantile(values, at)]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's coefficient; ties keep row order, which is immaterial at thousands of rows."""
    ranks = [np.argsort(np.argsort(x, kind="stable")) for x in (a, b)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 3)


def lineage(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Per row: its leading blocks seen before, and the row that last touched the last of them (or
    -1)."""
    seen_by: dict[int, int] = {}
    depth, parent = np.zeros(len(w), np.int64), np.full(len(w), -1)
    for row in range(len(w)):
        blocks = w.prefix.of(row).tolist()
        known = 0
        while known < len(blocks) and blocks[known] in seen_by:
            known += 1
        depth[row] = known
        if known:
            parent[row] = seen_by[blocks[known - 1]]
        seen_by.update(dict.fromkeys(blocks, row))
    return depth, parent


def fit_mooncake(w: Workload) -> dict:
    """Tables for a trace with ticks (arrivals as recorded) whose prompts share prefixes."""
    depth, parent = lineage(w)
    child = depth > 1  # one block, the system prompt, is shared by all
    blocks = np.diff(w.prefix.offsets)
    growth = (blocks - depth)[child]
    gap_s = (w.arrival_s - w.arrival_s[parent])[child]
    classes = np.digitize(blocks[child], CLASS_EDGES)
    each = range(len(CLASS_EDGES) + 1)
    log_gap = np.log(np.maximum(gap_s, 1.0))
    log_gap -= log_gap.mean()
    ticks, per_tick = np.unique(w.arrival_s, return_counts=True)
    return {
        "kind": "prefix-sessions",
        "rows": len(w),
        "block_tokens": w.prefix.block_tokens,
        "ticks": len(ticks),
        "tick_s": round(float(np.median(np.diff(ticks))), 3),
        "tick_jitter_s": round(float(np.std(np.diff(ticks))), 6),
        "knots": KNOTS.round(6).tolist(),
        "coarse_knots": COARSE.tolist(),
        "per_tick": quantiles(per_tick),
        "tick_level": [round(float(x.mean()), 3) for x in np.array_split(per_tick, 12)],
        "child_share": [round(float(x.mean()), 4) for x in np.array_split(child, 20)],
        "prompt_fresh": quantiles(w.prompt_tokens[~child]),
        "prompt_child": quantiles(w.prompt_tokens[child]),
        "output": quantiles(w.output_tokens),
        "rank_correlation": rank_correlation(w.prompt_tokens, w.output_tokens),
        "gap_s": quantiles(gap_s),
        "gap_factor": [round(float(np.exp(np.mean(log_gap[classes == k]))), 3) for k in each],
        "class_edges": list(CLASS_EDGES),
        "growth_blocks": [quantiles(growth[classes == k], COARSE) for k in each],
    }


def fit_plain(w: Workload) -> dict:
    """Tables for a trace of arrivals and lengths alone."""
    edges = np.linspace(0, w.last_arrival_s, 60)
    per_minute = np.histogram(w.arrival_s, edges)[0]
    # Gaps on a clock that runs with the rate: its slow swings are kept apart, in `level`.
    clock = np.interp(w.arrival_s, edges, np.concatenate([[0], np.cumsum(per_minute)]))
    gaps = np.diff(clock) * (w.last_arrival_s / clock[-1])
    return {
        "kind": "plain",
        "rows": len(w),
        "knots": KNOTS.round(6).tolist(),
        "gap_s": [round(float(v), 6) for v in np.quantile(gaps, KNOTS)],
        "span_s": round(float(w.last_arrival_s), 3),
        "level": [round(float(v), 4) for v in per_minute / per_minute.mean()],
        "prompt": quantiles(w.prompt_tokens),
        "output": quantiles(w.output_tokens),
        "rank_correlation": rank_correlation(w.prompt_tokens, w.output_tokens),
    }


def main(source: str, target: str) -> None:
    w = read_file(source)
    tables = fit_mooncake(w) if w.prefix is not None else fit_plain(w)
    with open(target, "w", encoding="utf-8") as out:
        json.dump(tables, out, indent=None, separators=(",", ":"))
        out.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
