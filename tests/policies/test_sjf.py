"""Shortest first: requests by predicted duration, applications by what is left of their cost."""

from tests.policies.justitia_reference import app, run
from tests.policies.policy_runs import Desk
from twinserve.policies.registry import parse_policy

TRUTH = "predictor=perfect"


def test_requests_go_by_their_output_whatever_application_they_belong_to():
    samples = [app([[(1, 3), (1, 1)]]), app([[(1, 2), (1, 2)]])]
    ends, requests, _ = run(f"vllm-sjf:{TRUTH}", [0.0, 0.0], samples, 1)
    order = requests.sort_values("last_token_s").request_id.tolist()
    assert order == ["X-0/0.1", "X-1/0.0", "X-1/0.1", "X-0/0.0"]
    assert ends == [8.0, 5.0]


def test_applications_go_by_the_cost_that_is_left():
    """A costs 3 * 9 = 27 and B 10: B first. C comes when A has one request of 9 left and costs more
    than that."""
    samples = [app([[(1, 3)] * 3]), app([[(3, 2), (1, 1)]]), app([[(4, 2)]])]
    ends = run(f"srjf:{TRUTH}", [0.0, 0.0, 9.0], samples, 1, size=8)[0]
    assert samples[1].requests == [(3, 2), (1, 1)]
    assert ends == [12.0, 3.0, 14.0]


def test_predictions_follow_what_has_ended():
    desk = Desk("vllm-sjf:error=0", 20)
    desk.submit("a", 4, 2)
    desk.scheduled(2)
    desk.submit("b", 4, 2)
    desk.step()
    assert desk.policy._duration == {1: 129}  # (256 + 2) / 2


def test_the_usual_error_is_that_of_the_papers_baseline():
    errors = {
        text: parse_policy(text).given.error
        for text in (
            "vllm-sjf",
            "vllm-sjf:predictor=class-mean",
            "vllm-sjf:error=0.5",
            "vllm-sjf:predictor=perfect",
            "vllm-sjf:predictor=oracle",
            "vllm-sjf:predictor=perfect,error=1",
        )
    }
    assert list(errors.values()) == [4.52, 4.52, 0.5, 0.0, 0.0, 1.0], errors
