"""`calibrate --from-serving` on a real server: one file of `vllm bench serve` is all it is given,
and another load is predicted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.live.served_small import (
    METRICS,
    bench,
    engine_arguments,
    measured,
    predicted,
    start,
    write_small,
)
from twinserve.sim.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.live]

REPEATS = 3
LENGTHS = {"random_range_ratio": 0.6, "num_prompts": 40}
SEEN = {"request_rate": 5, "random_input_len": 60, "random_output_len": 14, **LENGTHS}
OTHER = {"request_rate": 8, "random_input_len": 110, "random_output_len": 9, **LENGTHS}


def calibrated(file, model, out):
    """The profile that is fitted to this file, from one of another machine."""
    words = ["calibrate", "--from-serving", str(file), "--out", str(out)]
    words += ["--profile", f"{model / 'config.json'}@l40s", "--block-tokens", "32"]
    words += ["--max-num-seqs", "16", "--max-step-tokens", "512", "--max-model-len", "512"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code in (0, None)
    return out


def test_another_load_is_predicted_from_one_benchmark(vllm, tmp_path):
    """Loads by turns, since the machine's speed changes. Each of the three files alone predicts;
    means agree within 10 %, or within what repeats of one side differ by from their mean."""
    model = write_small(tmp_path)
    server = start(tmp_path, model, engine_arguments())
    found = {}
    try:
        server.wait()
        bench(server, tmp_path / "warm.json", OTHER, 7)
        for i in range(REPEATS):
            for name, load in (("seen", SEEN), ("other", OTHER)):
                found[name, i] = bench(server, tmp_path / f"{name}{i}.json", load, 11)
    finally:
        server.stop()
    live = np.array([measured(found["other", i]) for i in range(REPEATS)])
    profiles = [
        calibrated(found["seen", i], model, tmp_path / f"mine{i}.json") for i in range(REPEATS)
    ]
    said = np.array([predicted(profile, OTHER, 11) for profile in profiles])
    off = said.mean(axis=0) / live.mean(axis=0) - 1
    apart = [np.abs(side / side.mean(axis=0) - 1).max(axis=0) for side in (said, live)]
    spread = np.maximum(*apart)
    for name, error, most in zip(METRICS, off, spread, strict=True):
        print(f"{name}: predicted {error:+.1%}, repeats {most:.1%} from their mean")
    assert (np.abs(off) <= np.maximum(0.1, spread)).all(), (off, spread)
    # a load of another length and rate is not the one that was fitted
    seen = np.mean([measured(found["seen", i]) for i in range(REPEATS)], axis=0)
    assert (np.abs(seen / live.mean(axis=0) - 1) > 0.1).any()
