"""`calibrate` and `validate` beside programs that spin on every core, started here: it is noticed,
said in what is written, and ends by the limit."""

import json
import os
import subprocess
import sys

import pytest

from tests.commands import status
from twinserve.profiles.measured.samples import disturbed_share, read_samples
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli.calibrate import calibrate
from twinserve.sim.cli.main import main

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.usefixtures("vllm")]
SIZES = {"num_blocks": 80, "max_num_seqs": 4, "max_step_tokens": 64, "max_model_len": 256}
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


def test_a_calibration_says_that_it_was_disturbed(spinning, tmp_path, capsys):
    out, raw = tmp_path / "p.json", tmp_path / "p.parquet"
    calibrate(model="tiny", out=out, raw=raw, quick=True, limit=3.0, block_tokens=32, **SIZES)
    measurement = read_samples(raw)
    assert measurement.provenance["partial"] and disturbed_share(measurement.steps) > 0.1
    assert "other programs disturbed" in capsys.readouterr().out
    profile = load_profile(out)
    assert profile.step_model.fit.partial and profile.step_model.fit.disturbed > 0.1
    assert "Other programs disturbed" in profile.notes


def test_a_validation_says_that_it_was_disturbed_and_ends_by_its_limit(spinning, tmp_path):
    folder = tmp_path / "v"
    sizes = "--block-tokens 32 --max-num-seqs 4 --max-num-batched-tokens 64 --num-blocks 80"
    load = "-t poisson --rate 20 --requests 6 --cap-length 16 --slo none --seed 5"
    command = f"validate -p vllm {load} {sizes} --repeats 500 --quiet --pace measured"
    assert not status(main, [*command.split(), "--limit", "40", "--out", str(folder)])
    (found,) = json.loads((folder / "validation.json").read_text())["policies"]
    said = " ".join(found["notes"])
    assert "other programs disturbed" in said and "of 500" in said and found["partial"]
    assert "other programs disturbed" in (folder / "validation.md").read_text()
    kinds = [path.name.split("-")[1] for path in (folder / "steps").iterdir()]
    assert kinds.count("live") == found["free"]["repeats"] and "locked" in kinds
    assert [path.name for path in tmp_path.iterdir()] == ["v"]
