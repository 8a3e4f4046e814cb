"""Demand predictors: better than a constant on applications that they have not seen, and always the
same."""

import json
import subprocess
import sys

import numpy as np
import pytest

from twinserve.policies.errors import PolicyError
from twinserve.policies.parts import predictors
from twinserve.policies.parts.predictors import (
    DemandOptions,
    costs_of,
    kv_token_time,
    make_predictor,
    mean_relative_error,
    samples_of,
)
from twinserve.policies.requests import Application, RequestTable
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.traces.apps.classes import KINDS, training_samples
from twinserve.traces.apps.generate import from_samples
from twinserve.traces.apps.truth import TrueDemand
from twinserve.traces.workload import BestEffortPool, Workload


def application(kind, text="", group=0):
    return Application(group, f"{kind}-{group}", 0.0, kind, text)


def errors(predictor, kind, count=100):
    """float64[count]: relative errors on applications that no predictor was trained on."""
    held_out = training_samples(kind, count, seed=4321)
    truth = np.array(costs_of(held_out, kv_token_time))
    said = [
        predictor.application(application(kind, s.text, i), kv_token_time)
        for i, s in enumerate(held_out)
    ]
    return np.abs(np.array(said) - truth) / truth


@pytest.mark.nightly
def test_a_network_on_words_beats_the_class_mean():
    """Over all classes by a quarter at least, and no class is predicted worse than by its mean."""
    pytest.importorskip("sklearn")
    network, mean = (
        make_predictor(DemandOptions()),
        make_predictor(DemandOptions(predictor="class-mean")),
    )
    by_class = {kind: (errors(network, kind).mean(), errors(mean, kind).mean()) for kind in KINDS}
    assert all(one < other for one, other in by_class.values()), by_class
    learned, constant = np.mean(list(by_class.values()), axis=0)
    assert learned < 0.75 * constant


@pytest.mark.nightly
def test_the_network_is_the_same_in_every_process():
    pytest.importorskip("sklearn")
    code = (
        "from twinserve.policies.parts.predictors import *; from twinserve.policies.requests "
        "import Application; "
        "p = make_predictor(DemandOptions(seed=3)); "
        "print([p.application(Application(0, 'a', 0.0, k, 'many detailed lemma'), kv_token_time) "
        "for k in ('EV', 'SC')])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in "ab"
    }
    predictor = make_predictor(DemandOptions(seed=3))
    here = [
        predictor.application(application(k, "many detailed lemma"), kv_token_time)
        for k in ("EV", "SC")
    ]
    assert said == {f"{here}\n"}


@pytest.mark.slow
def test_the_network_of_one_class_beats_its_mean_and_is_the_same_again():
    """The slow tests have all classes, and other processes."""
    pytest.importorskip("sklearn")
    from twinserve.policies.parts import predictors_mlp

    network = make_predictor(DemandOptions())
    mean = make_predictor(DemandOptions(predictor="class-mean"))
    first = errors(network, "FV")
    assert first.mean() < errors(mean, "FV").mean()
    predictors_mlp.train.cache_clear()
    assert (errors(make_predictor(DemandOptions()), "FV") == first).all()


@pytest.mark.slow
def test_layers_are_in_proportion_to_the_input():
    pytest.importorskip("sklearn")
    from twinserve.policies.parts.predictors_mlp import train

    small, large = (train(kind, None, 0, kv_token_time).layers for kind in ("FV", "MRS"))
    words = [
        np.mean([len(s.text.split()) for s in samples_of(kind, None, 0)]) for kind in ("FV", "MRS")
    ]
    assert len(small) == len(large) == 3  # and the output: four layers
    assert [small[0], large[0]] == [round(0.5 * w) for w in words]


def test_without_scikit_learn_there_is_one_line_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    from twinserve.policies.parts import predictors_mlp

    predictors_mlp.train.cache_clear()
    with pytest.raises(PolicyError, match="twinserve\\[learn\\].*class-mean"):
        make_predictor(DemandOptions(predictor="mlp")).application(
            application("EV", "text"), kv_token_time
        )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["justitia", "srjf"])
def test_a_core_install_predicts_by_class_means_and_says_so_once(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as where it is not installed
    both = SimulationConfig(
        policy=(policy, f"{policy}:error=0"),
        trace="apps",
        requests=3,
        seed=1,
        offline=True,
        profile="llama-3.1-8b@h100",
        async_scheduling=True,
    )
    inputs = resolve(both)
    said = [line for line in inputs.notices if "class" in line]
    assert len(said) == 1 and "twinserve[learn]" in said[0] and "\n" not in said[0]
    found = run_policy(inputs, inputs.policies[0])
    assert found.config["policy"]["options"]["predictor"] == "class-mean"
    named = both.model_copy(update={"policy": (f"{policy}:predictor=class-mean",)})
    assert not [line for line in resolve(named).notices if "twinserve[learn]" in line]
    no_apps = both.model_copy(update={"trace": "poisson"})
    assert not [line for line in resolve(no_apps).notices if "twinserve[learn]" in line]


@pytest.mark.slow
def test_nothing_heavy_is_imported_for_a_policy():
    code = (
        "import sys; from twinserve.policies.registry import parse_policy; from "
        "twinserve.policies.base import EngineLimits; "
        "parse_policy('justitia').build(EngineLimits()); print([m for m in ('sklearn', 'torch', "
        "'vllm') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_requests_of_a_class_are_predicted_by_their_stage():
    table = RequestTable()
    first, second = (table.submit(f"r{stage}", stage=stage, prompt_tokens=9) for stage in (0, 1))
    predictor = make_predictor(DemandOptions(predictor="class-mean"))
    means = [
        np.mean([d for s in training_samples("EV") for _, d in s.stages[stage]]) for stage in (0, 1)
    ]
    said = [predictor.output_tokens(row, table, "EV") for row in (first, second)]
    assert said == [round(m) for m in means] and said[0] != said[1]


def test_an_oracle_says_what_is_true():
    samples = [training_samples(kind, 1)[0] for kind in ("EV", "MRS")]
    workload = from_samples([0.0, 1.0], samples)
    oracle = make_predictor(DemandOptions(predictor="perfect"))
    oracle.truth = TrueDemand(workload)
    said = [
        oracle.application(application(s.kind, group=i), kv_token_time)
        for i, s in enumerate(samples)
    ]
    assert said == costs_of(samples, kv_token_time)
    table = RequestTable()
    rows = [table.submit(name) for name in workload.ids]
    assert [oracle.output_tokens(row, table) for row in rows] == workload.output_tokens.tolist()


def test_an_oracle_knows_the_pool():
    pool = BestEffortPool(4, seed=2)
    truth = TrueDemand(Workload.build([0.0], [1], [7], pool=pool))
    assert truth.output_tokens("r0") == 7 and truth.output_tokens("nobody") is None
    assert [truth.output_tokens(f"be-3-{i}") for i in range(4)] == pool.draw(3)[1].tolist()


def test_an_oracle_that_was_told_nothing_says_so():
    with pytest.raises(PolicyError, match="predictor=perfect"):
        make_predictor(DemandOptions(predictor="perfect")).application(
            application("EV"), kv_token_time
        )


@pytest.mark.parametrize("level", [0.1, 0.53, 4.52])
def test_the_error_model_has_the_error_that_it_was_given(level):
    sigma = predictors._spread_of(level)
    assert mean_relative_error(sigma) == pytest.approx(level)
    grid = np.linspace(-9, 9, 20_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    assert np.trapezoid(np.abs(np.exp(sigma * grid) - 1) * density, grid) == pytest.approx(
        level, rel=1e-3
    )


def test_one_can_learn_from_ones_own_applications(tmp_path):
    path = tmp_path / "runs.jsonl"
    lines = [
        {"kind": "mine", "text": f"word{i}", "stages": [[[10, i + 1]], [[5, 2], [5, 2]]]}
        for i in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = DemandOptions(predictor="class-mean", training=str(path))
    expected = np.mean([kv_token_time(10, i + 1) + 2 * kv_token_time(5, 2) for i in range(3)])
    assert make_predictor(options).application(application("mine"), kv_token_time) == round(
        expected
    )
    assert make_predictor(options).application(application("EV"), kv_token_time) is None
    # fewer than twenty samples: the network is not trained
    assert make_predictor(DemandOptions(training=str(path))).application(
        application("mine", "word1"), kv_token_time
    ) == round(expected)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"kind": "a", "text": "b", "stages": []}',
        '{"kind": "a", "text": "b", "stages": [[[1, 0]]]}',
        "",
    ],
)
def test_a_bad_training_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "runs.jsonl"
    path.write_text(content)
    with pytest.raises(PolicyError, match="runs.jsonl") as error:
        make_predictor(DemandOptions(predictor="class-mean", training=str(path))).application(
            application("a"), kv_token_time
        )
    assert "\n" not in str(error.value)


def test_a_training_file_that_is_not_there():
    with pytest.raises(PolicyError, match="no/such/file"):
        make_predictor(DemandOptions(training="no/such/file")).prepare(["EV"], kv_token_time)


@pytest.mark.slow
def test_a_run_hands_an_oracle_the_truth_and_lets_the_others_learn_before_it():
    from twinserve.sim.setup.config import SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.replicas import make_policy

    settings = {
        "trace": "apps:3x",
        "offline": True,
        "requests": 40,
        "profile": "llama-7b@a100-pcie-40g",
    }
    inputs = resolve(
        SimulationConfig(
            policy=("justitia:predictor=perfect", "srjf:predictor=class-mean"), **settings
        )
    )
    oracle, learned = (make_policy(inputs, spec).predictor for spec in inputs.policies)
    rows = np.flatnonzero(inputs.workload.group == 0)
    truth = sum(
        kv_token_time(int(inputs.workload.prompt_tokens[r]), int(inputs.workload.output_tokens[r]))
        for r in rows
    )
    assert (
        oracle.application(application(inputs.workload.applications[0].kind), kv_token_time)
        == truth
    )
    assert learned.truth is None
