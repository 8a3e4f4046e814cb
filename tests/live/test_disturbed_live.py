"""`calibrate` and `validate` beside programs that spin on every core, started here: it is noticed,
said in what is written, and ends by the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from twinserve.profiles.measured.samples import disturbed, read_samples
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli.calibrate import calibrate
from twinserve.sim.cli.main import main

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.usefixtures("vllm")]
SIZES = {"num_blocks": 80, "max_num_seqs": 4, "max_step_tokens": 64, "max_model_len": 256}
LIMIT_S = 10.0
SPIN = "while True:\n    pass"


@pytest.fixture
def spinning():
    """Two programs for each core, for as long as the test lasts."""
    programs = [
        subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_a_disturbance_is_noticed_and_said(spinning, tmp_path, capsys):
    out, raw = tmp_path / "p.json", tmp_path / "p.parquet"
    calibrate(model="tiny", out=out, raw=raw, quick=True, limit=LIMIT_S, block_tokens=32, **SIZES)
    measurement = read_samples(raw)
    # steps of the tables; the rest of the limit is for traffic
    assert measurement.provenance["partial"] and disturbed(measurement.steps).mean() > 0.1
    assert "other programs disturbed" in capsys.readouterr().out
    profile = load_profile(out)
    assert profile.step_model.fit.partial and profile.step_model.fit.disturbed > 0.1
    assert "Other programs disturbed" in profile.notes

    began, folder = time.monotonic(), tmp_path / "v"
    sizes = "--block-tokens 32 --max-num-seqs 4 --max-num-batched-tokens 64 --num-blocks 80"
    load = "-t poisson --rate 20 --requests 8 --cap-length 24 --slo none --seed 5"
    command = f"validate --profile {out} -p vllm {load} {sizes} --repeats 50 --quiet"
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--limit", "45", "--pace", "measured", "--out", str(folder)])
    assert not end.value.code
    spent = time.monotonic() - began
    (found,) = json.loads((folder / "validation.json").read_text())["policies"]
    said = " ".join(found["notes"])
    assert "other programs disturbed" in said
    assert spent < 45 + 120  # the engine is started and stopped besides
    assert ("of 50" in said) == bool(found["partial"])
    live = [path for path in (folder / "steps").iterdir() if "-live-" in path.name]
    assert len(live) >= found["free"]["repeats"] > 0
    assert "other programs disturbed" in (folder / "validation.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.parquet", "v"]
