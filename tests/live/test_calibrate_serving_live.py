"""`calibrate --from-serving` on a real server: one file of `vllm bench serve` is all it is given,
and another load is predicted."""

from __future__ import annotations

from dataclasses import replace

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
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.live]

REPEATS = 3
TELLS = 0.5  # where repeats are farther from their mean, the machine is measured, not the engine
LENGTHS = {"random_range_ratio": 0.6, "num_prompts": 40}
SEEN = {"request_rate": 5, "random_input_len": 60, "random_output_len": 14, **LENGTHS}
OTHER = {"request_rate": 8, "random_input_len": 110, "random_output_len": 9, **LENGTHS}


def any_cpu(model, out):
    """The roofline of a core that does 100 GFLOP/s and reads 20 GB/s: nobody's, of this kind."""
    profile = load_profile(f"{model / 'config.json'}@l40s")
    rates = {"name": "a-cpu", "peak_flops": 1e11, "memory_bytes_per_s": 2e10}
    save_profile(profile.model_copy(update={"gpu": replace(profile.gpu, **rates)}), out)
    return out


def calibrated(file, profile, out):
    """The profile that is fitted to this file."""
    words = ["calibrate", "--from-serving", str(file), "--out", str(out)]
    words += ["--profile", str(profile), "--block-tokens", "32"]
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
    begin = any_cpu(model, tmp_path / "any.json")
    profiles = [
        calibrated(found["seen", i], begin, tmp_path / f"mine{i}.json") for i in range(REPEATS)
    ]
    said = np.array([predicted(profile, OTHER, 11) for profile in profiles])
    off = said.mean(axis=0) / live.mean(axis=0) - 1
    apart = [np.abs(side / side.mean(axis=0) - 1).max(axis=0) for side in (said, live)]
    spread = np.maximum(*apart)
    for name, error, most in zip(METRICS, off, spread, strict=True):
        print(f"{name}: predicted {error:+.1%}, repeats {most:.1%} from their mean")
    if spread.max() > TELLS:
        pytest.skip(f"repeats of one load are {spread.max():.0%} from their mean: nothing is told")
    assert (np.abs(off) <= np.maximum(0.1, spread)).all(), (off, spread)
    # a load of another length and rate is not the one that was fitted
    seen = np.mean([measured(found["seen", i]) for i in range(REPEATS)], axis=0)
    assert (np.abs(seen / live.mean(axis=0) - 1) > 0.1).any()
