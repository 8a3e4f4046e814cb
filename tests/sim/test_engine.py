"""The engine process: idling and waking, arrivals that cut runs, replicas on one clock, the
watchdog, decision overhead. `--cold-start`. Transfers are in test_pcie.py."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim.harness import Affine, Toy, build, hybrid, same_rows, simulate
from twinserve.policies.base import EngineLimits
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.plan import StepPlan
from twinserve.policies.registry import policy_names
from twinserve.sim.engine.clock import BEFORE_STEPS, PLANS, STEPS, Clock
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate as simulated
from twinserve.traces.workload import BestEffortPool, Workload

STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)  # every step takes a second


def starts(sim) -> list[float]:
    return sim.steps.start_s.tolist()


# -- the clock -------------------------------------------------------------------------------------
def test_equal_times_go_by_priority_then_by_sequence():
    clock, seen = Clock(), []
    for name, priority in (
        ("plan", PLANS),
        ("step b", STEPS + 1),
        ("step a", STEPS),
        ("arrival", BEFORE_STEPS),
    ):
        for i in range(2):
            clock.at(1.0, priority).callbacks.append(
                lambda _, text=f"{name} {i}": seen.append(text)
            )
    clock.run()
    assert seen == [f"{n} {i}" for n in ("arrival", "step a", "step b", "plan") for i in range(2)]


def test_an_event_is_at_its_time_to_the_last_bit_and_never_in_the_past():
    clock, times = Clock(), []
    late = 0.1 + 0.7  # 0.7999999999999999
    clock.at(0.1).callbacks.append(
        lambda _: clock.at(late).callbacks.append(lambda _: times.append(clock.now))
    )
    clock.run()
    assert times == [late]
    with pytest.raises(ValueError, match="an event at 0.5 s, when it is"):
        clock.at(0.5)


@pytest.mark.parametrize(
    ("next_s", "next_priority", "reached"),
    [
        (None, STEPS, True),
        (1.5, BEFORE_STEPS, True),
        (1.0, PLANS, True),
        (1.0, STEPS, False),  # it was put there first
        (1.0, BEFORE_STEPS, False),
        (0.5, PLANS, False),
    ],
)
def test_time_moves_on_without_an_event_only_where_nothing_comes_before(
    next_s, next_priority, reached
):
    clock = Clock()
    if next_s is not None:
        clock.at(next_s, next_priority)
    assert clock.reach(1.0, STEPS) is reached
    assert clock.now == (1.0 if reached else 0.0)


def test_time_does_not_move_back():
    clock = Clock()
    assert clock.reach(1.0, STEPS)
    assert not clock.reach(0.5, STEPS)
    assert clock.now == 1.0


# -- idle, wake, cut -------------------------------------------------------------------------------
def test_an_idle_engine_starts_at_the_arrival():
    sim = simulate(Workload.build([3.25, 10.5], [8, 8], [2, 1]), model=STEP)
    assert starts(sim) == [3.25, 4.25, 10.5]
    assert sim.requests.last_token_s.tolist() == [5.25, 11.5]


@pytest.mark.parametrize("fast", [True, False])
def test_an_arrival_waits_for_the_next_boundary_and_cuts_a_run_there(fast):
    sim = simulate(Workload.build([0.0, 4.5], [8, 8], [20, 3]), model=STEP, fast=fast)
    first, second = sim.requests.itertuples()
    assert second.first_scheduled_s == 5.0
    assert second.last_token_s == 8.0
    assert first.last_token_s == 20.0
    assert starts(sim) == [float(i) for i in range(20)]
    # prefill, run, with the newcomer: 2, run to the end
    assert len(sim.audits[0].decisions) == (5 if fast else 20)


@pytest.mark.parametrize("fast", [True, False])
def test_an_arrival_at_the_very_end_of_a_step_is_in_the_next_decision(fast):
    sim = simulate(Workload.build([0.0, 4.0, 4.0], [8, 8, 8], [20, 2, 1]), model=STEP, fast=fast)
    assert sim.requests.first_scheduled_s.tolist() == [0.0, 4.0, 4.0]
    assert sim.steps.set_index("start_s").prefill_requests[4.0] == 2


def test_an_arrival_with_the_end_of_a_request_sees_its_seat_free():
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=100)
    sim = simulate(Workload.build([0.0, 3.0], [8, 8], [3, 1]), model=STEP, limits=limits)
    assert sim.requests.first_scheduled_s.tolist() == [0.0, 3.0]
    assert sim.steps.waiting.tolist() == [0, 0, 0, 0]


class Calls(VllmPolicy):
    """Notes what it is told, and how much its first request had emitted then."""

    def setup(self):
        super().setup()
        self.calls = []

    def _note(self, what):
        self.calls.append((what, int(self.requests.output_tokens[0])))

    def on_arrival(self, row, requests):
        self.requests = requests
        super().on_arrival(row, requests)
        self._note(f"arrival {row}")

    def on_finish(self, row):
        super().on_finish(row)
        self._note(f"finish {row}")

    def on_outcome(self, outcome):
        self._note("outcome")

    def plan(self, view, ledger):
        self._note("plan")
        return super().plan(view, ledger)


def test_a_policy_hears_of_ends_then_of_arrivals_then_plans():
    sim = simulate(Workload.build([0.0, 2.5], [8, 8], [3, 1]), Calls, model=STEP, fast=False)
    calls = sim.engines[0].core.policy.calls
    assert [what for what, _ in calls[:3]] == ["arrival 0", "plan", "outcome"]
    boundary = calls.index(("finish 0", 3))
    assert [what for what, _ in calls[boundary:]] == [
        "finish 0", "outcome", "arrival 1", "plan", "finish 1", "outcome",
    ]  # fmt: skip


def test_an_arrival_shows_a_policy_the_same_table_on_the_fast_path():
    """The newcomer comes in the middle of a run; the policy sees the running request as of the
    boundary."""
    seen = []
    for fast in (True, False):
        sim = simulate(Workload.build([0.0, 6.5], [8, 8], [20, 3]), Calls, model=STEP, fast=fast)
        seen.append(
            [call for call in sim.engines[0].core.policy.calls if call[0].startswith("arrival")]
        )
    assert seen[0] == seen[1] == [("arrival 0", 0), ("arrival 1", 7)]


# -- replicas --------------------------------------------------------------------------------------
def test_replicas_on_one_clock_do_not_touch_each_other():
    """Each gives the rows of a simulation of its own with the requests that were routed to it."""
    rng = np.random.default_rng(3)
    n = 40
    arrival, prompt, output = (
        np.cumsum(rng.exponential(0.05, n)),
        rng.integers(8, 300, n),
        rng.integers(1, 40, n),
    )
    both = simulate(Workload.build(arrival, prompt, output), replicas=2, blocks=120)
    home = both.requests.set_index("request_id").replica
    for replica in (0, 1):
        mine = [i for i in range(n) if home[f"r{i}"] == replica]
        assert len(mine) > 5
        ids = [f"r{i}" for i in mine]
        alone = simulate(
            Workload.build(arrival[mine], prompt[mine], output[mine], ids=ids), blocks=120
        )
        for table in ("requests", "steps"):
            expected, found = getattr(alone, table), getattr(both, table)
            found = found[found.replica == replica].drop(columns="replica").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, expected.drop(columns="replica"), check_exact=True)


@pytest.mark.parametrize("fast", [True, False])
def test_what_one_replica_causes_at_a_boundary_of_another_is_in_the_decision_there(fast):
    """Steps of all replicas end on full seconds. The last request of a batch ends on one replica,
    and the next batch goes to both, the other being at the end of a step (or in the middle of a
    run) at that instant."""
    pool = BestEffortPool(2, (8, 8), (3, 9), seed=2, until_s=60.0)
    workload = replace(Workload.build([0.0, 0.0], [8, 8], [200, 200]), pool=pool)
    requests = simulate(workload, model=STEP, replicas=2, fast=fast).requests
    batches = requests[requests.service_class == "be"]
    last = batches.loc[batches.groupby("stage").last_token_s.idxmax()]
    assert last.replica.nunique() == 2 and batches.stage.max() > 5
    assert (batches.groupby("stage").replica.nunique() == 2).all()
    assert batches.first_scheduled_s.tolist() == batches.arrival_s.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "bros"])
def test_replicas_whose_steps_end_together_agree_on_both_paths(policy):
    """Closed loops send work from one replica's end to the others in the middle of their runs, at
    the same instant, and who has fewest requests then depends on which end came first."""
    for seed in range(4):
        drawn = hybrid(
            seed, 24, pool=3, prefix_block=None, until_s=60.0, sessions=0, applications=0
        )
        workload = replace(
            drawn,
            arrival_s=np.floor(drawn.arrival_s * 30),
            output_tokens=drawn.output_tokens % 7 + 1,
            pool=replace(drawn.pool, output_tokens=(1, 5)),
        )
        settings = {"model": STEP, "replicas": 3, "recount": False}
        runs = [simulate(workload, policy, fast=fast, **settings) for fast in (True, False)]
        assert runs[0].steps.end_s.duplicated().sum() > 20
        same_rows(runs[0].rows, runs[1].rows)


# -- watchdog --------------------------------------------------------------------------------------
class Lazy(Toy):
    """Plans nothing from its plan number `from_plan` on."""

    from_plan = 0

    def plan(self, view, ledger):
        if self.plans >= self.from_plan:
            self.plans += 1
            ledger.begin_step()
            return StepPlan()
        return super().plan(view, ledger)


def lazy(from_plan):
    return type("Lazy", (Lazy,), {"from_plan": from_plan, "name": "lazy"})


def test_a_policy_that_plans_nothing_is_stopped_with_a_diagnosis():
    with pytest.raises(NoProgressError) as caught:
        simulate(Workload.build([1.5, 9.0], [40, 8], [3, 3], ids=["first", "second"]), lazy(0))
    text = str(caught.value)
    assert text.startswith(
        "policy 'lazy' made no progress at 1.500000 s: 1 requests wait, 512 of 512 KV blocks are "
        "free"
    )
    assert "'first' with 40 tokens (3 blocks)" in text


def test_a_policy_that_stops_while_it_holds_memory_is_found_at_the_end():
    with pytest.raises(NoProgressError, match="policy 'lazy' made no progress at 9.0"):
        simulate(Workload.build([0.0, 9.0], [40, 8], [30, 3]), lazy(3), model=STEP)


def test_a_stuck_replica_is_found_after_the_others_went_on():
    sim = build(Workload.build([0.0, 0.0], [40, 8], [30, 30]), Toy, model=STEP, replicas=2)
    stuck = sim.engines[0].core
    plan = stuck.plan
    stuck.plan = lambda now: plan(now) if now < 2 else StepPlan()
    with pytest.raises(NoProgressError, match="made no progress at 30.0"):
        sim.run()


def test_a_run_until_some_time_is_no_reason_to_complain():
    sim = build(Workload.build([0.0], [8], [100]), model=STEP).run(until=10.5)
    assert not sim.requests.finished.any()


# -- decision overhead -----------------------------------------------------------------------------
@pytest.mark.slow
def test_decision_overhead_lengthens_every_step_alike_on_both_paths():
    workload = hybrid(2, 30)
    plain = simulate(workload, blocks=100)
    runs = [simulate(workload, blocks=100, overhead=0.0013, fast=fast) for fast in (True, False)]
    same_rows(runs[0].rows, runs[1].rows)
    # there were runs at all
    assert len(runs[0].audits[0].decisions) < len(runs[1].audits[0].decisions)
    assert runs[0].steps.end_s.iloc[-1] > plain.steps.end_s.iloc[-1]
    one = simulate(Workload.build([0.0], [8], [4]), model=STEP, overhead=0.25)
    assert one.steps.end_s.tolist() == [1.25, 2.5, 3.75, 5.0]


def test_measured_overhead_is_the_time_that_planning_took(monkeypatch):
    ticks = iter(np.arange(0, 1000, 0.125))  # every look at the clock is 1/8 s later
    monkeypatch.setattr("twinserve.sim.engine.loop.time.perf_counter", lambda: float(next(ticks)))
    sim = simulate(Workload.build([0.0], [8], [3]), model=STEP, overhead=None)
    assert sim.steps.end_s.tolist() == [1.125, 2.25, 3.375]


# far apart: nobody waits for anybody, so nothing else changes
APART = {"trace": "fixed:400,30", "rate": 0.01, "requests": 6, "seed": 3}


def steps_and_requests(**settings):
    (result,) = simulated(SimulationConfig(**{**APART, **settings})).values()
    return result.rows.steps, result.rows.requests


@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), *SOME_POLICIES))
def test_the_first_step_takes_that_much_longer(policy):
    warm, _ = steps_and_requests(policy=(policy,))
    cold, requests = steps_and_requests(policy=(policy,), cold_start=0.4)
    longer = (cold.end_s - cold.start_s) - (warm.end_s - warm.start_s)
    assert longer[0] == pytest.approx(0.4) and np.allclose(longer[1:], 0, atol=1e-9)
    ttft = requests.first_token_s - requests.arrival_s
    assert ttft[0] == pytest.approx(ttft[1] + 0.4)


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_engine_has_its_own(replicas):
    _, requests = steps_and_requests(cold_start=2.0, replicas=replicas, rate=1e6)
    ttft = requests.first_token_s - requests.arrival_s
    assert (ttft > 2.0).all() and requests.replica.nunique() == replicas


def test_steps_at_once_are_those_of_single_steps():
    same = {"cold_start": 0.7, "rate": 20.0, "requests": 60}
    for table, exact in zip(
        steps_and_requests(**same), steps_and_requests(exact=True, **same), strict=True
    ):
        assert_frame_equal(table, exact, check_exact=True)
