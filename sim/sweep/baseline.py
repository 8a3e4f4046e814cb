"""Paired differences between a sweep's combinations and one of them, with tests."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from twinserve.policies.names import hint
from twinserve.sim.results.paths import text_of
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.one import REQUESTS
from twinserve.sim.sweep.repeats import Repeat
from twinserve.sim.sweep.statistics import interval

# how a gain is counted, of a run's value and the baseline's
KINDS = {
    "ratio": lambda mine, theirs: mine / theirs,
    "change": lambda mine, theirs: mine / theirs - 1.0,
    "per cent": lambda mine, theirs: 100 * (mine / theirs - 1),
    "difference": lambda mine, theirs: mine - theirs,
    "factor": lambda mine, theirs: theirs / mine,
    "saving": lambda mine, theirs: theirs - mine,
    "baseline": lambda mine, theirs: theirs,
}
Gains = Mapping[str, tuple[str, str]]  # new column -> column that is compared, one of KINDS


def baseline_of(rows: pd.DataFrame, base: pd.DataFrame, pair: Sequence[str]) -> pd.DataFrame:
    """Return, for each of `rows`, the row of `base` with the same values in the columns `pair`; nan
    if there is none. Raises ValueError if `base` has two."""
    keys = pd.MultiIndex.from_frame(base[list(pair)])
    wanted = pd.MultiIndex.from_frame(rows[list(pair)])
    return base.set_axis(keys, axis=0).reindex(wanted).set_axis(rows.index, axis=0)


def told(gain: float, half: float, words: tuple[str, str, str], neutral: float = 0.0) -> str:
    """Return one of `words` (above, below, open): the side of `neutral` on which the whole interval
    lies.

    Without an interval (nan, of a single seed) the answer is open.
    """
    above, below, open_ = words
    return above if gain - half > neutral else below if gain + half < neutral else open_


WORDS = ("significant", "significant", "not significant")


def read_baseline(text: str, axes: Sequence[str]) -> tuple[str, str]:
    """Return (setting, value) of `policy=vllm`. Raises SettingsError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    name = name.removeprefix("--").replace("-", "_")
    if not equals or name not in axes:
        raise SettingsError(
            f"--baseline {text}: write SETTING=VALUE of a setting that varies"
            f"{hint(name, list(axes))}: {', '.join(axes) or 'none does'}"
        )
    return name, value


def check_baseline(baseline: tuple[str, str], values: Sequence[object], repeat: Repeat) -> None:
    """Raise SettingsError if no run has the baseline, or each combination has one run of blocks."""
    name, value = baseline
    if repeat.blocks:
        raise SettingsError(
            f"--baseline {name}={value}: pairs of runs are compared, and --repeat {repeat} makes "
            "one run of each combination; use --repeat windows=5, or --seeds 5 if generated"
        )
    known = list(dict.fromkeys(map(text_of, values)))
    if value not in known:
        raise SettingsError(
            f"--baseline {name}={value}: no run has it{hint(value, known)}; there are "
            f"{', '.join(known)}"
        )


def differences(
    frame: pd.DataFrame, axes: Sequence[str], baseline: tuple[str, str], names: Sequence[str]
) -> pd.DataFrame:
    """Return differences.csv: a row for each combination but the baseline, and each of `names`. A
    row has the mean difference from the baseline's run with the same requests (seed or window). Its
    95 % interval (Student's) has a half width, and excludes 0 or not. `requests are the same`
    stands instead if all seeds have the same requests."""
    setting, value = baseline
    is_base = frame[setting].map(text_of) == value
    others = [name for name in axes if name != setting]
    pair = [*others, *(name for name in ("seed", "window") if name in frame and name not in axes)]
    base = frame[is_base]
    rows = []
    for keys, runs in frame[~is_base].groupby(list(axes), sort=False, dropna=False):
        theirs = baseline_of(runs, base, pair)
        copied = len(runs) > 1 and REQUESTS in runs and runs[REQUESTS].nunique() == 1
        for name in names:
            gains = (runs[name] - theirs[name]).dropna()
            if not len(gains):
                continue
            mean, half = interval(gains)
            verdict = "requests are the same" if copied else "one run" if len(gains) < 2 else None
            row = dict(zip(axes, keys, strict=True)) | {"number": name, "baseline": text_of(value)}
            row |= {"runs": len(gains), "difference": mean, "ci": np.nan if copied else half}
            rows.append(row | {"verdict": verdict or told(mean, half, WORDS)})
    return pd.DataFrame(rows)
