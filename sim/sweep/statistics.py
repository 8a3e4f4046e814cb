"""Means over seeds, with their confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pandas as pd


def interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return mean and half width of its Student interval; half width nan for a single value."""
    found = np.asarray(list(values), float)
    if len(found) < 2:
        return float(found.mean()), float("nan")
    half = _student(confidence, len(found)) * found.std(ddof=1) / np.sqrt(len(found))
    return float(found.mean()), float(half)


@cache
def _student(confidence: float, count: int) -> float:
    """Return the interval's half width in standard errors, cached for tables."""
    from scipy import special  # the workers of a grid need none; scipy.stats takes a second

    return float(special.stdtrit(count - 1, 0.5 + confidence / 2))


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return a row for each combination of `by`, in order of appearance: the mean of each of
    `values`, and the half width as NAME_ci."""
    rows = []
    for keys, group in frame.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, keys if isinstance(keys, tuple) else (keys,), strict=True)) | {
            "seeds": len(group)
        }
        for name in values:
            row[name], row[f"{name}_ci"] = interval(group[name])
        rows.append(row)
    return pd.DataFrame(rows)
