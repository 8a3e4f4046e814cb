"""Means over seeds, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pandas as pd


def interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and half width of Student's interval for it; half width nan for a single value."""
    found = np.asarray(list(values), float)
    if len(found) < 2:
        return float(found.mean()), float("nan")
    half = _student(confidence, len(found)) * found.std(ddof=1) / np.sqrt(len(found))
    return float(found.mean()), float(half)


@cache
def _student(confidence: float, count: int) -> float:
    """Half width of the interval in standard errors; tables ask it again for each number."""
    from scipy import special  # the workers of a grid need none; scipy.stats takes a second

    return float(special.stdtrit(count - 1, 0.5 + confidence / 2))


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """A row for each combination of `by`, as they appear: the mean of each of `values` and, as
    NAME_ci, the half width."""
    rows = []
    for keys, group in frame.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, keys if isinstance(keys, tuple) else (keys,), strict=True)) | {
            "seeds": len(group)
        }
        for name in values:
            row[name], row[f"{name}_ci"] = interval(group[name])
        rows.append(row)
    return pd.DataFrame(rows)
