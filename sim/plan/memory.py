"""The prediction of online KV memory against what was held later.

Source: Wang et al., "Echo: Efficient Co-Scheduling of Hybrid Online-Offline Tasks for Large
Language Model Serving", Sec. 5.3.
"""

from __future__ import annotations

import numpy as np
import pandas as pd


def predicted_memory(
    steps: pd.DataFrame, sigmas: float, history_s: float, sample_s: float, ahead_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] blocks predicted, int64[n] blocks held `ahead_s` later) of one replica's steps, for
    every sample that has a full history before it; n is 0 in a run that is too short.

    The prediction is mu + sigmas * sigma of samples taken every `sample_s` seconds for `history_s`
    seconds, in whole blocks, as the threshold of policy `echo` has it."""
    window, ahead = round(history_s / sample_s), round(ahead_s / sample_s)
    held = _held(steps, sample_s)
    if len(held) < window + ahead:
        return held[:0], held[:0]
    # Sums of whole numbers are exact; around the mean their squares stay small.
    middle = int(held.mean())
    around = held - middle
    sums, squares = (np.concatenate([[0], np.cumsum(v)]) for v in (around, around * around))
    s, q = sums[window:] - sums[:-window], squares[window:] - squares[:-window]
    deviation = np.sqrt(window * q - s * s) / window
    predicted = np.ceil((s + window * middle) / window + sigmas * deviation).astype(np.int64)
    later = held[window - 1 + ahead :]
    return predicted[: len(later)], later


def _held(steps: pd.DataFrame, sample_s: float) -> np.ndarray:
    """int64[n]: blocks that online requests hold at 0, sample_s, ...; none while no step runs."""
    start, end = steps.start_s.to_numpy(np.float64), steps.end_s.to_numpy(np.float64)
    at = np.arange(0.0, float(end[-1]), sample_s)
    step = np.searchsorted(start, at, side="right") - 1
    runs = (step >= 0) & (at < end[step])
    return np.where(runs, steps.kv_rt_blocks.to_numpy(np.int64)[step], 0)
