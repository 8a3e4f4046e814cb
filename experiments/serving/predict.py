"""Another load predicted from a benchmark file: both loads by turns on one server, a profile from
each file of the first, and its prediction of the second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.experiments.serving.server import (
    METRICS,
    any_cpu,
    bench,
    calibrate,
    engine_arguments,
    predicted,
    serving,
    write_small,
)
from twinserve.sim.twin.served import of_measurement
from twinserve.traces.readers.formats import read_measurement

LENGTHS = {"random_range_ratio": 0.6, "num_prompts": 40}
SEEN = {"request_rate": 5, "random_input_len": 60, "random_output_len": 14, **LENGTHS}
OTHER = {"request_rate": 8, "random_input_len": 110, "random_output_len": 9, **LENGTHS}


def predict(folder: Path, repeats: int, say: Callable[[str], None]) -> pd.DataFrame:
    """A row for each repeat and metric: its mean of `OTHER` in ms, predicted from a file of `SEEN`
    alone, and measured. NaN if the file gave no profile. folder: new.

    LiveEngineError if the server fails."""
    model = write_small(folder)
    begin = any_cpu(model, folder / "any.json")
    with serving(folder / "server", model, engine_arguments()) as server:
        for number in range(repeats):
            say(f"loads {number + 1} of {repeats}")
            bench(server, folder / f"seen{number}.json", SEEN, 11 + number)
            bench(server, folder / f"other{number}.json", OTHER, 21 + number)
    rows = []
    for number in range(repeats):
        say(f"calibrates {number + 1} of {repeats}")
        profile = folder / f"mine{number}.json"
        told = np.full(len(METRICS), np.nan)
        if calibrate([folder / f"seen{number}.json"], begin, profile):
            told = 1e3 * predicted(profile, OTHER, 21 + number)
        means = 1e3 * measured(folder / f"other{number}.json")
        rows += [
            {"repeat": number, "metric": name, "predicted_ms": ours, "measured_ms": theirs}
            for name, ours, theirs in zip(METRICS, told, means, strict=True)
        ]
    return pd.DataFrame(rows)


def measured(file: Path) -> np.ndarray:
    """float64[3]: means of METRICS in a file of `vllm bench serve`, seconds."""
    found = of_measurement(read_measurement(file))
    return np.array([np.nanmean(found.latencies[name]) for name in METRICS])
