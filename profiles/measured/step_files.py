"""Recorded engine steps from a file, for fits.

Parquet: what `twinserve calibrate --raw` wrote. CSV, by header:
- `seconds`, `decode_requests`, `decode_context` (resident tokens, all decodes), and where known
  `decode_context_max`, `prefill_tokens`, `prefill_resident` (one prompt a step);
- a scheduler's log: `step_interval_ms`, `next_decode_reqs`, `next_prefill_tokens`,
  `kv_blocks_used`, `running`, and where steps were sampled `gap_steps` (only rows with 1 are used).
  Half of each running request's last block counts as filled.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.errors import worded
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.specs import ProfileError

BLOCK_TOKENS = 16
_COUNTS = (
    "decode_requests",
    "decode_context",
    "decode_context_max",
    "prefill_tokens",
    "prefill_resident",
)
_LOGGED = (
    "step_interval_ms",
    "next_decode_reqs",
    "next_prefill_tokens",
    "kv_blocks_used",
    "running",
)
_MOST = 2.0**53  # beyond it a float is no count


def read_steps(
    path: str | Path, model: str | None = None
) -> tuple[list[StepComposition], np.ndarray]:
    """(steps, float64[m] seconds). `model`: only rows whose `model` column contains it, in any
    case.

    ProfileError, one line, for a file that is none of these or holds no step.
    """
    if str(path).endswith(".parquet"):
        from twinserve.profiles.measured.samples import read_samples, settled

        samples = settled(read_samples(path).steps)
        steps, seconds = [s.work for s in samples], [s.seconds for s in samples]
    else:
        steps, seconds = _from_csv(Path(path), model)
    if not steps:
        raise ProfileError(
            f"{path}: no usable steps{f' of model {model!r}' if model else ''}; check the file "
            "and the filter"
        )
    times = np.asarray(seconds, np.float64)
    if not (np.isfinite(times) & (times > 0)).all():
        row = int(np.argmin(np.isfinite(times) & (times > 0)))
        raise ProfileError(f"{path}: step {row + 1} takes {times[row]} s; remove it")
    return steps, times


def _from_csv(path: Path, model: str | None) -> tuple[list[StepComposition], list[float]]:
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or worded(error)[:120]
        raise ProfileError(f"{path}: cannot be read ({why})") from None
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes the first cells for names then
        raise ProfileError(f"{path}: rows have more cells than the header; fix the header")
    if model is not None:
        if "model" not in table:
            raise ProfileError(f"{path}: has no column 'model' to choose {model!r} by")
        table = table[table.model.astype(str).str.lower().str.contains(model.lower(), regex=False)]
    if "gap_steps" in table:  # the last row of a log has no step after it
        gaps = pd.to_numeric(table.gap_steps.fillna(0), errors="coerce")
        table = table.assign(gap_steps=table.gap_steps.where(gaps.isna(), gaps))
        _numbers(path, table, "gap_steps")
        table = table[gaps == 1]
    for name in [name for name in (*_COUNTS, *_LOGGED, "seconds") if name in table]:
        table = table.assign(**{name: _numbers(path, table, name)})
    if {*_LOGGED} <= {*table}:
        held = table.kv_blocks_used * BLOCK_TOKENS - BLOCK_TOKENS // 2 * table.running
        context = np.maximum(held - table.next_prefill_tokens, 0) * (table.next_decode_reqs > 0)
        table = pd.DataFrame(
            {
                "seconds": table.step_interval_ms / 1e3,
                "decode_requests": table.next_decode_reqs,
                "decode_context": context,
                "prefill_tokens": table.next_prefill_tokens,
            }
        )
    missing = {"seconds", "decode_requests", "decode_context"} - {*table}
    if missing:
        raise ProfileError(
            f"{path}: no column {sorted(missing)[0]!r}; docs/profiles.md lists what a file of "
            "steps needs"
        )
    for name in ("decode_context_max", "prefill_tokens", "prefill_resident"):
        if name not in table:
            table = table.assign(**{name: 0})
    wrong = ~table.seconds.gt(0)
    if wrong.any():
        row = wrong.idxmax()
        raise ProfileError(f"{path}: row {row + 1} takes {table.seconds[row]:g} s; remove it")
    steps = [
        StepComposition(
            n,
            context,
            longest,
            np.array([new][:new], np.int64),
            np.array([resident][:new], np.int64),
        )
        for n, context, longest, new, resident in table[list(_COUNTS)]
        .astype(np.int64)
        .itertuples(index=False)
    ]
    return steps, table.seconds.tolist()


def _numbers(path: Path, table: pd.DataFrame, name: str) -> pd.Series:
    """A column as numbers from 0 up. Raises ProfileError with the first row (from 1, below the
    header) that has none."""
    found = pd.to_numeric(table[name], errors="coerce").astype(np.float64)
    wrong = ~found.between(0, _MOST)
    if wrong.any():
        row = wrong.idxmax()
        given = table[name][row]
        said = "is missing" if pd.isna(given) else f"is {str(given)[:40]!r}, no number from 0 up"
        raise ProfileError(f"{path}: row {row + 1}: {name} {said}; fix or remove the row")
    return found
