"""`twinserve validate` on the CPU engine: calibrate, then vllm and bros, below and past saturation.

Step times of a shared machine are no test's business: what is asserted of errors is that the
comparison is of the right things in the right units. docs/live.md has what a quiet machine gave.
"""

import json

import pytest

from tests.commands import status
from twinserve.sim.cli.calibrate import calibrate
from twinserve.sim.cli.main import main

pytestmark = [
    pytest.mark.live,
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.usefixtures("vllm"),
]
WAYS = ("out", "in")
LIMIT_S = 300.0
SIZES = ["--block-tokens", "32", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def profile(vllm, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "cpu.json"
    sizes = {
        "num_blocks": 80,
        "block_tokens": 32,
        "max_num_seqs": 8,
        "max_step_tokens": 256,
        "max_model_len": 512,
    }
    # the limit is for a machine whose disturbed steps are measured again, up to all of the traffic
    calibrate(model="tiny", out=out, quick=True, swap_blocks=60, limit=LIMIT_S, **sizes)
    return out


def test_traffic_was_measured(profile):
    model = json.loads(profile.read_text())["step_model"]
    assert model["fit"]["traffic_steps"] > 300 and 0 < model["fit"]["traffic_error"] < 0.5
    assert model["traffic"]["join_s"] + model["traffic"]["change_s"] > 0
    # requests that swap are of similar lengths here, so the fit may lay the cost of a swap on the
    # request or on its tokens, on the way out or in: what is known is that swaps take time
    traffic, tokens = model["traffic"], 128
    swaps = [traffic[f"swap_{way}_s"] + traffic[f"swap_{way}_token_s"] * tokens for way in WAYS]
    assert min(swaps) >= 0 and sum(swaps) > 0


@pytest.mark.parametrize(("rate", "requests"), [(8, 25), (300, 60)], ids=["below", "past"])
def test_simulated_and_live_are_laid_side_by_side(profile, tmp_path, rate, requests):
    arguments = [
        "validate", "--profile", str(profile), "-p", "vllm", "-p", "bros", "-t", "poisson",
        "--rate", str(rate),
    ]  # fmt: skip
    arguments += [
        "--requests", str(requests), "--cap-length", "250", *SIZES, "--slo", "ttft=0.2,tpot=0.05",
    ]  # fmt: skip
    arguments += ["--repeats", "2", "--pace", "measured", "--quiet", "--out", tmp_path / "v"]
    assert not status(main, arguments)
    found = json.loads((tmp_path / "v" / "validation.json").read_text())
    found = {policy["policy"]: policy for policy in found["policies"]}
    for name in ("vllm", "bros"):
        policy = found[name]
        assert policy["locked"]["drift"] == 0 and policy["free"]["drift"] == 0
        assert policy["locked"]["steps"] > 100 and policy["locked"]["repeat_error_pct"] > 0
        rows = {(row["metric"], row["statistic"]): row for row in policy["metrics"]}
        assert {m for m, _ in rows} == {
            "ttft", "tpot", "itl", "e2el", "request_throughput", "output_throughput",
        }  # fmt: skip
        # a busy machine makes live steps longer, or those that the profile was calibrated with:
        # several times, not by an order
        predicted = 1 + policy["locked"]["total_error_pct"] / 100
        assert 0.15 < predicted < 1 / 0.15
        for key in (("tpot", "mean"), ("e2el", "mean"), ("output_throughput", "")):
            assert 0.1 < rows[key]["simulated"] / rows[key]["live"] < 10
        # past saturation most of a request's life is waiting; bros slows decodes down instead
        if name == "vllm":
            both = [
                rows["ttft", "mean"][side] / rows["tpot", "mean"][side]
                for side in ("simulated", "live")
            ]
            assert (min(both) > 15) if rate == 300 else (both[0] < 15)
    pngs = {path.name for path in (tmp_path / "v").rglob("*.png")}
    assert {"vllm-latency.png", "vllm-steps.png", "vllm-load.png", "bros-latency.png"} <= pngs
