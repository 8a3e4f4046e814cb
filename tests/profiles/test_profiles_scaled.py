"""Profiles that are off on purpose, and whole-step models to decide with."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from twinserve.profiles.composition import Churn, StepComposition, StepTimeModel
from twinserve.profiles.forms.estimates import FORMS, PromptsAndConstant, step_estimate
from twinserve.profiles.forms.layerkv import LayerKvModel
from twinserve.profiles.forms.scaled import ScaledModel, StepScale
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.measured.model import MeasuredModel, TrafficTimes
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate

ROOFLINE, OPERATORS = "llama-3.1-8b@l40s", "llama-3.1-8b@l40s/operators"
MODELS = {name: load_profile(name).model() for name in (ROOFLINE, OPERATORS)}
TABLE = TableModel(
    tokens=(1, 64, 1024), token_s=(0.01, 0.012, 0.1), request_s=1e-5, context_s=1e-7, pair_s=1e-9
)
factors = st.floats(0.25, 4.0)


@st.composite
def works(draw):
    n = draw(st.integers(0, 300))
    longest = draw(st.integers(1, 20_000)) if n else 0
    context = draw(st.integers(longest, n * longest)) if n else 0
    prompts = draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), max_size=4))
    new, resident = (np.array([p[i] for p in prompts], np.int64) for i in (0, 1))
    return StepComposition(n, context, longest, new, resident)


@pytest.mark.parametrize("model", [*MODELS.values(), TABLE], ids=[*MODELS, "table"])
@examples(50)
@given(
    n=st.integers(1, 600),
    longest=st.integers(1, 50_000),
    steps=st.integers(0, 40),
    step=factors,
    prefill=factors,
    decode=factors,
    host=factors,
)
def test_a_run_of_decodes_is_the_single_steps_bit_for_bit(
    model, n, longest, steps, step, prefill, decode, host
):
    scale = StepScale(
        step=step, prefill=prefill, decode=decode, host=host if model.knows_host else 1.0
    )
    scaled = ScaledModel(model, scale)
    run = scaled.decode_run_seconds(n, n * longest, longest, steps)
    single = [
        scaled.step_seconds(StepComposition(n, n * longest + n * j, longest + j))
        for j in range(steps)
    ]
    assert run.tolist() == single


@pytest.mark.parametrize("name", MODELS)
@examples(50)
@given(work=works())
def test_factors_of_one_change_no_bit_and_equal_factors_scale_all(name, work):
    model = MODELS[name]
    assert ScaledModel(model, StepScale()).step_seconds(work) == model.step_seconds(work)
    whole = ScaledModel(model, StepScale(step=1.1)).step_seconds(work)
    parts = ScaledModel(model, StepScale(prefill=1.1, decode=1.1, host=1.1)).step_seconds(work)
    assert whole == pytest.approx(1.1 * model.step_seconds(work), rel=1e-12)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_what_a_changed_batch_costs_is_not_lost():
    traffic = TrafficTimes(step_s=2**-10, request_s=0.0, join_s=2**-8, change_s=2**-9)
    tables = {"batches": (1, 16), "contexts": (16, 4096), "decode_s": ((0.01, 0.01), (0.02, 0.03))}
    prompts = {
        "tokens": (16, 512),
        "token_s": (0.01, 0.1),
        "prefill_request_s": 0.0,
        "decode_request_s": 0.0,
    }
    terms = {"pair_s": 0.0, "attended_s": 0.0, "decode_share": 0.5}
    model = MeasuredModel(**tables, **prompts, **terms, traffic=traffic)
    assert ScaledModel(model, StepScale()).watches_churn
    assert not ScaledModel(replace(model, traffic=None), StepScale()).watches_churn
    work = StepComposition(4, 400, 100, churn=Churn(joined=1, changed=True))
    assert ScaledModel(model, StepScale(step=2.0)).step_seconds(work) == 2 * model.step_seconds(
        work
    )


@pytest.mark.parametrize("name", MODELS)
@examples(50)
@given(work=works())
def test_a_dearer_part_never_saves_time(name, work):
    model = MODELS[name]
    before = model.step_seconds(work)
    for part in ("prefill", "decode", "host"):
        assert ScaledModel(model, StepScale(**{part: 1.5})).step_seconds(work) >= before * (
            1 - 1e-12
        )


class ByHand(StepTimeModel):
    """3 ms of host and 1 ms a request, 10 ms for the weights, 2 ms a decode, 0.1 ms a prompt
    token."""

    knows_host = True

    def host_seconds(self, requests):
        return 0.003 + 0.001 * requests

    def step_seconds(self, work):
        rows = work.decode_requests + len(work.prefill_new)
        return (
            self.host_seconds(rows)
            + 0.010
            + 0.002 * work.decode_requests
            + 0.0001 * int(work.prefill_new.sum())
        )

    def decode_run_seconds(self, n, context, context_max, steps):
        return np.full(steps, self.step_seconds(StepComposition(n, context, context_max)))


def test_the_parts_of_a_step_by_hand():
    prompt = {"prefill_new": np.array([200]), "prefill_resident": np.array([0])}
    mixed, alone = StepComposition(5, 500, 100, **prompt), StepComposition(5, 500, 100)

    def seconds(work, **scale):
        return ScaledModel(ByHand(), StepScale(**scale)).step_seconds(work)

    # mixed: 9 ms of host for six requests, 20 ms of weights and decodes, 20 ms of prompt
    assert seconds(mixed) == pytest.approx(0.049)
    assert seconds(mixed, host=2.0) == pytest.approx(0.058)
    assert seconds(mixed, decode=2.0) == pytest.approx(0.069)
    assert seconds(mixed, prefill=2.0) == pytest.approx(0.069)
    assert seconds(mixed, prefill=2.0, step=0.5) == pytest.approx(0.0345)
    assert seconds(alone, prefill=2.0) == pytest.approx(0.028) == seconds(alone)
    # a prompt alone pays for its weights
    assert seconds(StepComposition(**prompt), prefill=2.0) == pytest.approx(0.064)


def test_a_scaled_profile_is_a_file_like_any_other(tmp_path):
    before = load_profile(ROOFLINE)
    off = before.scaled(decode=1.1, kv=0.5, pcie=2.0)
    save_profile(off, tmp_path / "off.json")
    again = load_profile(tmp_path / "off.json")
    assert again == off and again.step_scale == StepScale(decode=1.1) and again.fit_error is None
    assert (
        again.num_gpu_blocks == round(before.num_gpu_blocks / 2)
        and again.pcie_bytes_per_s == 2 * before.pcie_bytes_per_s
    )
    assert (
        again.name == f"{before.name} (decode x 1.1, pcie x 2, kv x 0.5)"
        and "Scaled on purpose" in again.notes
    )
    work = StepComposition(8, 800, 100)
    host = before.model().host_seconds(8)
    assert again.model().step_seconds(work) == pytest.approx(
        1.1 * before.model().step_seconds(work) - 0.1 * host
    )
    assert before.scaled() is before
    # twice is once with the product, and back again is the profile's own times
    assert off.scaled(decode=2.0).step_scale == StepScale(decode=2.2)
    assert before.scaled(step=2.0).scaled(step=0.5).step_scale is None


def test_a_profile_that_is_not_scaled_says_nothing_of_it(tmp_path):
    save_profile(load_profile(ROOFLINE), tmp_path / "p.json")
    assert "step_scale" not in json.loads((tmp_path / "p.json").read_text())


def test_what_cannot_be_scaled_is_one_line():
    profile = load_profile(ROOFLINE)
    for part in ("step", "prefill", "decode", "host", "pcie", "kv"):
        for factor in (0.0, -1.0, float("inf"), float("nan"), 1e308, 1e-320, 1000.1, 0.0009):
            with pytest.raises(
                ProfileError, match=f"^factor .* of {part} must be positive, from 0.001 to 1000$"
            ):
                profile.scaled(**{part: factor})
    with pytest.raises(
        ProfileError, match="factor 2000 of step must be positive, from 0.001 to 1000"
    ):
        profile.scaled(step=1000.0).scaled(step=2.0)
    table = profile.model_copy(update={"step_model": TABLE})
    with pytest.raises(ProfileError, match="does not know its host time"):
        table.scaled(host=1.1)
    assert table.scaled(decode=1.1).model().step_seconds(StepComposition(4, 400, 100)) > 0
    with pytest.raises(ProfileError, match="is scaled"):
        profile.scaled(step=1.1).with_host_terms(1e-3, 0.0, None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", mostly_nightly([0.001, 1000.0]))
def test_the_largest_and_least_factors_still_serve(factor, tmp_path):
    everything = dict.fromkeys(("step", "prefill", "decode", "host", "pcie"), factor)
    save_profile(load_profile(ROOFLINE).scaled(**everything), tmp_path / "off.json")
    given = {"trace": "sharegpt", "requests": 12, "rate": 4.0, "offline": True, "num_blocks": 200}
    policies = ("bros", "echo", "layerkv", "mlfq", "vllm")
    runs = simulate(SimulationConfig(policy=policies, profile=str(tmp_path / "off.json"), **given))
    assert all(run.rows.requests.finished.all() for run in runs.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [ROOFLINE, OPERATORS])
def test_an_engine_that_is_twice_as_slow_takes_twice_as_long(name, tmp_path):
    """Everything at once, on the fast path: twice the time, the same decisions."""
    save_profile(load_profile(name).scaled(step=2.0, pcie=0.5), tmp_path / "slow.json")
    given = {
        "policy": ("vllm",), "trace": "sharegpt", "requests": 40, "slo": "none", "offline": True,
    }  # fmt: skip
    fast = simulate(SimulationConfig(profile=name, rate=4.0, **given))["vllm"].rows
    slow = simulate(SimulationConfig(profile=str(tmp_path / "slow.json"), rate=2.0, **given))[
        "vllm"
    ].rows
    assert slow.steps.end_s.to_numpy() == pytest.approx(2 * fast.steps.end_s.to_numpy())
    exact = simulate(
        SimulationConfig(profile=str(tmp_path / "slow.json"), rate=2.0, exact=True, **given)
    )["vllm"].rows
    assert exact.requests.equals(slow.requests)


# Whole-step models to decide with


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_step_time_model(form):
    profile = load_profile(OPERATORS)
    model = step_estimate(form, profile, profile.model())
    run = model.decode_run_seconds(20, 20_000, 3000, 5)
    assert run.tolist() == [
        model.step_seconds(StepComposition(20, 20_000 + 20 * j, 3000 + j)) for j in range(5)
    ]
    prompt = StepComposition(prefill_new=np.array([1024]), prefill_resident=np.array([0]))
    assert model.step_seconds(prompt) == pytest.approx(
        profile.model().step_seconds(prompt), rel=0.35
    )


def test_prompts_and_a_constant_by_hand():
    prompts = LayerKvModel(
        alpha=1.0,
        beta=1.0,
        parameters=100,
        hidden=2,
        layers=3,
        flops=1000.0,
        layer_kv_bytes=1.0,
        pcie_bytes_per_s=1.0,
    )
    model = PromptsAndConstant(prompts, 0.5)
    # eq. 3: l (200 + 12 l) / 1000
    two = StepComposition(prefill_new=np.array([10, 5]), prefill_resident=np.array([0, 10]))
    assert model.step_seconds(two) == pytest.approx(3.2 + (5.7 - 3.2))
    assert (
        model.step_seconds(StepComposition(7, 70, 10)) == 0.5
        and model.step_seconds(StepComposition()) == 0.0
    )
    assert model.decode_run_seconds(7, 70, 10, 3).tolist() == [0.5] * 3


def test_a_form_that_does_not_exist_is_one_line():
    profile = load_profile(OPERATORS)
    with pytest.raises(
        ProfileError, match="choose bros, echo, echo-printed, echo-total, echo-sum, layerkv"
    ):
        step_estimate("oracle", profile, profile.model())


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", ["echo", "echo-printed", "echo-total", "echo-sum", "layerkv", "roofline"]
)
def test_a_policy_decides_with_any_of_them(estimator):
    given = {
        "policy": ("bros",), "trace": "sharegpt", "requests": 60, "rate": 12.0, "pool": 8,
        "offline": True,
    }  # fmt: skip
    given["profile"] = OPERATORS
    mine = simulate(SimulationConfig(estimator=estimator, **given))["bros"]
    exact = simulate(SimulationConfig(estimator=estimator, exact=True, **given))["bros"]
    assert mine.rows.requests.equals(exact.rows.requests) and mine.rows.requests.finished.all()
