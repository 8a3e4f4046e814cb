"""Greedy and honest clients of one server, side by side, without vLLM: a client gains nothing by
what it says, beyond what the server's file believes of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.live.steered import Engine
from twinserve.backends.live.serving.applications import MOST_IDLE
from twinserve.backends.live.serving.attributes import read_attributes
from twinserve.backends.live.serving.clients import Beliefs, Client, Clients

BROS = {"policy": "bros:chunk=16,kv=paged", "profile": "llama-3.1-8b@h100"}
VIP = Beliefs.model_validate(
    {"priority": -5, "slo_ttft_s": 0.1, "slo_tpot_s": 0.01, "applications": True}
)
NAMES = ("greedy", "honest")


def clients_with(believed: Beliefs | None = None, **slo) -> Clients:
    """Two that are told apart, of whom no more (or `believed`) is believed than of anybody."""
    beliefs = believed or Beliefs()
    listed = {name: Client(name, beliefs) for name in NAMES}
    return Clients(Client("default", Beliefs()), listed, True, **slo)


def engine_of(policy: str | dict, clients: Clients, **given) -> Engine:
    """With memory for four long requests."""
    return Engine(policy, clients, blocks=32, **given)


def served(engine: Engine) -> list[str]:
    """Whose requests were served, in order."""
    return [name.partition("-")[0] for name in engine.drain()]


# -- shares ----------------------------------------------------------------------------------------
FRESH = {
    "a fresh application each": lambda i: {"app": f"app-{i}"},
    "no application": lambda i: None,
    "one application": lambda i: {"app": "one"},
}


@pytest.mark.parametrize("greedy", FRESH)
@pytest.mark.parametrize("honest", FRESH)
def test_vtc_shares_among_clients_however_they_name_applications(greedy, honest):
    """Twelve requests of a client before one of the other's: they take turns from then on."""
    engine = engine_of("vtc", clients_with())
    for i in range(12):
        engine.send(FRESH[greedy](i), client="greedy")
    for i in range(4):
        engine.send(FRESH[honest](i), client="honest")
    order = served(engine)
    assert order[:8].count("honest") == 4
    assert order[8:] == ["greedy"] * 8


def test_where_applications_are_believed_each_has_a_share():
    """Which is why that is not the default."""
    engine = engine_of("vtc", clients_with(VIP))
    for i in range(12):
        engine.send({"app": f"app-{i}"}, client="greedy")
    for _ in range(4):
        engine.send({"app": "one"}, client="honest")
    assert served(engine)[:12].count("honest") <= 2


@pytest.mark.parametrize("greedy", FRESH)
def test_kv_share_gives_each_client_half_of_memory(greedy):
    engine = engine_of("kv-share", clients_with(), seats=8)
    for i in range(20):
        engine.send(FRESH[greedy](i), prompt=40, output=8, client="greedy")
    honest = [engine.send(prompt=40, output=8, client="honest") for _ in range(2)]
    for _ in range(40):
        engine.step()
        rows = engine.decider.rows
        held = [
            sum(
                engine.decider.core.ledger.held_blocks(row)
                for name, row in rows.items()
                if name.startswith(client)
            )
            for client in NAMES
        ]
        if honest[-1] in rows:
            assert held[0] <= engine.decider.core.ledger.num_blocks // 2
    engine.drain()
    assert max(engine.order.index(name) for name in honest) < 8


def test_everybody_is_one_client_where_nobody_is_told_apart():
    """Also who claims to be another one."""
    engine = engine_of("vtc", Clients(Client("default", Beliefs())))
    names = [engine.send(client=client) for client in ("honest", "greedy", None)]
    assert {engine.group(name) for name in names} == {0}


# -- claims of urgency -----------------------------------------------------------------------------
def test_a_claimed_priority_gains_nothing():
    engine = engine_of("vllm:scheduling=priority", clients_with())
    for _ in range(3):
        engine.send(client="honest")
        engine.send({"priority": -1_000_000}, client="greedy")
    assert served(engine) == ["honest", "greedy"] * 3


def test_a_priority_of_the_api_itself_gains_nothing_either():
    engine = engine_of("vllm:scheduling=priority", clients_with())
    attributes = read_attributes({"twinserve_client": "greedy"})
    for said in (-(2**70), 2**70, -1, 3):
        engine.decider.submit(f"p{said}", 5, attributes, 0.0, priority=said)
    assert engine.decider.core.requests.priority.tolist() == [0, 1_000_000, 0, 3]


def test_who_steps_back_is_believed():
    engine = engine_of("vllm:scheduling=priority", clients_with())
    engine.send(client="greedy")
    engine.send({"priority": 3}, client="honest")
    engine.send(client="greedy")
    assert served(engine) == ["greedy", "greedy", "honest"]


def test_a_priority_is_believed_as_far_as_the_file_says():
    engine = engine_of("vllm:scheduling=priority", clients_with(VIP))
    engine.send({"priority": -4}, client="honest")
    engine.send({"priority": -1000}, client="greedy")
    assert engine.decider.core.requests.priority.tolist() == [-4, -5]


@pytest.mark.parametrize("said", [{"slo_ttft_s": 0.001}, {"slo_tpot_s": 0.001}])
def test_a_tight_objective_gains_nothing(said):
    """In the order of first tokens under BROS, which serves the nearest deadline first."""

    def order(claims: dict | None, believed: Beliefs | None = None) -> list[str]:
        slo = {"slo_ttft_s": 5.0, "slo_tpot_s": 1.0}
        engine = engine_of(BROS, clients_with(believed, **slo), seats=2, **slo)
        for _ in range(4):
            engine.send(prompt=30, output=3, client="honest")
            engine.send(claims, prompt=30, output=3, client="greedy")
        return served(engine)

    assert order(said) == order(None)
    if "slo_ttft_s" in said:
        assert order(said, VIP) != order(None, VIP)  # as it does where it is believed


def test_best_effort_is_believed_and_real_time_as_far_as_the_file_says():
    best_effort = Beliefs.model_validate({"class": "be"})
    listed = {"honest": Client("honest", Beliefs()), "greedy": Client("greedy", best_effort)}
    engine = engine_of(BROS, Clients(Client("default", best_effort), listed, True), slo_ttft_s=5.0)
    engine.send({"class": "be"}, client="honest")
    engine.send({"class": "rt"}, client="greedy")
    engine.send(client="greedy")
    engine.send(client="honest")
    requests = engine.decider.core.requests
    assert requests.service_class.tolist() == [1, 1, 1, 0]
    # the server's objective is for those that are real-time
    assert [math.isnan(slo) for slo in requests.slo_ttft_s.tolist()] == [True, True, True, False]


CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "class": st.sampled_from(["rt", "be"]),
        "priority": st.integers(-1_000_000, 1_000_000),
        "slo_ttft_s": st.floats(0.001, 86_400),
        "slo_tpot_s": st.floats(0.001, 86_400),
        "app": st.sampled_from(["a", "b"]),
    },
)
BOUNDS = st.none() | st.floats(0.001, 10)


@examples(200)
@given(claims=CLAIMS, priority=st.integers(-(2**70), 2**70), own=BOUNDS, listed=BOUNDS)
def test_no_claim_gets_further_than_the_file_and_none_is_needed(claims, priority, own, listed):
    beliefs = Beliefs.model_validate({"priority": -7, "slo_ttft_s": listed})
    clients = clients_with(beliefs, slo_ttft_s=own, slo_tpot_s=own)
    believed = clients.believed(read_attributes({**claims, "twinserve_client": "greedy"}), priority)
    assert -7 <= believed.priority <= 1_000_000
    assert believed.app is None
    assert believed.service_class == (claims.get("class") == "be")
    tightest = min([one for one in (own, listed) if one is not None], default=math.inf)
    assert math.isnan(believed.slo_ttft_s) or believed.slo_ttft_s >= tightest
    if "slo_ttft_s" in claims and claims["slo_ttft_s"] >= tightest:
        assert believed.slo_ttft_s == claims["slo_ttft_s"]  # within bounds it is as it was said
    assert math.isnan(believed.slo_tpot_s) == ("slo_tpot_s" not in claims or own is None)


# -- applications ----------------------------------------------------------------------------------
def test_a_client_cannot_join_or_end_the_application_of_another():
    engine = engine_of("parrot", clients_with(VIP))
    first = engine.send({"app": "agent", "app_class": "CC"}, client="honest")
    group = engine.group(first)
    engine.drain()
    theirs = engine.send({"app": "agent", "app_class": "MRS", "app_requests": 1}, client="greedy")
    assert engine.group(theirs) != group
    engine.drain()
    later = engine.send({"app": "agent", "app_class": "CC", "stage": 1}, client="honest")
    assert engine.group(later) == group


@pytest.mark.slow
def test_a_client_that_leaves_many_open_ends_its_own_only():
    engine = engine_of("parrot", clients_with(VIP))
    mine = engine.group(engine.send({"app": "agent"}, client="honest"))
    engine.drain()
    for i in range(MOST_IDLE + 50):
        engine.send({"app": f"app-{i}"}, client="greedy")
        engine.step()
    assert len(engine.decider.applications) == MOST_IDLE + 1
    assert engine.group(engine.send({"app": "agent"}, client="honest")) == mine


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["justitia:predictor=class-mean", "srjf:predictor=class-mean", "vllm-sjf:error=0", "parrot"],
)
def test_a_class_that_is_not_believed_gains_nothing(policy):
    """The cheapest class, in one application or in many: the order is that of arrival."""
    engine = engine_of(policy, clients_with())
    for i in range(4):
        engine.send(client="honest")
        engine.send({"app": f"app-{i % 2}", "app_class": "CC", "stage": 3}, client="greedy")
    assert served(engine) == ["honest", "greedy"] * 4
    assert len(engine.decider.applications) == 0


@pytest.mark.slow
def test_an_application_that_is_not_believed_needs_no_class():
    engine = engine_of("justitia:predictor=class-mean", clients_with())
    assert engine.decider.refusal(read_attributes({"app": "a", "twinserve_client": "honest"})) == ""
    trusted = engine_of("justitia:predictor=class-mean", clients_with(VIP))
    line = trusted.decider.refusal(read_attributes({"app": "a", "twinserve_client": "honest"}))
    assert "app_class is missing" in line


def test_a_request_that_nobody_stamped_is_refused():
    engine = engine_of("vtc", clients_with())
    for said in ({}, {"twinserve_client": "nobody"}):
        line = engine.decider.refusal(read_attributes(said))
        assert "--middleware" in line and "\n" not in line
    assert engine.decider.refusal(read_attributes({"twinserve_client": "default"})) == ""
