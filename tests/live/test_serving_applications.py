"""Applications of a server's requests, without vLLM: policies that order by application are told of
them, once, with class and input text, and the client of what they lack."""

import json
import math
import sys
from unittest import TestCase

import pytest

from tests.live.steered import Answer, Engine, ask, decider_for
from twinserve.backends.live.serving.attributes import read_attributes
from twinserve.backends.live.serving.decider import EngineState
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.parts.predictors import kv_token_time

# As the class means have it, CC costs about 3.4e5 token-iterations and MRS 1.1e8; a first request
# of CC emits 77 tokens, one of MRS 368.
SMALL, LARGE = {"app": "small", "app_class": "CC"}, {"app": "large", "app_class": "MRS"}


def with_texts(tmp_path) -> Engine:
    """Of a policy that reads them."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"kind": "CC", "text": "some words", "stages": [[[10, 20]]]}\n')
    return Engine(f"justitia:predictor=mlp,training={samples}")


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_of_one_application_share_one_finish_time(asynchronous):
    engine = Engine("justitia:predictor=class-mean", asynchronous=asynchronous)
    policy = engine.policy
    first, large = engine.send({**SMALL, "stage": 0}), engine.send(LARGE)
    second = engine.send({**SMALL, "stage": 0})
    assert engine.step() == [first]
    rows = [engine.row(large), engine.row(second)]
    means = [round(policy.predictor._mean_cost(kind, kv_token_time)) for kind in ("CC", "MRS")]
    assert policy.F == {0: means[0], 1: means[1]}
    assert [policy.application_of(row) for row in rows] == [1, 0]
    assert policy.rank(rows[1])[:2] == (means[0], 0)
    later, other = (
        engine.send({**SMALL, "stage": 1}),
        engine.send({"app": "other", "app_class": "CC"}),
    )
    assert engine.step() == [second]
    # V has grown, and the first one's F is what it was
    assert policy.F[2] == policy.clock.V + means[0] > means[0]
    assert policy.rank(engine.row(later))[0] == policy.F[0] == means[0]
    assert engine.drain() == [first, second, later, other, large]
    assert len(policy.F) == 3


@pytest.mark.slow
def test_the_finish_time_is_predicted_from_the_text(tmp_path):
    """The network's word on the text, not the class's mean; and it is asked at the first request
    only."""
    samples = tmp_path / "samples.jsonl"
    entries = (
        {"kind": "CC", "text": "w1 " * i, "stages": [[[10 * i, 20 * i]]]} for i in range(1, 25)
    )
    samples.write_text("\n".join(map(json.dumps, entries)))
    engine = Engine(f"srjf:predictor=mlp,training={samples}")
    model = engine.policy.predictor._model("CC", kv_token_time)
    text = "w1 w2 w3 " * 40
    engine.send({**SMALL, "app_text": text})
    engine.send({**SMALL, "app_text": "something else"})
    engine.decider.plan(1.0)
    assert engine.policy.remaining == {0: round(model.predict(text))}
    assert engine.policy.remaining[0] != round(
        engine.policy.predictor._mean_cost("CC", kv_token_time)
    )
    assert engine.decider.core.requests.text == [text, text]


ORDERS = {
    "justitia:predictor=class-mean": [1, 3, 0, 2],
    "srjf:predictor=class-mean": [1, 3, 0, 2],
    "vllm-sjf:error=0": [1, 3, 0, 2],  # by the class of each
    "parrot": [0, 2, 1, 3],
}


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ORDERS)
def test_applications_are_not_interleaved(policy, asynchronous):
    engine = Engine(policy, asynchronous=asynchronous)
    names = [engine.send(attributes) for attributes in (LARGE, SMALL, LARGE, SMALL)]
    assert engine.drain() == [names[i] for i in ORDERS[policy]]
    plain = Engine(policy, asynchronous=asynchronous)
    names = [plain.send(None) for _ in range(4)]
    assert plain.drain() == names  # nothing is known of them but when they came


def test_srjf_counts_what_an_application_has_had():
    engine = Engine("srjf:predictor=class-mean")
    engine.send(SMALL, prompt=20)
    engine.step()
    mean = round(engine.policy.predictor._mean_cost("CC", kv_token_time))
    assert engine.policy.remaining == {0: mean - kv_token_time(20, 1)}
    engine.send(SMALL)
    engine.drain()
    assert engine.policy.remaining == {0: mean - kv_token_time(20, 1) - kv_token_time(10, 1)}


# -- when an application ends ----------------------------------------------------------------------
def test_it_stays_open_for_stages_to_come():
    engine = Engine("parrot")
    engine.send({"app": "a"})
    engine.drain()
    engine.send({"app": "b"})
    late = engine.send({"app": "a", "stage": 1})
    assert len(engine.decider.applications) == 2
    assert engine.step() == [late]


def test_it_ends_when_as_many_have_finished_as_were_announced():
    engine = Engine("parrot", seats=3)
    applications = engine.decider.applications
    engine.send({"app": "a", "app_requests": 2})
    engine.drain()
    assert len(applications) == 1
    engine.send({"app": "a", "stage": 1})
    hung_up = engine.send({"app": "a", "stage": 1})
    engine.decider.abort(hung_up, 1.0)
    assert len(applications) == 1
    engine.drain()
    assert len(applications) == 0
    assert engine.decider.core.requests.text == [None] * 3
    engine.send({"app": "b"})
    engine.send({"app": "a"})
    engine.step()
    # the name stands for another one now
    assert engine.decider.core.requests.group.tolist() == [0, 0, 0, 1, 2]


def test_who_hangs_up_is_not_counted_and_who_comes_again_is():
    engine = Engine("justitia:predictor=class-mean")
    gone = engine.send({**SMALL, "app_requests": 1})
    engine.decider.plan(1.0)
    engine.decider.abort(gone, 1.2)  # in the middle of its step
    engine.decider.complete(1.5, {gone}, {gone}, {})
    assert len(engine.decider.applications) == 1
    engine.send(SMALL)
    engine.drain()
    assert len(engine.decider.applications) == 0
    assert len(engine.policy.F) == 1


def test_a_restart_is_no_end(tmp_path):
    decider = with_texts(tmp_path).decider
    attributes = read_attributes({**SMALL, "app_text": "some words", "app_requests": 1})
    decider.submit("r", 10, attributes, 0.0)
    decider.plan(1.0)
    decider.complete(1.5, {"r"}, set(), {"r": EngineState(3, 11, ())})  # the engine lost some of it
    assert decider.restarts == 1
    requests = decider.core.requests
    assert (requests.group.tolist(), requests.text) == ([0, 0], [None, "some words"])
    decider.plan(2.0)
    assert decider.core.policy.rank(1)[0] == decider.core.policy.F[0]
    decider.complete(2.5, {"r"}, {"r"}, {})
    decider.check()
    assert len(decider.applications) == 0


@pytest.mark.parametrize("policy", ["parrot", "justitia:predictor=class-mean", "vtc"])
def test_a_policy_that_reads_no_texts_keeps_none(policy):
    engine = Engine(policy)
    engine.send({**SMALL, "app_text": "x" * 65_536})
    assert engine.decider.applications.text_characters == 0
    assert engine.decider.core.requests.text == [None]
    engine.drain()
    assert engine.decider.applications.text_characters == 0


def test_one_that_never_ends_is_ended_with_its_text(tmp_path):
    engine = with_texts(tmp_path)
    for number in range(5):
        engine.send({"app": f"left-{number}", "app_class": "CC", "app_text": "words " * 100})
    engine.drain()
    assert len(engine.decider.applications) == 5
    assert engine.decider.applications.text_characters == 3000
    engine.now += 3601
    engine.send(None)  # any request
    assert len(engine.decider.applications) == engine.decider.applications.text_characters == 0


def test_one_that_has_a_request_here_is_not_ended_however_long_it_takes(tmp_path):
    engine = with_texts(tmp_path)
    engine.send({**SMALL, "app_text": "words"})
    engine.now += 100_000
    engine.send(SMALL)
    assert len(engine.decider.applications) == 1
    assert set(engine.decider.core.requests.group.tolist()) == {0}
    engine.drain()
    engine.now += 3000
    engine.send(SMALL)  # the hour counts from when the last one left
    assert engine.decider.core.requests.group.tolist() == [0, 0, 0]


@pytest.mark.slow
def test_those_left_open_are_bounded_in_number():
    engine = Engine("parrot")
    for number in range(1200):
        engine.send({"app": f"left-{number}"})
        engine.step()
    assert len(engine.decider.applications) == 1000
    engine.send({"app": "left-1199"})  # the latest are kept
    engine.send({"app": "left-0"})
    assert engine.decider.core.requests.group.tolist()[-2:] == [1199, 1200]


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "policy", ["justitia:predictor=class-mean", "srjf:predictor=class-mean", "vllm-sjf"]
)
@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"app": "a"}, "app_class is missing"),
        ({"app": "a", "app_class": "cc"}, "'cc' is unknown; name one of"),
    ],
)
def test_an_application_of_which_nothing_can_be_predicted(policy, attributes, said):
    line = decider_for(policy).refusal(read_attributes(attributes))
    assert said in line and "ALFWI, CC, DM" in line and "\n" not in line
    for other in ("parrot", "vtc", "kv-share"):
        assert decider_for(other).refusal(read_attributes(attributes)) == ""


def test_classes_are_those_of_the_training_file(tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"kind": "mine", "text": "some words", "stages": [[[10, 20]]]}))
    engine = Engine(f"justitia:predictor=class-mean,training={samples}")
    engine.send({"app": "a", "app_class": "mine"})
    engine.decider.plan(1.0)
    assert engine.policy.F == {0: kv_token_time(10, 20)}
    assert "name one of mine" in engine.decider.refusal(read_attributes(SMALL))
    with pytest.raises(LiveEngineError, match="cannot be read"):
        decider_for("srjf:training=/no/such/file")


@pytest.mark.slow
def test_a_server_without_scikit_learn_does_not_start(tmp_path, monkeypatch):
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"kind": "mine", "text": "some words", "stages": [[[10, 20]]]}\n' * 20)
    monkeypatch.setitem(sys.modules, "sklearn.neural_network", None)
    with pytest.raises(LiveEngineError) as error:
        decider_for(f"justitia:predictor=mlp,training={samples}")
    assert "scikit-learn" in str(error.value) and "predictor=class-mean" in str(error.value)
    assert "\n" not in str(error.value)
    assert (
        decider_for(f"justitia:predictor=class-mean,training={samples}").core.policy.name
        == "justitia"
    )


def test_without_scikit_learn_a_server_says_that_class_means_predict(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with TestCase().assertLogs() as logged:
        assert decider_for("justitia").core.policy.options.predictor == "class-mean"
    (said,) = [record.getMessage() for record in logged.records]
    assert said.startswith("policy justitia: ") and "twinserve[learn]" in said


def test_a_class_that_contradicts_the_first():
    engine = Engine("parrot")
    engine.send(SMALL)
    line = engine.decider.refusal(read_attributes({**SMALL, "app_class": "MRS"}))
    assert "'MRS'" in line and "'small'" in line and "'CC'" in line
    assert engine.decider.refusal(read_attributes({"app": "small"})) == ""


def test_other_names_are_left_alone():
    assert read_attributes({"session_id": "s", "top_n_sigma": 1.0, "application": 3}).app is None
    assert math.isnan(
        read_attributes({"app": "a", "app_class": "CC", "app_requests": 2}).slo_ttft_s
    )


@pytest.mark.parametrize("where", ["vllm_config", "args"])
def test_the_middleware_knows_the_servers_policy(where):
    def answer(policy: str, attributes: dict) -> Answer:
        return ask({"vllm_xargs": attributes}, where=where, policy=policy, clients="trusted")

    assert answer("justitia", SMALL).status == 200
    assert answer("justitia", {"priority": 1}).status == 200
    assert answer("parrot", {"app": "a"}).status == 200
    lacks = answer("justitia", {"app": "a"})
    assert lacks.status == 400 and "app_class is missing" in lacks.error["message"]
    assert answer("bros:best_effort=false", {"class": "be"}).status == 400
    # a file that is not in this process's sight: the scheduler judges
    assert answer("justitia:training=/nowhere/samples.jsonl", SMALL).status == 200
