"""What runs gain over a baseline, paired: each run beside the one of the same seed and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

# how a gain is counted, of a run's value and the baseline's
KINDS = {
    "ratio": lambda mine, theirs: mine / theirs,
    "change": lambda mine, theirs: mine / theirs - 1.0,
    "difference": lambda mine, theirs: mine - theirs,
    "factor": lambda mine, theirs: theirs / mine,
    "saving": lambda mine, theirs: theirs - mine,
    "baseline": lambda mine, theirs: theirs,
}
Gains = Mapping[str, tuple[str, str]]  # new column -> column that is compared, one of KINDS


def baseline_of(rows: pd.DataFrame, base: pd.DataFrame, pair: Sequence[str]) -> pd.DataFrame:
    """For each of `rows` the row of `base` with the same values in the columns `pair`; nan where
    there is none. Raises ValueError if `base` has two for one of them."""
    keys = pd.MultiIndex.from_frame(base[list(pair)])
    wanted = pd.MultiIndex.from_frame(rows[list(pair)])
    return base.set_axis(keys, axis=0).reindex(wanted).set_axis(rows.index, axis=0)


def told(gain: float, half: float, words: tuple[str, str, str], neutral: float = 0.0) -> str:
    """One of `words` (above, below, open): on which side of `neutral` the whole interval is.

    An interval that is not there (nan, of a single seed) tells nothing.
    """
    above, below, open_ = words
    return above if gain - half > neutral else below if gain + half < neutral else open_
