"""Find the step measurements that other programs disturbed.

Two things are looked for, since a step that others delay shows one of them or both:

- *lost*: the engine's thread was off its core for more than LOST of the step, by wall time less CPU
  time. Known of engines of one CPU thread.
- *slowed*: it kept its core, and took longer all the same. The process on the other core of a
  pair, or the memory's bandwidth, shows only in the steps. So each is compared with the fastest
  tenth of the same work. The median over WINDOW steps on end decides: disturbances last for many
  steps, jitter does not.

An evenly slowed machine looks like a slower one. The supporting measurements are in
docs/calibrate.md.
"""

import numpy as np

LOST = 0.05  # share of a step's wall time
SLOWED = 1.25  # times the fastest tenth of the same work; more on an engine that jitters more
WINDOW = 11  # steps
_FASTEST = 0.1  # the quantile that the same work is laid beside
NOISY = 0.1  # of the measured time: reports say so above this
_SEGMENT = 50  # steps over which an engine's own jitter is taken
# A sample of jitter s lies 1.3 s above the fastest tenth, a median of WINDOW of them has a standard
# deviation of 0.4 s: five of these.
_JITTERS = 3.2
_LEAST = 4


def lost(seconds: np.ndarray, off_core_s: np.ndarray) -> np.ndarray:
    """bool[n]: others had the core. seconds, off_core_s: float64[n], wall time and the part of it
    without a core (NaN: not known, and then not lost)."""
    return np.nan_to_num(off_core_s) > LOST * seconds


def slowdown(ratio: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """float64[n]: median of `ratio` over the WINDOW steps around each, of those that are `counted`
    (bool[n]); NaN if none is. ratio: float64[n], in order of time; NaN: not known."""
    if not len(ratio):
        return np.zeros(0)
    half = WINDOW // 2
    padded = np.pad(np.where(counted, ratio, np.nan), half, constant_values=np.nan)
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1)
    known = np.count_nonzero(~np.isnan(windows), axis=1)  # NaN is sorted to the end
    rows = np.arange(len(ratio))
    return (windows[rows, np.maximum(known - 1, 0) // 2] + windows[rows, known // 2]) / 2


def disturbed(
    work: np.ndarray, seconds: np.ndarray, off_core_s: np.ndarray, least: int = _LEAST
) -> np.ndarray:
    """bool[n]: lost or slowed. work: int64[n], equal for repeats of the same work; the steps in
    the order in which they were measured. least: calm measurements of some work, below which
    nothing is said of it."""
    away = lost(seconds, off_core_s)
    on_core = seconds - np.nan_to_num(off_core_s)
    return disturbed_beside(on_core / _levels(work, on_core, ~away, least), away)


def disturbed_beside(ratio: np.ndarray, away: np.ndarray) -> np.ndarray:
    """bool[n]: lost or slowed. ratio: float64[n], time on the core over what the same work takes
    when it is calm (NaN: not known), in order of time; away: bool[n], what lost its core."""
    bound = max(SLOWED, float(np.exp(_JITTERS * jitter(ratio[~away]))))
    return away | (slowdown(ratio, ~away) > bound)


def jitter(ratio: np.ndarray) -> float:
    """Return the engine's own jitter: a standard deviation of log(ratio) in the calmest tenth of
    the segments. It comes from differences of neighbours, which lasting disturbances do not change.
    0: too few steps. ratio: float64[n], in order of time; NaN: not known."""
    ratio = ratio[~np.isnan(ratio)]
    apart = np.abs(np.diff(np.log(ratio)))
    segments = len(apart) // _SEGMENT
    if not segments:
        return 0.0
    medians = np.median(apart[: segments * _SEGMENT].reshape(segments, _SEGMENT), axis=1)
    # of a normal distribution: 0.954 standard deviations of one, as it is the difference of two
    return float(np.quantile(medians, _FASTEST)) / 0.954


def _levels(work: np.ndarray, seconds: np.ndarray, calm: np.ndarray, least: int) -> np.ndarray:
    """float64[n]: the fastest tenth of the calm measurements of the same work; NaN: too few."""
    level = np.full(len(work), np.nan)
    order = np.argsort(work, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(work[order])) + 1):
        of_work = seconds[rows[calm[rows]]] if len(rows) else rows
        if len(of_work) >= least:
            level[rows] = np.quantile(of_work, _FASTEST)
    return level
