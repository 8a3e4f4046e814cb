"""`sim.setup.audit` passes policies that keep the rules and names what others broke."""

import itertools

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.policies.base import Policy
from twinserve.policies.parts.fill import fill
from twinserve.policies.parts.runs import further_decodes
from twinserve.policies.plan import Preemption
from twinserve.policies.requests import State
from twinserve.sim.setup.audit import AuditError, Auditor, check_policy
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation


class Orderly(Policy):
    """First come, first served; keeps every rule."""

    name = "orderly"
    uses_estimator = False

    def setup(self):
        self.rows = []

    def on_arrival(self, row, requests):
        self.rows.append(row)

    def on_finish(self, row):
        self.rows.remove(row)

    def step_tokens(self, longest):
        return self.limits.max_num_seqs * longest

    def plan(self, view, ledger):
        ledger.begin_step()
        plan = fill(view, ledger, np.array(self.rows, np.int64), seats=self.limits.max_num_seqs)
        plan.moves = ledger.take_moves()
        return plan


class Twice(Orderly):
    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        plan.rows, plan.tokens = np.repeat(plan.rows, 2), np.repeat(plan.tokens, 2)
        return plan


class Lopsided(Orderly):
    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        plan.tokens = plan.tokens[:-1]
        return plan


class Nothing(Orderly):
    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        plan.tokens = plan.tokens * 0
        return plan


class TooMuch(Orderly):
    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        plan.tokens = plan.tokens + 1
        return plan


class WithoutMemory(Orderly):
    """Grants rows that hold KV their next token without asking the ledger."""

    def plan(self, view, ledger):
        requests = view.requests
        rows = np.array(
            [row for row in self.rows if requests.state[row] == State.RUNNING], np.int64
        )
        if not len(rows):
            return super().plan(view, ledger)
        ledger.begin_step()
        plan = fill(view, ledger, rows[:0], seats=1)
        plan.rows, plan.tokens = rows, requests.known_tokens(rows) - requests.computed_tokens[rows]
        return plan


class NotBegun(Orderly):
    """Plans on what the ledger granted for the last step."""

    def plan(self, view, ledger):
        rows = np.array(self.rows, np.int64)
        return fill(view, ledger, rows, seats=self.limits.max_num_seqs)


class NotAdmitted(Orderly):
    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        plan.admitted = []
        return plan


class Innocent(Orderly):
    """Says that it took memory from somebody who had none."""

    def plan(self, view, ledger):
        plan = super().plan(view, ledger)
        waiting = [
            row
            for row in self.rows
            if view.requests.state[row] == State.WAITING and row not in plan.rows
        ]
        plan.preempted = plan.preempted + [(row, Preemption.RECOMPUTE) for row in waiting[:1]]
        return plan


class Modest(Orderly):
    """Promises a live engine smaller steps than it plans."""

    def step_tokens(self, longest):
        return longest


class Hasty(Orderly):
    """Others wait for a seat, or hold memory without running, and it promises all the same that
    nothing will change."""

    def plan(self, view, ledger):
        ledger.begin_step()
        longest = sorted(self.rows, key=lambda row: (view.requests.output_tokens[row], row))
        plan = fill(view, ledger, np.array(longest, np.int64), seats=2)
        plan.moves = ledger.take_moves()
        plan.valid_for = further_decodes(plan, view.requests, ledger)
        return plan


class Moody(Orderly):
    """Decides by something that is not in the view."""

    moods = itertools.count()

    def plan(self, view, ledger):
        if next(Moody.moods) % 7 == 0:
            self.rows.reverse()
        return super().plan(view, ledger)


@pytest.mark.slow
@pytest.mark.parametrize("kv", mostly_nightly([None, ["paged"]], ["paged"]))
def test_a_policy_that_keeps_the_rules_passes(kv):
    assert check_policy(Orderly, kv=kv, seeds=[0]) > 300 * (1 if kv else 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Twice, "a row is granted twice"),
        (Lopsided, "the plan's rows and tokens differ in length"),
        (Nothing, r"grants request '\w+' no token"),
        (TooMuch, "more tokens than the row has left"),
        (WithoutMemory, "a grant without memory"),
        (NotBegun, r"planned without ledger.begin_step\(\), which must come first"),
        (NotAdmitted, "a grant to a row without KV"),
        (Innocent, "preempted without KV"),
        (Modest, r"tokens in a step, and step_tokens\(\d+\) promises at most \d+"),
        (Hasty, "valid_for is too large"),
        (Moody, "a second run gave other rows"),
    ],
)
def test_a_broken_rule_is_named(policy, rule):
    with pytest.raises(AuditError, match=rule) as caught:
        check_policy(policy, kv=["paged"], seeds=range(3))
    assert str(caught.value).startswith("policy orderly on ledger paged, seed ")


@pytest.mark.nightly
def test_options_and_specs_are_policies_too():
    assert check_policy("round-robin:batch_size=2,chunk=9", kv=["bidirectional"], seeds=[1]) > 300


def test_the_auditor_of_a_run_of_ones_own():
    inputs = resolve(
        SimulationConfig(policy=("vllm",), trace="poisson", requests=20, rate=20, num_blocks=900)
    )
    run = Simulation(inputs, inputs.policies[0])
    auditor = Auditor(run.engines[0].core, inputs.workload.longest, recount=False)
    run.run()
    assert auditor.plans == len(run.engines[0].decision_seconds) > 20
