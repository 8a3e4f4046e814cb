"""Asynchronous scheduling: each plan is made while the step before it runs. What a policy is shown
and told, when things happen, and that whole runs still add up. Worked examples use steps of one
second."""

from functools import partial
from unittest import mock

import numpy as np
import pytest

from tests.identity.ours import vllm_stepper
from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim import harness
from tests.sim.harness import Affine, Toy, build, hybrid, same_rows, simulate
from tests.sim.stepper import Stepper
from twinserve.policies.base import EngineLimits, Traits
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import ledger_names
from twinserve.policies.requests import End, RequestTable
from twinserve.sim.engine.loop import Engine
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import Simulation
from twinserve.sim.setup.run import simulate as run
from twinserve.traces.workload import Workload

STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)


simulate_async = partial(simulate, asynchronous=True)


# -- time ------------------------------------------------------------------------------------------
def test_a_lone_request_takes_as_long_as_without():
    workload = Workload.build([3.25, 10.5], [8, 8], [3, 1])
    same_rows(simulate_async(workload, model=STEP).rows, simulate(workload, model=STEP).rows)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("arrival", [4.5, 5.0])
def test_what_arrives_during_a_step_is_in_the_plan_after_the_next(fast, arrival):
    """The step from 5 to 6 is planned at 4, so the newcomer is planned at 5 and runs from 6 on, a
    step later than without."""
    workload = Workload.build([0.0, arrival], [8, 8], [20, 3])
    sim = simulate_async(workload, model=STEP, fast=fast)
    first, second = sim.requests.itertuples()
    assert (second.first_scheduled_s, second.first_token_s, second.last_token_s) == (5.0, 7.0, 9.0)
    assert first.last_token_s == 20.0
    assert sim.steps.start_s.tolist() == [float(i) for i in range(20)]
    assert simulate(workload, model=STEP).requests.first_token_s[1] == 6.0
    # at 0: the prompt, then ahead the first decode; runs end where they are cut; the last plan has
    # nothing left to do
    decisions = len(sim.audits[0].decisions)
    assert decisions == 21 if not fast else decisions < 12


@pytest.mark.parametrize("overhead, ends", [(0.25, [1.25, 2.25, 3.25]), (1.5, [2.5, 4.0, 5.5])])
def test_planning_is_hidden_by_the_step_before(overhead, ends):
    """Only the first plan has no step to hide behind. Longer ones delay each step until they are
    done: begun at 1.5, the second is done at 3, half a second after the first step has ended."""
    workload = Workload.build([0.0], [8], [3])
    for fast in (True, False):
        sim = simulate_async(workload, model=STEP, overhead=overhead, fast=fast)
        assert sim.steps.end_s.tolist() == ends
    assert simulate(workload, model=STEP, overhead=0.25).steps.end_s.tolist() == [1.25, 2.5, 3.75]


def test_who_keeps_an_ending_request_gives_its_seat_away_a_step_later():
    """The last token of the first request is computed from 1 to 2, and the step after that is
    planned at 1."""
    workload = Workload.build([0.0, 0.0, 0.0], [8, 8, 8], [2, 9, 1])
    limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=100)
    begin = {}
    for policy in ("vllm", "vllm-v0", "bros"):
        limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=100, max_model_len=100)
        sim = simulate_async(workload, policy, model=STEP, limits=limits)
        begin[policy] = sim.requests.first_token_s[2]
    assert begin == {"vllm": 4.0, "vllm-v0": 3.0, "bros": 3.0}


def test_a_plan_stands_although_a_request_ends_if_no_other_waits():
    """The prompts and the first decode are planned at 0, and what follows each end with it."""
    workload = Workload.build([0.0] * 3, [8] * 3, [5, 9, 30])
    at_once, singly = (simulate_async(workload, model=STEP, fast=fast) for fast in (True, False))
    same_rows(at_once.rows, singly.rows)
    assert [len(sim.audits[0].decisions) for sim in (at_once, singly)] == [5, 31]


# -- what a policy sees ----------------------------------------------------------------------------
class Looks(VllmPolicy):
    """Notes the first request's columns at each plan, and what it is told."""

    def setup(self):
        super().setup()
        self.seen = []

    def plan(self, view, ledger):
        one = view.requests[0]
        shown = (one.computed_tokens, one.output_tokens, one.in_flight, one.known_tokens)
        self.seen.append((view.now, *shown, one.last_token_s))
        return super().plan(view, ledger)

    def on_finish(self, row):
        super().on_finish(row)
        self.seen.append(f"end {row}")

    def on_outcome(self, outcome):
        self.seen.append(f"outcome {outcome.ends_s[-1]}")


def test_a_step_is_shown_as_if_it_had_ended_when_it_began():
    sim = simulate_async(Workload.build([0.0], [8], [3]), Looks, model=STEP, fast=False)
    none = pytest.approx(np.nan, nan_ok=True)
    assert sim.engines[0].core.policy.seen == [
        (0.0, 0, 0, 0, 8, none),
        # the prompt is being computed: its token is promised, as of the start
        (0.0, 8, 1, 1, 9, 0.0),
        "outcome 1.0",
        (1.0, 9, 2, 1, 10, 1.0),
        "outcome 2.0",
        # the last token: nothing is left to compute, and nothing promised
        (2.0, 10, 2, 0, 10, 2.0),
        "end 0",
        "outcome 3.0",
    ]


class Forgets(Looks):
    traits = Traits()


def test_by_default_a_policy_hears_of_an_end_when_its_last_step_begins():
    sim = simulate_async(Workload.build([0.0], [8], [2]), Forgets, model=STEP, fast=False)
    told = [
        event if isinstance(event, str) else event[0] for event in sim.engines[0].core.policy.seen
    ]
    assert told == [0.0, 0.0, "outcome 1.0", "end 0", 1.0, "outcome 2.0"]
    assert sim.requests.finished.all() and sim.requests.last_token_s[0] == 2.0


def test_a_part_of_a_prompt_promises_no_token():
    limits = EngineLimits(max_num_batched_tokens=5)
    sim = simulate_async(
        Workload.build([0.0], [8], [2]), Looks, model=STEP, fast=False, limits=limits
    )
    shown = [event[1:5] for event in sim.engines[0].core.policy.seen if not isinstance(event, str)]
    assert shown[:3] == [(0, 0, 0, 8), (5, 0, 0, 8), (8, 1, 1, 9)]


def tight_stepper(blocks: int, outputs: int) -> Stepper:
    """Two requests of 8 tokens in blocks of 4: each prompt takes two, and the first token after it
    a third."""
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=16)
    stepper = vllm_stepper(blocks, 4, limits, True, True)
    stepper.submit("a", 8, 5)
    stepper.submit("b", 8, outputs)
    return stepper


def test_a_victims_token_in_flight_still_comes():
    stepper = tight_stepper(blocks=5, outputs=3)
    requests = stepper.requests
    assert stepper.step().scheduled == {"a": 8, "b": 8}
    # the first tokens are on their way; only one of the two can have a third block
    seen = stepper.step()
    assert (seen.scheduled, seen.preempted) == ({"a": 1}, ["b"])
    # a's second is promised; b has got its first though it waits
    assert requests.output_tokens.tolist() == [2, 1]
    assert requests.in_flight.tolist() == [1, 0] and requests.computed_tokens[1] == 0
    ended = []
    while not ended:
        seen = stepper.step()
        ended = seen.finished
    assert ended == ["a"] and not seen.scheduled  # it kept its memory until its last token had come
    seen = stepper.step()
    assert seen.hits == {"b": 8} and seen.scheduled == {"b": 1}  # all but its token was found again


def test_a_victim_whose_last_token_comes_ends_where_it_waits():
    stepper = tight_stepper(blocks=4, outputs=1)
    stepper.submit("c", 8, 1)
    policy, core = stepper.core.policy, stepper.core
    assert stepper.step().scheduled == {"a": 8, "b": 8}
    seen = stepper.step()
    assert (seen.scheduled, seen.preempted, seen.finished) == ({"a": 1}, ["b"], ["b"])
    assert list(policy.waiting) == [2] and (core.active, core.holding) == (2, 1)
    assert stepper.requests.recomputes.tolist() == [0, 1, 0]
    core.ledger.check()


def test_a_step_that_a_failure_cuts_off_has_computed_nothing():
    stepper = tight_stepper(blocks=6, outputs=5)
    for _ in range(2):
        stepper.step()  # the second step is under way
    requests = stepper.requests
    assert requests.computed_tokens.tolist() == [9, 9]
    stepper.core.fail(End.FAILED, 2.0, *stepper._under_way)
    assert requests.computed_tokens.tolist() == [8, 8]
    assert requests.output_tokens.tolist() == [1, 1]


# -- memory ----------------------------------------------------------------------------------------
def test_a_block_is_found_only_when_its_tokens_are_known():
    table = RequestTable()
    ledger = PagedLedger(table, 8, 4)
    ledger.known_text_only = True
    row = table.submit("a", prompt_tokens=6)
    assert ledger.admit(row, 6) and ledger.pool.contents == 32  # names for its own text
    table.computed_tokens[row], table.output_tokens[row], table.in_flight[row] = 6, 2, 1
    assert ledger.grow(row, 8)  # one token known, one promised: block 2 is full on paper
    assert (ledger.pool.content >= 0).sum() == 1
    table.in_flight[row] = 0
    assert ledger.grow_all(np.array([row]), np.array([8]))
    assert (ledger.pool.content >= 0).sum() == 2
    ledger.check()


class KnownTextOnly(PagedLedger):
    known_text_only = True


@pytest.mark.slow
def test_step_by_step_and_with_nothing_in_flight_the_ledger_is_the_plain_one():
    workload = hybrid(3, 40)
    with mock.patch.object(harness, "ledger_class", lambda name: KnownTextOnly):
        late = simulate(workload, blocks=90, fast=False)
    same_rows(late.rows, simulate(workload, blocks=90).rows)


# -- whole runs ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(harness.POLICIES, "bros", *SOME_POLICIES))
def test_runs_add_up(policy):
    """Tight memory, every plan and outcome audited: requests end complete, tokens and memory are
    conserved, times are in order."""
    workload = hybrid(0, 60, pool=6)
    sim = simulate_async(workload, policy, blocks=90, host_blocks=60, fast=False)
    requests, steps, audit = sim.requests, sim.steps, sim.audits[0]
    assert requests.finished.all()
    emitted = requests.set_index("request_id").output_tokens
    assert emitted.loc[list(workload.ids)].tolist() == workload.output_tokens.tolist()
    in_steps = int((steps.prefill_tokens + steps.decode_requests).sum())
    needed = int((requests.prompt_tokens + requests.output_tokens - 1).sum())
    assert in_steps == audit.granted_tokens == needed + audit.dropped_tokens - audit.hit_tokens
    gaps = sim.rows.gaps
    assert gaps["count"].sum() == (requests.output_tokens - 1).sum()
    spans = (requests.last_token_s - requests.first_token_s).sum()
    assert (gaps.gap_s * gaps["count"]).sum() == pytest.approx(spans, rel=1e-9)
    times = requests[["arrival_s", "first_scheduled_s", "first_token_s", "last_token_s"]].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()
    start, end = steps.start_s.to_numpy(), steps.end_s.to_numpy()
    assert (end > start).all() and (start[1:] >= end[:-1]).all()
    ledger = sim.engines[0].core.ledger
    assert ledger.free_blocks == 90 and ledger.usage().host_tokens == 0
    assert steps.kv_used_blocks.max() > 0.8 * 90
    assert audit.dropped_tokens or requests.swaps.sum()


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(harness.policy_names(), *SOME_POLICIES))
def test_true_output_lengths_change_nothing_before_a_last_token_is_computed(policy):
    """A plan may know of an end one step ahead: the engine does not offer the request again.
    Nothing before that."""
    rng = np.random.default_rng(3)
    one = hybrid(4, 60, prefix_block=None, sessions=0, applications=0, rate=60)
    longer = harness.Workload.build(
        one.arrival_s,
        one.prompt_tokens,
        one.output_tokens + rng.integers(1, 40, len(one)),
        service_class=one.service_class,
        priority=one.priority,
        slo_ttft_s=one.slo_ttft_s,
        slo_tpot_s=one.slo_tpot_s,
    )
    settings = {"blocks": 90, "host_blocks": 60, "fast": False, "recount": False}
    a, b = (simulate_async(w, policy, **settings) for w in (one, longer))
    first_end = min(a.requests.last_token_s.min(), b.requests.last_token_s.min())
    last_step = max(sim.steps.start_s[sim.steps.end_s <= first_end].max() for sim in (a, b))
    decisions = [[d for d in sim.audits[0].decisions if d.now < last_step] for sim in (a, b)]
    assert decisions[0] == decisions[1] and len(decisions[0]) > 1


# -- settings --------------------------------------------------------------------------------------
class Synchronous(Toy):
    asynchronous = False


def test_a_policy_that_needs_the_tokens_is_refused_in_one_line():
    said = "policy 'toy' needs the last step's tokens to plan; give --no-async-scheduling"
    with pytest.raises(PolicyError, match=said) as refused:
        build(Workload.build([0.0], [8], [2]), Synchronous, asynchronous=True)
    assert "\n" not in str(refused.value)
    build(Workload.build([0.0], [8], [2]), Synchronous)


def test_an_engine_that_does_not_know_outcomes_ahead_is_refused():
    (engine,) = build(Workload.build([0.0], [8], [2]), asynchronous=True).engines
    backend = engine.backend
    assert backend.plans_ahead
    backend.plans_ahead = False
    with pytest.raises(PolicyError, match="give --no-async-scheduling"):
        Engine(engine.clock, engine.core, backend, engine.recorder)


@pytest.mark.slow
def test_the_setting_is_on_unless_it_is_turned_off_and_is_in_run_json():
    settings = {"trace": "poisson", "rate": 8.0, "duration": 20.0, "offline": True}
    off, on = (
        run(SimulationConfig(**settings, **more))["vllm"]
        for more in ({"async_scheduling": False, "host_time": "none"}, {})
    )
    assert [result.config["config"]["async_scheduling"] for result in (off, on)] == [False, True]
    assert on.rows.requests.finished.all()
    # the same work, but most requests arrive during a step, and so wait for one more
    waits = [(r.rows.requests.first_token_s - r.rows.requests.arrival_s).mean() for r in (off, on)]
    assert waits[1] > waits[0]
    again = run(SimulationConfig(**settings, async_scheduling=True))["vllm"]
    same_rows(again.rows, on.rows)


@pytest.mark.parametrize("kv", [None, *ledger_names()])
def test_the_ledger_of_an_asynchronous_run_publishes_late(kv):
    from twinserve.sim.setup.inputs import resolve

    settings = {"trace": "poisson", "rate": 1.0, "duration": 5.0, "offline": True, "kv": kv}
    for on in (True, False):
        inputs = resolve(SimulationConfig(**settings, async_scheduling=on))
        ledger = Simulation(inputs, inputs.policies[0]).engines[0].core.ledger
        assert ledger.known_text_only is on
