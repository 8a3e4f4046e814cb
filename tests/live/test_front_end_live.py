"""`twinserve calibrate --front-end` end to end: a `vllm serve` over HTTP, its front end in a file,
and a simulation with it."""

from __future__ import annotations

import json

import pytest

from twinserve.profiles.front_end import load_front_end
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import simulate

pytestmark = pytest.mark.live


@pytest.mark.nightly
def test_a_served_engine_is_measured_and_simulated(vllm, tmp_path, capsys):
    out = tmp_path / "front.json"
    with pytest.raises(SystemExit) as stop:
        main(f"calibrate --front-end --model small --quick --out {out}".split())
    said = capsys.readouterr().out
    assert stop.value.code in (0, None), said

    found = load_front_end(out)
    # a request over HTTP takes some of a millisecond at least, whatever else the machine does
    assert 1e-4 < found.request_s < 0.5 and 1e-4 < found.response_s < 1.0
    assert found.prompt_token_s < 1e-3 and found.response_steps == 0
    assert "40 requests" in found.source and "load average" in found.source
    told = {
        who: float(ms)
        for ms, who in (
            (line.split("  ")[-1].split()[0], line.strip().partition("  ")[0])
            for line in said.splitlines()
            if "ms to the first token" in line
        )
    }
    # vLLM's metric begins at the API server's tokeniser and ends where the server gets the token;
    # its queue and prefill are the engine's own
    assert told["the client"] > told["vLLM's metric"] > told["the engine"]
    assert told["queue and prefill"] == pytest.approx(told["the engine"], rel=0.1, abs=1.0)

    config = SimulationConfig(trace="fixed:100,5", rate=1.0, requests=20, front_end=str(out))
    (result,) = simulate(config).values()
    more = result.summary["mean_ttft_ms"] - result.summary["mean_engine_ttft_ms"]
    takes = found.request_s + 100 * found.prompt_token_s + found.response_s
    assert more == pytest.approx(1e3 * takes)
    assert json.loads(out.read_text())["version"] == 1


def test_an_engine_in_this_process_has_no_front_end(vllm):
    from twinserve.sim.twin.live import LiveRun

    inputs = resolve(
        SimulationConfig(
            trace="fixed:40,4", rate=5.0, requests=3, front_end="vllm", async_scheduling=False
        )
    )
    with pytest.raises(SettingsError, match="--front-end: an engine in this process has none"):
        LiveRun(inputs, inputs.policies[0], None)
