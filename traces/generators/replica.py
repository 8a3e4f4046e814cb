"""Synthetic stand-ins for public traces, drawn from small tables fitted to the originals
(fit_replica.py).

They exist so that a run by name works without a network. A replica keeps of Mooncake's conversation
trace the number of rows, the ticks with their requests, the marginals of both lengths, and the
prefix tree. The tree grows as conversations do. A request opens a prompt (sharing only the system
block), or continues a prompt seen `gap` seconds ago and adds `growth` blocks. The reuse distances,
hence the hit rates of an LRU cache of any size, follow from the gaps and depths. Drawing is
stratified: each table is walked once in random order, so quantiles hardly depend on the seed.
"""

import json
from functools import cache
from importlib import resources

import numpy as np

from twinserve.traces.prefix import concatenate_ids
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload

FILES = {
    "mooncake:conversation": "mooncake_conversation.json",
    "azure-2023:conv": "azure_2023_conv.json",
}
# How much a mismatch of the gap counts against one of the shared depth, both as log ratios.
GAP_WEIGHT = 0.3


@cache
def tables(name: str) -> dict:
    """The fitted tables of a replica. Raises KeyError where none is embedded."""
    source = resources.files("twinserve.traces.data") / FILES[name]
    return json.loads(source.read_text(encoding="utf-8"))


def replica(name: str, seed: int = 0) -> Workload:
    """The replica of a named trace: same seed, same bytes. KeyError where none is embedded."""
    t = tables(name)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x7E,)))
    w = _with_prefix_tree(t, rng) if t["kind"] == "prefix-sessions" else _plain(t, rng)
    return Workload.build(*w[:3], prefix=w[3], provenance=Provenance(name, replica=True))


def _stratified(rng, n: int) -> np.ndarray:
    """n evenly spaced points from 0 to 1, both included, in random order."""
    return rng.permutation(n) / max(n - 1, 1)


def _correlated(rng, u: np.ndarray, rho: float) -> np.ndarray:
    """Stratified points whose ranks correlate with those of u by about rho."""
    score = rho * _ranks(u) / len(u) + np.sqrt(1 - rho**2) * rng.random(len(u))
    return _ranks(score) / max(len(u) - 1, 1)


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def _lengths(u: np.ndarray, t: dict, column: str) -> np.ndarray:
    return np.maximum(np.rint(np.interp(u, t["knots"], t[column])), 1).astype(np.int64)


def _plain(t: dict, rng):
    n = t["rows"]
    gaps = np.interp(_stratified(rng, n - 1), t["knots"], t["gap_s"])
    # Slow swings of the rate: time runs faster where the original had more arrivals a minute.
    clock = np.concatenate([[0.0], np.cumsum(gaps)])
    clock *= t["span_s"] / clock[-1]
    level = np.concatenate([[0.0], np.cumsum(t["level"])])
    edges = np.linspace(0, t["span_s"], len(level))
    arrival = np.interp(clock, level * (t["span_s"] / level[-1]), edges)
    u = _stratified(rng, n)
    output = _lengths(_correlated(rng, u, t["rank_correlation"]), t, "output")
    return arrival, _lengths(u, t, "prompt"), output, None


def _tick_arrivals(t: dict, rng) -> np.ndarray:
    """Seconds, sorted; rows of one tick share one value, as recorded traces have it."""
    ticks, n = t["ticks"], t["rows"]
    counts = np.sort(np.rint(np.interp(_stratified(rng, ticks), t["knots"], t["per_tick"])))
    level = np.repeat(t["tick_level"], -(-ticks // len(t["tick_level"])))[:ticks]
    # Busy ticks fall where the level is high: counts go out by a score of level and noise.
    score = level + rng.normal(0, np.std(counts), ticks)
    per_tick = np.empty(ticks, np.int64)
    per_tick[np.argsort(score, kind="stable")] = counts
    excess = int(per_tick.sum()) - n
    movable = np.flatnonzero((per_tick > 1) & (per_tick < per_tick.max() - 1))
    per_tick[rng.choice(movable, abs(excess), replace=False)] -= np.sign(excess)
    at = np.arange(ticks) * t["tick_s"] + np.cumsum(rng.normal(0, t["tick_jitter_s"] / 2, ticks))
    return np.repeat(np.rint((at - at[0]) * 1000) / 1000, per_tick)


def _with_prefix_tree(t: dict, rng):
    n, block = t["rows"], t["block_tokens"]
    arrival = _tick_arrivals(t, rng)
    share = np.array(t["child_share"])
    wish = _stratified(rng, n) < np.repeat(share, -(-n // len(share)))[:n]
    wish &= arrival > 0  # the first tick has nothing to continue
    u = np.empty(n)
    u[wish], u[~wish] = _stratified(rng, int(wish.sum())), _stratified(rng, int((~wish).sum()))
    prompt = np.where(wish, _lengths(u, t, "prompt_child"), _lengths(u, t, "prompt_fresh"))
    output = _lengths(_correlated(rng, u, t["rank_correlation"]), t, "output")
    blocks = -(-prompt // block)

    rows = np.flatnonzero(wish)
    classes = np.digitize(blocks[rows], t["class_edges"])
    growth = np.empty(len(rows), np.int64)
    for k, column in enumerate(t["growth_blocks"]):
        of = classes == k
        growth[of] = np.rint(np.interp(_stratified(rng, int(of.sum())), t["coarse_knots"], column))
    depth = np.minimum(np.maximum(blocks[rows] - growth, 2), blocks[rows])
    # A gap longer than the trace is old cannot have been seen: draw within what was possible.
    possible = np.interp(arrival[rows], t["gap_s"], t["knots"])
    gap = np.interp(_stratified(rng, len(rows)) * possible, t["knots"], t["gap_s"])
    gap = np.maximum(gap * np.array(t["gap_factor"])[classes], t["tick_s"])
    parent, depth = _match_parents(rows, depth, gap, arrival, blocks)
    return arrival, prompt, output, _grow_tree(n, block, blocks, rows, parent, depth)


def _match_parents(rows, depth, gap, arrival, blocks):
    """For every continuing row an earlier row to continue, and the blocks that they share.

    The best candidate came about `gap` before and is one block longer than `depth`: a prompt's last
    block is partly filled and does not survive the next turn. Rows already continued are passed
    over while they can be.
    """
    size, stamp = np.log(np.maximum(blocks - 1, 1)), arrival
    continued = np.zeros(len(blocks))
    parents, depths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    high = np.searchsorted(stamp, arrival[rows])
    low = np.minimum(np.searchsorted(stamp, arrival[rows] - 2.5 * gap), high - 1)
    for k in range(len(rows)):
        lo, hi, want = low[k], high[k], np.log(depth[k])
        miss = size[lo:hi] - want
        cost = np.where(miss < -1e-9, -3.0 * miss, 0.5 * miss)
        cost = cost + GAP_WEIGHT * np.abs(np.log((arrival[rows[k]] - stamp[lo:hi]) / gap[k]))
        best = lo + int(np.argmin(cost + continued[lo:hi]))
        continued[best] += 2.0
        parents[k], depths[k] = best, min(depth[k], max(blocks[best] - 1, 1))
    return parents, depths


def _grow_tree(n, block, blocks, rows, parent, depth) -> PrefixBlocks:
    """Return ids: those shared with the parent, then new ones; 0 is the first of every row."""
    parent_of, depth_of = np.full(n, -1), np.ones(n, np.int64)
    parent_of[rows], depth_of[rows] = parent, depth
    own: list[np.ndarray] = []
    fresh, root = 1, np.zeros(1, np.int64)
    for row in range(n):
        shared = own[parent_of[row]][: depth_of[row]] if parent_of[row] >= 0 else root
        new = int(blocks[row]) - len(shared)
        own.append(np.concatenate([shared, np.arange(fresh, fresh + new)]))
        fresh += new
    return concatenate_ids(own, block)
