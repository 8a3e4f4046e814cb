"""BROS with drafts: by hand, and that drafts cost no deadline and no request its place.

By hand a prompt token takes 1 ms, a decode 10 ms, and one that verifies three drafts 30 ms.
"""

import copy
from itertools import product

import numpy as np
import pandas as pd
import pytest

from tests.parameters import mostly_nightly
from tests.policies.policy_runs import BE, BY_HAND, RT
from tests.sim.stepper import granted
from tests.sim.test_speculation import SMALL
from twinserve.policies.bros.drafts import BrosDrafts
from twinserve.policies.drafting import Drafting, DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.paged.drafted import DraftedLedger
from twinserve.policies.parts.estimators import Batch, ModelEstimator
from twinserve.policies.parts.verifying import VerifyingLinear, VerifyingModel
from twinserve.policies.plan import StepOutcome, StepPlan, Verified
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable, State
from twinserve.profiles.forms.bros import PhaseCost
from twinserve.sim.engine.drafting import DraftingCore
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import make_estimator, resolve
from twinserve.sim.setup.run import Simulation, run_simulation

VERIFYING = VerifyingLinear(BY_HAND.model, BY_HAND.swap, PhaseCost(0.030, 0.0, 0.0), 3)
THREE = Drafting.of("ngram", 3)


class Table:
    """Steps of a policy, which end when and give as much as they are told."""

    def __init__(self, options: str = "", blocks: int = 100, drafting: Drafting = THREE) -> None:
        limits = DraftingLimits(max_model_len=400, kv_bytes_per_token=1, drafting=drafting)
        spec = parse_policy(f"bros:kv=paged{options and ','}{options}")
        self.requests = RequestTable()
        self.ledger = DraftedLedger(self.requests, blocks, 4)
        self.ledger.look_ahead(drafting, 400)
        self.policy = BrosDrafts(limits, spec.given, VERIFYING)
        self.core = DraftingCore(self.requests, self.policy, self.ledger, drafting)

    def arrives(self, name: str, prompt: int = 4, tpot=np.nan, at=0.0, ttft=np.nan) -> None:
        slo = {"slo_ttft_s": ttft, "slo_tpot_s": tpot}
        kind = BE if name >= "x" else RT
        self.core.submit(name, prompt_tokens=prompt, service_class=kind, arrival_s=at, **slo)

    def iteration(self, now: float, end: float, right: int = 0) -> dict[str, int]:
        """Tokens granted, by name. right: of each row's drafts, how many."""
        plan = self.core.plan(now)
        rows = plan.rows[self.core.emitting(plan)]
        known = self.requests.known_tokens(rows) - self.requests.computed_tokens[rows]
        drafted = plan.tokens[np.isin(plan.rows, rows)] - known
        accepted = np.minimum(drafted, right)
        sure = np.zeros(len(rows), bool)
        verified = Verified(accepted + 1, drafted, accepted, sure)
        self.core.complete(plan, StepOutcome(now, np.array([end]), rows, [], verified))
        self.ledger.check()
        return granted(plan, self.requests.ids)


def decoding(options: str = "", **values) -> Table:
    """a and b have got their first token at 10 ms and 11 ms, and 50 ms for each further one."""
    table = Table(options, **values)
    table.arrives("a", tpot=0.05)
    assert table.iteration(0.0, 0.010) == {"a": 4}
    table.arrives("b", tpot=0.05, at=0.010)
    return table


# -- by hand ---------------------------------------------------------------------------------------
def test_drafts_take_the_time_that_the_nearest_deadline_leaves():
    table = decoding()
    # a is due at 60 ms. Beside the prompt of 4 ms its decode takes 10, with drafts 30 ms.
    assert table.iteration(0.010, 0.030) == {"a": 4, "b": 4}
    # Both are due at 80 ms. Two decodes take 20 ms, with the drafts of one 40, of both 60 ms.
    assert table.iteration(0.030, 0.070) == {"a": 4, "b": 1}
    # Both are due at 120 ms, and the step can begin at 95 ms only: 25 ms are left.
    assert table.iteration(0.095, 0.115) == {"a": 1, "b": 1}


def test_best_effort_drafts_come_after_all_real_time_ones():
    table = decoding()
    table.arrives("x")
    table.iteration(0.010, 0.030)
    assert table.iteration(0.030, 0.070) == {"a": 4, "b": 1, "x": 1}  # 50 of 50 ms


def test_always_leaves_out_whoever_does_not_fit_with_drafts():
    table = decoding("drafts=always")
    table.iteration(0.010, 0.030)
    assert table.iteration(0.030, 0.070) == {"a": 4}  # with b 60 of 50 ms


@pytest.mark.parametrize(
    ("pace", "expected"), [("next", {"a": 4, "b": 1}), ("given", {"a": 1, "b": 4})]
)
def test_tokens_that_came_together_put_the_next_deadline_off(pace, expected):
    """At 30 ms a got four tokens and b its first. With `next` both are due at 80 ms, and a came
    first; with `given` a is due at 230 ms, so that b is the more urgent one."""
    table = decoding(f"draft_pace={pace}")
    table.iteration(0.010, 0.030, right=3)
    assert table.requests.output_tokens[:2].tolist() == [5, 1]
    assert table.iteration(0.030, 0.070) == expected


def test_drafts_take_free_memory_alone():
    """Three rows of seven tokens hold six of eight blocks, with room for the next token; drafts
    reach into a third block each, and two are free."""
    table = Table(blocks=8)
    for name in "abx":
        table.arrives(name, prompt=7)
    table.iteration(0.0, 0.010)
    assert table.iteration(0.010, 0.020) == {"a": 4, "b": 4, "x": 1}
    assert table.ledger.free_blocks == 0 and (table.requests.state[:3] == State.RUNNING).all()


def test_drafts_leave_in_time_whoever_is_more_urgent_requests_without_memory():
    """A late newcomer of 20 ms comes before b, which is due in 25 ms: behind it b's 10 ms come too
    late, so that b bounds nothing. The newcomer finds no memory, and b alone is in time; with its
    drafts, 30 ms, it is not."""
    table = Table(blocks=6)
    table.arrives("b", prompt=12, tpot=0.05)
    assert table.iteration(0.0, 0.012) == {"b": 12}
    table.arrives("a", prompt=20, tpot=0.05, at=0.010, ttft=0.020)
    assert table.iteration(0.037, 0.047) == {"b": 1}


def test_drafts_take_no_time_of_whoever_gave_its_place_to_best_effort_work():
    """a is due in 28 ms, b in 33. With x all three take 30 ms, so that x replaces b: 20 ms, and 12
    of an average iteration leave b in time. a's draft fits into 28 ms, and would make b late."""
    table = Table(drafting=Drafting.of("ngram", 1))
    table.arrives("a", tpot=0.028)
    table.arrives("b", tpot=0.033)
    table.arrives("x")
    assert table.iteration(0.0, 0.012) == {"a": 4, "b": 4, "x": 4}
    assert table.iteration(0.012, 0.032) == {"a": 1, "x": 1}


# -- whole runs ------------------------------------------------------------------------------------
RUN = {
    "trace": "poisson", "rate": 60.0, "requests": 40, "cap_length": 150, "pool": 12,
    "slo": "ttft=0.05,tpot=0.012", "profile": "llama-3.1-8b@h100", "step_times": "roofline",
    "async_scheduling": False, "num_blocks": 90, "max_num_seqs": 24, "max_num_batched_tokens": 256,
    "host_time": "none",
}  # fmt: skip


def simulation(options: str = "", **settings) -> Simulation:
    policy = f"bros:kv=paged{options and ','}{options}"
    inputs = resolve(SimulationConfig(**(RUN | settings), policy=(policy,)))
    return Simulation(inputs, inputs.policies[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["spare", "always"])
@pytest.mark.parametrize("method", mostly_nightly(["ngram", "eagle"], "eagle"))
def test_no_drafts_are_no_speculation_bit_for_bit(mode, method):
    """Steps in which nobody has drafts are those of `bros` without speculation, where memory is
    short, too. An EAGLE head looks ahead, so that more of it is in use; there is plenty then."""
    room = {} if method == "ngram" else {"num_blocks": 2000}
    drafts = f"k=3,method={method},acceptance=0.5,batches=1-256:0"
    plain = run_simulation(simulation("swap=false", exact=True, **room)).rows
    zero = run_simulation(simulation(f"drafts={mode}", speculate=drafts, **room)).rows
    pd.testing.assert_frame_equal(plain.requests, zero.requests, check_exact=True)
    common = [name for name in plain.steps.columns if name in zero.steps.columns]
    if method == "eagle":
        common = [name for name in common if not name.startswith("kv_")]
    pd.testing.assert_frame_equal(plain.steps[common], zero.steps[common], check_exact=True)
    assert len(plain.steps) > 100 and not zero.steps.draft_tokens.any()


def check_beside_none(policy: BrosDrafts, view, ledger, plan: StepPlan, shadow) -> int:
    """`shadow`: what the policy plans where nobody has drafts. Returns drafts granted."""
    assert np.array_equal(plan.rows, shadow.rows) and plan.admitted == shadow.admitted
    assert plan.preempted == shadow.preempted and (plan.tokens >= shadow.tokens).all()
    drafts = int((plan.tokens - shadow.tokens).sum())
    if drafts:
        requests, rows = view.requests, plan.rows
        resident = requests.computed_tokens[rows]
        prompt = (requests.known_tokens(rows) - resident > 1) | (requests.output_tokens[rows] == 0)
        seconds = [
            policy.estimator.seconds(
                Batch(rows, prompt, one.tokens, resident + one.tokens, np.zeros(len(rows), int))
            )
            for one in (shadow, plan)
        ]
        due = policy.queues.residual(rows[requests.service_class[rows] == RT], requests, view.now)
        lost = (due >= seconds[0]) & (due < seconds[1])
        assert not lost.any(), "a deadline is lost"
    return drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "seed"),
    mostly_nightly(
        product(["", "draft_pace=given", "chunk=32"], [0, 1, 2]), ("", 0), ("chunk=32", 1)
    ),
)
def test_drafts_cost_no_request_its_place_and_no_deadline(options, seed):
    """At each plan: the same requests are served, admitted and dropped as if nobody had drafts, and
    each gets no fewer tokens; whoever could be in time with that step still can, by the policy's
    estimate."""
    small = {"requests": 16, "pool": 8, "num_blocks": 80, "cap_length": 100}
    made = simulation(options, speculate="k=3,acceptance=0.7", seed=seed, **small)
    policy = made.engines[0].core.policy
    decide, seen = policy.plan, []

    def plan(view, ledger):
        del policy.plan
        other, its_view, its_ledger = copy.deepcopy((policy, view, ledger))
        its_view.requests.draft_tokens[:] = 0
        shadow = other.plan(its_view, its_ledger)
        policy.plan = plan
        before = copy.deepcopy(view)
        made_plan = decide(view, ledger)
        seen.append(check_beside_none(policy, before, ledger, made_plan, shadow))
        return made_plan

    policy.plan = plan
    run_simulation(made)
    cut = made.rows().steps
    assert sum(seen) > 60 and (cut.draft_tokens < 3 * cut.decode_requests).any()


@pytest.mark.slow
def test_a_draft_models_slots_are_charged_to_the_budget():
    """All but the longest grant, each with a slot of the drafter, keep to the budget."""
    drafts = "k=3,acceptance=0.7,method=draft_model,draft=llama-3.1-8b@h100"
    for mode in ("spare", "always"):
        settings = {"max_num_batched_tokens": 48, "pool": 30, "slo": "none", "num_blocks": 400}
        made = simulation(f"chunk=16,drafts={mode}", speculate=drafts, **settings)
        core, most = made.engines[0].core, []
        decide = core.plan

        def plan(now, decide=decide, most=most):
            found = decide(now)
            if len(found.rows):
                charged = found.tokens + 1
                most.append(int(charged.sum() - charged.max()))
            return found

        core.plan = plan
        run_simulation(made)
        assert 40 < max(most) <= 48


# -- estimates -------------------------------------------------------------------------------------
def test_verification_is_priced_as_the_model_takes_it():
    """Both estimators beside the simulator's own times, of decodes with all drafts and with none;
    the paper's form within the error that it has without drafts, some tens of per cent."""
    settings = {**SMALL, "speculate": "k=3,acceptance=0.7", "policy": ("bros:kv=paged",)}
    inputs = resolve(SimulationConfig(**settings))
    perfect = make_estimator(
        inputs.config.model_copy(update={"estimator": "perfect"}), inputs.hardware
    )
    paper = inputs.estimator
    assert isinstance(paper, VerifyingLinear) and isinstance(perfect, VerifyingModel)
    for n in (1, 16, 64):
        rows, none = np.arange(n), np.zeros(n, np.int64)
        for new in (1, 4):
            batch = Batch(rows, none > 0, none + new, none + 500 + new, none)
            assert paper.seconds(batch) == pytest.approx(perfect.seconds(batch), rel=0.4)
            assert paper.prefixes(batch)[-1] == paper.seconds(batch)
            halves = paper.seconds(batch[n // 2 :], batch[: n // 2])
            assert halves == pytest.approx(paper.seconds(batch), rel=1e-12)
        plain = Batch(rows, none > 0, none + 1, none + 501, none)
        assert perfect.seconds(plain) < perfect.seconds(batch)
        assert paper.seconds(plain) < paper.seconds(batch) or n == 1  # the fits cross there


def test_without_drafts_an_estimate_is_that_of_an_engine_without_speculation():
    inputs = resolve(SimulationConfig(**SMALL, policy=("bros",)))
    plain = make_estimator(
        inputs.config.model_copy(update={"estimator": "perfect"}), inputs.hardware
    )
    assert type(plain) is ModelEstimator
    settings = {
        **SMALL,
        "speculate": "k=2,method=ngram,acceptance=0.5",
        "policy": ("bros:kv=paged",),
    }
    drafted = resolve(SimulationConfig(**settings)).estimator
    assert drafted.model == inputs.estimator.model


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("bros", "bidirectional ledger has no room for drafts; use kv=paged"),
        ("bros:chunk=fit,kv=paged", "bros without chunk=fit plans with drafts"),
        ("bros:kv=paged,swap=true", "swap=true: engines that speculate do not swap; write"),
        ("bros:kv=paged,draft_pace=given,group_size=4", "are two token groups; drop one of them"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(policy, said):
    settings = {**SMALL, "speculate": "k=3,acceptance=0.7", "policy": (policy,)}
    with pytest.raises((SettingsError, PolicyError), match=said) as error:
        Simulation((inputs := resolve(SimulationConfig(**settings))), inputs.policies[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["drafts=always", "draft_pace=given"])
def test_an_option_of_drafts_without_drafts_is_refused(option):
    inputs = resolve(SimulationConfig(**SMALL, policy=(f"bros:{option}",)))
    with pytest.raises(PolicyError, match="without drafts it does nothing; give --speculate"):
        Simulation(inputs, inputs.policies[0])
