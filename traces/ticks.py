"""Arrivals recorded in coarse ticks, spread over the time that a tick stands for.

Mooncake's traces stamp requests every three seconds, ten at once on average: replayed as they are,
every tick is a burst that never happened.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinserve.traces.workload import Workload

MIN_TICKS, MIN_ROWS_PER_TICK, MIN_TICK_S = 16, 2.0, 0.5


def find_tick(arrival_s: np.ndarray) -> float | None:
    """Return the seconds between the ticks that arrivals fall on, or None if arrivals do not look
    quantised.

    Quantised: at least 16 moments with 2 rows each on average; nine in ten of the gaps between
    moments within 5 % of a multiple of their median; and that median at least half a second.
    """
    known = arrival_s[~np.isnan(arrival_s)]
    moments = np.unique(known)
    if len(moments) < MIN_TICKS or len(known) < MIN_ROWS_PER_TICK * len(moments):
        return None
    gaps = np.diff(moments)
    tick = float(np.median(gaps))
    if tick < MIN_TICK_S:
        return None
    off = np.abs(gaps / tick - np.maximum(np.rint(gaps / tick), 1))
    return tick if np.mean(off < 0.05) >= 0.9 else None


def spread_ticks(w: Workload, seed: int = 0) -> Workload:
    """Arrivals drawn uniformly within their tick, rows keeping their order; unchanged if nothing is
    quantised.
    """
    tick = find_tick(w.arrival_s)
    if tick is None:
        return w
    known = ~np.isnan(w.arrival_s)
    moments, tick_of = np.unique(w.arrival_s[known], return_inverse=True)
    width = np.minimum(np.append(np.diff(moments), tick), tick)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x71C,)))
    share = rng.random(len(tick_of))
    share = share[np.lexsort((share, tick_of))]  # rows are sorted, so tick by tick
    arrival = w.arrival_s.copy()
    arrival[known] = moments[tick_of] + share * width[tick_of]
    done = f"spread-ticks(tick={tick:g}s, seed={seed})"
    return replace(w, arrival_s=arrival, provenance=w.provenance.then(done))
