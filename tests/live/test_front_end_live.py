"""`twinserve calibrate --front-end` end to end: an API server before an emulated GPU, its front end
in a file, and a simulation with it."""

import json

import pytest

from tests.commands import status
from twinserve.profiles.front_end import load_front_end
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import simulate

pytestmark = pytest.mark.live


@pytest.mark.nightly
def test_a_served_engine_is_measured_and_simulated(vllm, tmp_path, capsys):
    out = tmp_path / "front.json"
    stop = status(main, f"calibrate --front-end --quick --out {out}".split())
    said = capsys.readouterr().out
    assert stop in (0, None), said

    found = load_front_end(out)
    assert "40 single requests and 14 loads" in found.source and "load average" in found.source
    t = found.threads
    # of any host that runs vLLM; CPU times hardly depend on other programs
    assert 2e-4 < t.accept_s + t.submit_s < 1e-2 and 1e-7 < t.prompt_token_s + t.tokenise_s < 1e-4
    assert 3e-5 < t.step_s < 3e-3 and 3e-6 < t.token_s + t.chunk_s < 5e-4
    assert 5e-5 < t.client_request_s < 5e-3 and 2e-6 < t.client_chunk_s < 5e-4
    assert "off the CPU time of a load" in said

    config = SimulationConfig(trace="fixed:100,5", rate=1.0, requests=20, front_end=str(out))
    (result,) = simulate(config).values()
    more_ms = result.summary["mean_ttft_ms"] - result.summary["mean_engine_ttft_ms"]
    assert more_ms == pytest.approx(1e3 * found.idle_s(100), rel=0.05)
    assert json.loads(out.read_text())["version"] == 2


def test_an_engine_in_this_process_has_no_front_end(vllm):
    from twinserve.sim.twin.live import LiveRun

    inputs = resolve(
        SimulationConfig(
            trace="fixed:40,4", rate=5.0, requests=3, front_end="vllm", async_scheduling=False
        )
    )
    with pytest.raises(SettingsError, match="--front-end: an engine in this process has none"):
        LiveRun(inputs, inputs.policies[0], None)
