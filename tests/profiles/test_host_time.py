"""Host time: which runs have it, and what it does to their steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.host import NO_HOST_TIME, VLLM_SYNCHRONOUS, HostTime, host_time
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.simulate import headline
from twinserve.sim.setup.config import PRESETS, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import resolve

FORMS = ["llama-3.1-8b@h100", "llama-3.1-8b@h100/operators", "qwen3-8b@l40s:tp2"]
STEPS = [StepComposition(n, 700 * n, 900) for n in (1, 8, 64, 128)]


def seconds(**settings) -> np.ndarray:
    model = resolve_hardware(SimulationConfig(**settings)).model
    return np.array([model.step_seconds(step) for step in STEPS])


@pytest.mark.parametrize("name", FORMS)
def test_synchronous_steps_are_longer_by_what_servers_were_seen_to_take(name):
    """1.4 ms with 8 requests, 3 with 64, 6 with 128 were measured; the line leaves 0.4 ms."""
    added = seconds(profile=name, async_scheduling=False) - seconds(profile=name)
    assert np.abs(1e3 * added[1:] - [1.4, 3.0, 6.0]).max() <= 0.41
    assert np.isclose(added[0], VLLM_SYNCHRONOUS.step_s + VLLM_SYNCHRONOUS.request_s)


def test_the_default_is_vllms_and_the_papers_engines_are_synchronous_without_more():
    default = SimulationConfig()
    assert default.async_scheduling and default.host_time == "auto"
    paper = SimulationConfig(**PRESETS["bros-hybrid"])
    assert not paper.async_scheduling and paper.host_time == "none"
    name = FORMS[0]
    plain = seconds(profile=name)
    assert (seconds(profile=name, async_scheduling=False, host_time="none") == plain).all()


@given(st.integers(0, 9_000), st.integers(0, 900), st.booleans())
def test_a_time_that_is_given_counts_in_both_modes(step_us, request_us, asynchronous):
    text = f"{step_us}us,{request_us} us"
    found = host_time(text, asynchronous)
    assert found == HostTime(float(f"{step_us}e-6"), float(f"{request_us}e-6"))
    assert found == host_time(f"{step_us / 1e6:.6f}s + {request_us / 1e3:.3f} ms", asynchronous)


@pytest.mark.parametrize("name", FORMS)
def test_a_given_time_is_in_every_step_of_a_run_at_once(name):
    profile = load_profile(name)
    slow = profile.with_host_time(HostTime(2e-3, 50e-6)).model()
    plain = profile.model()
    more = slow.decode_run_seconds(16, 16_000, 1_200, 5) - plain.decode_run_seconds(
        16, 16_000, 1_200, 5
    )
    assert np.allclose(more, 2e-3 + 16 * 50e-6)
    assert profile.with_host_time(NO_HOST_TIME) is profile


@pytest.mark.parametrize(
    "text", ["", "1ms", "1,2", "-1ms,2us", "1ms,2us,3us", "fast", "1 min,2us", "nanms,1us"]
)
def test_what_is_no_time_is_refused_in_one_line(text):
    with pytest.raises(ProfileError, match=r"0\.9ms\+39us") as refused:
        host_time(text, True)
    assert "\n" not in str(refused.value)


def test_a_host_that_takes_a_minute_is_a_mistake():
    with pytest.raises(ProfileError, match="is more than 10 s"):
        host_time("60s,1us", True)


def test_steps_that_were_measured_whole_are_left_alone(tmp_path):
    profile = load_profile(FORMS[0])
    steps = [StepComposition(n, 500 * n, 600) for n in (1, 2, 8, 16, 32, 64, 96, 128)]
    table = TableModel.fit(steps, [profile.model().step_seconds(step) for step in steps])
    whole = profile.model_copy(update={"step_model": table, "source": "measured"})
    file = tmp_path / "mine.json"
    save_profile(whole, file)
    assert (seconds(profile=str(file), async_scheduling=False) == seconds(profile=str(file))).all()
    config = SimulationConfig(profile=str(file), async_scheduling=False, trace="fixed:5,5")
    assert "synchronous, host time is in the steps" in headline(resolve(config))
    with pytest.raises(ProfileError, match="host time included; drop --host-time"):
        seconds(profile=str(file), host_time="1ms,2us")


def test_the_headline_says_what_the_steps_have():
    def said(**settings) -> str:
        return headline(resolve(SimulationConfig(trace="fixed:5,5", **settings)))

    assert "scheduling" not in said()
    assert "the GPU waits 0.9 ms a step and 39 us a request" in said(async_scheduling=False)
    assert "synchronous, no host time on top" in said(async_scheduling=False, host_time="none")
    assert "asynchronous, the GPU waits 2 ms a step" in said(host_time="2ms+1us")
