"""Clients that leave: a request that is withdrawn ends once, is planned no more, and gives all its
memory back. Random ones, under every policy and ledger: test_fleet_conservation.py."""

from dataclasses import replace

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.policies.base import Policy
from twinserve.policies.justitia.clock import VirtualClock
from twinserve.policies.plan import DEVICE, HOST, Hold, KvMove, StepPlan
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.results.metrics import summarise
from twinserve.sim.setup.audit import CROWDED
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import BestEffortPool, Workload

# -- one client after another ----------------------------------------------------------------------
SMALL = CROWDED.model_copy(update={"max_num_batched_tokens": 64})


def run_of(
    workload: Workload, policy: str | type[Policy] = "vllm", at=(), **settings
) -> Simulation:
    """at: (seconds, request id) of clients that leave."""
    config = SMALL.model_copy(update=settings)
    spec = parse_policy(policy)
    inputs = Inputs(config, workload, resolve_hardware(config), (spec,), ())
    run = Simulation(inputs, spec)

    def leave():
        for time, name in at:
            yield run.clock.at(time, BEFORE_STEPS)
            engine = run.engines[0]
            row = engine.core.requests.ids.index(name)
            engine.withdraw(row, End.DISCONNECTED)
            assert not engine.withdraw(row, End.TIMED_OUT)  # nobody leaves twice

    run.clock.process(leave())
    run.run()
    return run


def requests_of(run: Simulation):
    return run.rows().requests.set_index("request_id")


def test_a_running_request_gives_its_place_at_the_next_boundary():
    """Both need all the memory: the second one begins right after the step in which the first
    one's client left."""
    both = Workload.build([0.0, 0.0], [150, 200], [60, 5], ids=["first", "second"])
    alone = requests_of(run_of(both))
    leaves = float(alone.loc["first", "first_token_s"]) + 0.05
    run = run_of(both, at=[(leaves, "first")])
    steps, found = run.rows().steps, requests_of(run)
    boundary = steps["end_s"][steps["end_s"] >= leaves].min()
    assert found.loc["second", "first_scheduled_s"] == boundary
    assert found.loc["second", "first_scheduled_s"] < alone.loc["second", "first_scheduled_s"]
    assert found.loc["first", "ended_s"] == leaves
    before = (steps["end_s"] <= boundary).sum()
    assert 0 < found.loc["first", "output_tokens"] <= before < 60


def test_who_leaves_before_the_first_plan_is_never_scheduled():
    w = Workload.build([0.0, 0.001], [100, 10], [30, 5], ids=["busy", "hasty"])
    found = requests_of(run_of(w, at=[(0.0015, "hasty")]))
    assert np.isnan(found.loc["hasty", "first_scheduled_s"])
    assert found.loc["hasty", "output_tokens"] == 0 and found.loc["busy", "finished"]


def test_an_engine_whose_last_client_leaves_ends_in_peace():
    run = run_of(Workload.build([0.0], [100], [300]), at=[(0.1, "r0")])
    assert requests_of(run).loc["r0", "outcome"] == "disconnected"
    assert run.rows().steps["end_s"].max() < 0.2


TOKENS = 200_000  # that are fetched


class Fetching(Policy):
    """Admits a request, and fetches something into its memory that takes long; nothing waits for
    the transfer but the request."""

    name = "fetching"

    def __init__(self, *given):
        super().__init__(*given)
        self.waiting, self.here = [], []

    def on_arrival(self, row, requests):
        self.waiting.append(row)

    def on_finish(self, row):
        (self.here if row in self.here else self.waiting).remove(row)

    def on_withdraw(self, row):
        self.on_finish(row)

    def plan(self, view, ledger):
        ledger.begin_step()
        plan = StepPlan()
        while self.waiting and ledger.admit(self.waiting[0], 160):
            row = self.waiting.pop(0)
            self.here.append(row)
            plan.admitted.append((row, 0))
            plan.moves.append(KvMove(row, HOST, DEVICE, TOKENS, Hold.REQUEST))
        ready = [row for row in self.here if row not in view.ready_s]
        requests = view.requests
        plan.rows = np.array(ready, np.int64)
        plan.tokens = np.minimum(
            requests.known_tokens(plan.rows) - requests.computed_tokens[plan.rows], 16
        )
        return plan


@pytest.fixture
def fetching(monkeypatch):
    """Two requests fill the memory, and the clients of both leave while data comes in; a third one
    waits. The run, and the seconds that a fetch takes."""
    from twinserve.policies import registry

    monkeypatch.setattr(registry, "policy_class", lambda name: Fetching)
    w = Workload.build([0.0, 0.0, 0.0], [150, 150, 150], [5, 5, 5], ids=["a", "b", "c"])
    run = run_of(w, "fetching", at=[(0.001, "a"), (0.001, "b")])
    profile = run.inputs.hardware.profile
    return run, TOKENS * profile.kv_bytes_per_token / profile.pcie_bytes_per_s


def test_memory_that_a_transfer_touches_is_free_when_it_has_landed(fetching):
    """The third one is admitted when the first transfer has landed, and no earlier: the link writes
    until then."""
    run, landing = fetching
    found = requests_of(run)
    admitted = found.loc["c", "first_scheduled_s"]
    assert landing > 0.1 and landing <= admitted < 1.1 * landing
    assert found["outcome"].tolist() == ["disconnected", "disconnected", "completed"]


def test_what_was_queued_for_those_who_left_stays_charged(fetching):
    """The third one's fetch waits for both of theirs, and every byte of theirs has landed."""
    run, landing = fetching
    first_token = requests_of(run).loc["c", "first_token_s"]
    assert 3 * landing <= first_token < 3.3 * landing
    port = run.engines[0].backend.link.to_device
    port.settle(run.clock.now)
    size = TOKENS * run.inputs.hardware.profile.kv_bytes_per_token
    assert port.queued_bytes == port.landed_bytes == 3 * size


# -- --client-timeout ------------------------------------------------------------------------------
def test_a_timed_out_request_is_counted_with_what_was_computed_for_it():
    w = Workload.build(
        [0.0, 0.0], [100, 60], [400, 5], ids=["long", "short"], slo_ttft_s=[10.0, 10.0]
    )
    run = run_of(w, client_timeout=0.5)
    rows = run.rows()
    found, summary = rows.requests.set_index("request_id"), summarise(rows)
    assert found.loc["long", "outcome"] == "timed_out" and found.loc["long", "ended_s"] == 0.5
    assert found.loc["long", "first_token_s"] < 0.5 and not found.loc["long", "finished"]
    assert (summary["completed"], summary["timed_out"], summary["unfinished"]) == (1, 1, 0)
    assert summary["wasted_prompt_tokens"] == 100
    assert summary["wasted_output_tokens"] == found.loc["long", "output_tokens"] > 0
    assert summary["total_output_tokens"] == 5  # wasted ones are no throughput
    rt = summary["classes"]["rt"]
    assert rt["ttft_attainment"] == 1.0 and rt["slo_attainment"] == 0.5


def test_who_is_served_in_time_is_served_as_without_timeouts():
    inputs = resolve(SimulationConfig(trace="poisson", rate=20, requests=60, client_timeout=1e6))
    patient = Simulation(inputs, inputs.policies[0])
    patient.run()
    without = inputs.config.model_copy(update={"client_timeout": None})
    plain = Simulation(replace(inputs, config=without), inputs.policies[0])
    plain.run()
    assert patient.rows().requests.equals(plain.rows().requests)
    assert patient.clock.now == plain.clock.now  # nobody waits for clients that were answered


def test_a_session_ends_with_the_turn_that_timed_out():
    """Turns two to four are never sent."""
    w = Workload.build(
        [0.0, np.nan, np.nan, np.nan, 0.0],
        [20, 20, 20, 20, 20],
        [400, 5, 5, 5, 5],
        group=[0, 0, 0, 0, -1],
        stage=[0, 1, 2, 3, 0],
        group_names=["talk"],
    )
    rows = run_of(w, client_timeout=0.3).rows()
    assert rows.requests["outcome"].tolist() == ["timed_out", "completed"]
    assert rows.never_sent == 3 and summarise(rows)["never_sent"] == 3


def test_an_application_fails_with_one_of_its_requests():
    """Of three requests of its first stage one is served, one times out, and the third, which came
    later and could still wait, is withdrawn with it; the second stage is never sent."""
    w = Workload.build(
        [0.0, 0.0, 0.2, np.nan, 0.0], [20, 20, 20, 20, 20], [5, 400, 400, 5, 5],
        group=[0, 0, 0, 0, -1], stage=[0, 0, 0, 1, 0], group_names=["graph"],
    )  # fmt: skip
    rows = run_of(w, client_timeout=0.3).rows()
    requests = rows.requests.set_index("request_id")
    assert requests["outcome"].to_dict() == {
        "r0": "completed", "r1": "timed_out", "r4": "completed", "r2": "failed",
    }  # fmt: skip
    assert requests.loc["r2", "ended_s"] == requests.loc["r1", "ended_s"] == 0.3
    assert rows.never_sent == 1
    assert summarise(rows)["applications"]["completed"] == 0


def test_a_batch_of_the_pool_goes_on_without_those_who_gave_up():
    pool = BestEffortPool(2, (8, 120), (4, 60), 0, until_s=2.0)
    w = replace(Workload.build([0.0], [20], [5]), pool=pool)
    rows = run_of(w, client_timeout=0.14).rows()
    batches = rows.requests[rows.requests["group"].notna()].groupby("stage")["outcome"].agg(list)
    assert len(batches) > 3 and any("timed_out" in batch for batch in batches[:-1])


# -- policies --------------------------------------------------------------------------------------
class Forgetless(Fetching):
    name = "forgetless"
    on_withdraw = Policy.on_withdraw


def test_a_policy_that_cannot_forget_is_refused_where_clients_may_leave(monkeypatch):
    from twinserve.policies import registry

    monkeypatch.setattr(registry, "policy_class", lambda name: Forgetless)
    resolve(SimulationConfig(policy=("forgetless",), trace="poisson", rate=5, requests=5))
    with pytest.raises(SettingsError, match="forgetless has no on_withdraw"):
        resolve(
            SimulationConfig(
                policy=("forgetless",), trace="poisson", rate=5, requests=5, client_timeout=1
            )
        )


def test_an_application_that_leaves_takes_nothing_from_the_others():
    """Justitia's fluid system by hand: demands 10, 20 and 60; 12 are served, so V = 4. Then the
    second one leaves, and 12 more are shared by two: V = 10, where the first one ends."""
    clock = VirtualClock()
    first, second, third = (clock.arrive(demand) for demand in (10, 20, 60))
    assert clock.advance(12) == 0 and clock.V == pytest.approx(4)
    clock.leave(second)
    assert clock.N == 2
    assert clock.advance(12) == 0 and clock.V == pytest.approx(10)
    clock.leave(first)  # it has ended: nothing changes
    assert clock.N == 1 and third == 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    mostly_nightly(
        ["justitia", "srjf", "vllm-sjf", "parrot", "vtc", "kv-share"], "justitia", "vtc"
    ),
)
def test_nothing_is_left_of_applications_whose_clients_left(policy):
    inputs = resolve(
        SimulationConfig(
            policy=(policy,), trace="apps", requests=30, max_num_seqs=8, client_timeout=1.8
        )
    )
    run = Simulation(inputs, inputs.policies[0])
    run.run()
    rows = run.rows()
    assert {"timed_out", "failed"} <= set(rows.requests["outcome"]) and rows.never_sent > 0
    policy = run.engines[0].core.policy
    assert not policy.running and not policy.paused and not len(policy.waiting)
    if policy.name == "justitia":
        assert not policy.here and policy.clock.N == 0
