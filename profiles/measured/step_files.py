"""Recorded engine steps from a file, for fits.

Parquet: what `twinserve calibrate --raw` wrote. CSV, by header:
- `seconds`, `decode_requests`, `decode_context` (resident tokens, all decodes), and where known
  `decode_context_max`, `prefill_tokens`, `prefill_resident` (one prompt a step);
- a scheduler's log: `step_interval_ms`, `next_decode_reqs`, `next_prefill_tokens`,
  `kv_blocks_used`, `running`, and where steps were sampled `gap_steps` (only rows with 1 are used).
  Half of each running request's last block counts as filled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.profiles.composition import StepComposition
from twinserve.profiles.specs import ProfileError

BLOCK_TOKENS = 16


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
        raise ProfileError(f"{path}: step {row} takes {times[row]} s; remove it")
    return steps, times


def _from_csv(path: Path, model: str | None) -> tuple[list[StepComposition], list[float]]:
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise ProfileError(f"{path}: cannot be read ({why})") from None
    if model is not None:
        if "model" not in table:
            raise ProfileError(f"{path}: has no column 'model' to choose {model!r} by")
        table = table[table.model.astype(str).str.lower().str.contains(model.lower(), regex=False)]
    if "gap_steps" in table:
        table = table[table.gap_steps == 1]
    if {
        "step_interval_ms",
        "next_decode_reqs",
        "next_prefill_tokens",
        "kv_blocks_used",
        "running",
    } <= {*table}:
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
    numbers = table[
        [
            "decode_requests",
            "decode_context",
            "decode_context_max",
            "prefill_tokens",
            "prefill_resident",
        ]
    ]
    if numbers.isna().any().any() or (numbers < 0).any().any():
        raise ProfileError(f"{path}: a count is missing or negative; fix or remove the row")
    steps = [
        StepComposition(
            n,
            context,
            longest,
            np.array([new][:new], np.int64),
            np.array([resident][:new], np.int64),
        )
        for n, context, longest, new, resident in numbers.astype(np.int64).itertuples(index=False)
    ]
    return steps, table.seconds.tolist()
