"""Files of recorded steps, made of a model of step times."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.profiles.composition import StepComposition

COLUMNS = "seconds decode_requests decode_context decode_context_max prefill_tokens model"


def write_steps(
    path: Path, seconds: Callable[[StepComposition], float], names: Iterable[str]
) -> Path:
    """One step of decodes for each of `names`, the model's name there; half of the steps have a
    prompt of 300 tokens, too."""
    rng, rows = np.random.default_rng(0), []
    for name in names:
        n, c = int(rng.integers(1, 128)), int(rng.integers(100, 2000))
        new = int(rng.integers(0, 2)) * 300
        work = StepComposition(n, n * c, c, np.array([new][:new], int), np.array([0][:new], int))
        rows.append((seconds(work), n, n * c, c, new, name))
    pd.DataFrame(rows, columns=COLUMNS.split()).to_csv(path, index=False)
    return path


def slower_host(model) -> Callable[[StepComposition], float]:
    """Steps of `model` on a host that takes 2 ms longer, and 10 us for each request."""
    return lambda work: (
        model.step_seconds(work) + 2e-3 + 1e-5 * (work.decode_requests + len(work.prefill_new))
    )
