"""Whether steps at a full batch grow longer with the scheduler's CPU time, or through a run: what
the measurements at hand can tell.

Two things might make steps of an overloaded engine climb at the same batch. They are host work that
no step hides, and time itself (clocks that fall, memory that fragments). Each would be a
coefficient, like batch and context, in a regression over measured steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtrit  # scipy.stats takes a second

from twinserve.experiments.validation.events import read_events
from twinserve.experiments.validation.runs import Case, model_of, profile_of, read_run
from twinserve.experiments.validation.step_times import step_times

FULL = 80  # decoding requests, where the scheduler of the H100 steps takes 4 to 6 ms of CPU time
FULL_RUN = 100  # of the runs' 128 seats
MINUTE_MS = 60_000.0


def regression(columns: Mapping[str, np.ndarray], ms: np.ndarray) -> dict[str, dict[str, float]]:
    """Least squares of `ms` (float64[n]) on the columns and a constant. For each column its
    coefficient, the half width of its 95 % interval, and the largest effect in the sample. That is
    the column's range from its 5th to 95th percentile times the interval's upper end."""
    table = np.column_stack([np.ones(len(ms)), *columns.values()])
    found, *_ = np.linalg.lstsq(table, ms, rcond=None)
    freedom = len(ms) - table.shape[1]
    variance = float(np.sum(np.square(ms - table @ found))) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(table.T @ table)))
    half = errors * stdtrit(freedom, 0.975)
    return {
        name: {
            "slope": float(found[i]),
            "half": float(half[i]),
            "most_ms": float((found[i] + half[i]) * np.ptp(np.percentile(values, (5, 95)))),
        }
        for i, (name, values) in enumerate(columns.items(), start=1)
    }


def of_steps(path: Path) -> list[dict]:
    """Regress decode steps of FULL and more requests on batch, KV in use, CPU time of scheduling
    and time in the run. For each model of a scheduler's log (sampled steps of vLLM)."""
    steps = pd.read_csv(path)
    steps = steps[(steps.gap_steps == 1) & (steps.next_prefill_tokens == 0)]
    found = []
    for model, part in steps[steps.next_decode_reqs >= FULL].groupby("model"):
        columns = {
            "request": part.next_decode_reqs.to_numpy(float),
            "1,000 KV blocks": part.kv_blocks_used.to_numpy(float) / 1000,
            "ms of scheduling": part.sched_duration_us.to_numpy(float) / 1000,
            "minute": part.t_start_ms.to_numpy(float) / MINUTE_MS,
        }
        slopes = regression(columns, part.step_interval_ms.to_numpy(float))
        found.append(
            {
                "run": str(model),
                "steps": len(part),
                "step_ms": float(part.step_interval_ms.mean()),
                "scheduling_ms": float(columns["ms of scheduling"].mean()),
                "slopes": slopes,
            }
        )
    return found


def of_run(truth: Path, case: Case) -> dict | None:
    """The model's error (real - ours, ms) over stretches of FULL_RUN and more decodes, on batch,
    context and time in the run; None if the run has too few."""
    run = read_run(truth, case)
    profile = profile_of(run)
    table = step_times(run, read_events(run, profile), model_of(run, profile))
    full = table[(table.tokens == 0) & (table.decodes >= FULL_RUN)]
    if len(full) < 10:
        return None
    columns = {
        "request": full.decodes.to_numpy(float),
        "1,000 tokens of context": (full.decodes * full.context).to_numpy(float) / 1000,
        "minute": full.start_s.to_numpy(float) / 60,
    }
    slopes = regression(columns, (full.real_ms - full.ours_ms).to_numpy(float))
    mean = float(np.average(full.real_ms, weights=full.steps))
    return {"run": case.label, "steps": int(full.steps.sum()), "step_ms": mean, "slopes": slopes}
