"""`calibrate --from-serving` on a real server: a file of `vllm bench serve` is all it is given."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import twinserve
from twinserve.experiments.serving.limit import (
    BLOCK_TOKENS,
    ENGINE,
    any_cpu,
    bench,
    calibrate,
    engine_arguments,
    serving,
    write_small,
)
from twinserve.sim.twin.served import of_measurement
from twinserve.traces.readers.formats import read_measurement

pytestmark = [pytest.mark.nightly, pytest.mark.live, pytest.mark.alone]

METRICS = ("ttft", "tpot", "e2el")
NEAR = 0.30  # for a machine that does other things; a quiet one's figures: docs/calibrate.md
TRIES = 3  # what else it does may change between a load and the next


LENGTHS = {"random_range_ratio": 0.6, "num_prompts": 40}
SEEN = {"request_rate": 5, "random_input_len": 60, "random_output_len": 14, **LENGTHS}
OTHER = {"request_rate": 8, "random_input_len": 110, "random_output_len": 9, **LENGTHS}


def predict(folder: Path, repeats: int) -> pd.DataFrame:
    """A row for each repeat and metric: its mean of `OTHER` in ms, predicted from a file of `SEEN`
    alone, and measured. NaN if the file gave no profile. folder: new.

    LiveEngineError if the server fails."""
    model = write_small(folder)
    begin = any_cpu(model, folder / "any.json")
    with serving(folder / "server", model, engine_arguments()) as server:
        for number in range(repeats):
            bench(server, folder / f"seen{number}.json", SEEN, 11 + number)
            bench(server, folder / f"other{number}.json", OTHER, 21 + number)
    rows = []
    for number in range(repeats):
        profile = folder / f"mine{number}.json"
        told = np.full(len(METRICS), np.nan)
        if calibrate([folder / f"seen{number}.json"], begin, profile):
            told = predicted(profile, OTHER, 21 + number)
        means = 1e3 * measured(folder / f"other{number}.json")
        rows += [
            {"repeat": number, "metric": name, "predicted_ms": ours, "measured_ms": theirs}
            for name, ours, theirs in zip(METRICS, told, means, strict=True)
        ]
    return pd.DataFrame(rows)


def predicted(profile: Path, load: dict, seed: int) -> list[float]:
    """Means of METRICS, ms, of the load as stated, on a calibrated profile and its front end."""
    front = profile.with_suffix(".front_end.json")
    run = twinserve.simulate(
        "vllm",
        "vllm:" + ",".join(f"{name}={value}" for name, value in load.items()),
        profile=str(profile),
        front_end=str(front) if front.exists() else "none",
        seed=seed,
        slo="none",
        host_time="none",
        block_tokens=BLOCK_TOKENS,
        **ENGINE,
    )
    return [run.summary["classes"]["rt"][f"mean_{name}_ms"] for name in METRICS]


def measured(file: Path) -> np.ndarray:
    """float64[3]: means of METRICS in a file of `vllm bench serve`, seconds."""
    found = of_measurement(read_measurement(file))
    return np.array([np.nanmean(found.latencies[name]) for name in METRICS])


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """By metric: mean prediction and mean measurement in ms; as shares of the latter, `error` of
    the prediction and `spread`, the farthest measured repeat from their mean."""
    by_metric = rows.groupby("metric", sort=False)
    found = by_metric[["predicted_ms", "measured_ms"]].mean()
    means = by_metric["measured_ms"].transform("mean")
    spread = (rows["measured_ms"] / means - 1).abs().groupby(rows["metric"]).max()
    error = found["predicted_ms"] / found["measured_ms"] - 1
    return found.assign(error=error, spread=spread).reset_index()


def test_another_load_is_predicted_from_one_file_of_a_servers_benchmark(vllm, tmp_path):
    """Means of another load within 30 %, or as near as two measurements of it are to each other."""
    seen = []
    for number in range(TRIES):
        found = errors(_predicted(tmp_path / str(number)))
        seen.append(found)
        if (found.error.abs() <= found.spread.clip(lower=NEAR)).all():
            return
    pytest.fail("\n".join(one.to_string() for one in seen))


def _predicted(folder):
    folder.mkdir()
    return predict(folder, 2)
