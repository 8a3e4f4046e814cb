"""The decision log: what is read back is what was decided, whatever way the run took, and a torn
file is one line."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.sim.harness import Toy, hybrid
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.registry import PolicySpec, parse_policy
from twinserve.sim.fleet.prefix_index import content_ids
from twinserve.sim.results.decisions import (
    FILE,
    DecisionLog,
    LoggedPlan,
    LoggedStep,
    log_bytes,
    read_log,
)
from twinserve.sim.results.files import ResultsError, write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, run_policy
from twinserve.traces.workload import Workload

POLICIES = [
    "vllm",
    "bros",
    "bros:swap=false,kv=paged",
    "vllm-v0:preemption_mode=swap",
    "preemptive-wait:preemption_mode=swap",
    "conserve",  # brings requests back with plans that compute nothing
]


def inputs(workload: Workload | None = None, **settings) -> Inputs:
    """Hardware of a shipped profile with far too little memory."""
    memory = {"num_blocks": 90, "host_blocks": 60, "max_num_seqs": 16}
    given = resolve(
        SimulationConfig(
            trace="fixed:8,2", requests=1, rate=1.0, async_scheduling=False, **memory, **settings
        )
    )
    return replace(
        given,
        workload=hybrid(0, 60, rate=300, pool=6, until_s=0.3) if workload is None else workload,
    )


def logged(
    given: Inputs, spec: PolicySpec, folder
) -> tuple[DecisionLog, list[StepPlan], Simulation]:
    """The log of a run, read back from disk; its plans as they were handed over; the simulation,
    over."""
    simulation = Simulation(given, spec, decisions=True)
    core, plans = simulation.engines[0].core, []
    decide = core.plan

    def plan(now):
        plans.append(decide(now))
        return plans[-1]

    core.plan = plan
    simulation.run()
    path = folder / FILE
    path.write_bytes(
        log_bytes({"label": spec.label}, core.requests, simulation.engines[0].recorder)
    )
    return read_log(path), plans, simulation


def memory_of(plan: StepPlan) -> LoggedPlan | None:
    """What a plan does beside its grants, if anything."""
    if not (plan.admitted or plan.preempted or plan.swapped_in):
        return None
    return LoggedPlan(dict(plan.admitted), tuple(plan.preempted), tuple(plan.swapped_in))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_read_back_is_what_was_decided(policy, tmp_path):
    given = inputs(exact=True)
    log, plans, simulation = logged(given, parse_policy(policy), tmp_path)
    steps = simulation.rows().steps
    computing = [plan for plan in plans if len(plan.rows)]
    assert len(log.steps) == len(computing) == len(steps) > 100
    before: list[LoggedPlan] = []  # without a step, told with the next one
    decided = iter(log.steps)
    for plan in plans:
        if not len(plan.rows):
            before += [memory] if (memory := memory_of(plan)) else []
            continue
        step = next(decided)
        assert list(step.grants.items()) == list(
            zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        )
        assert step.admitted == dict(plan.admitted)
        assert step.swapped_in == tuple(plan.swapped_in)
        assert step.preempted == tuple(plan.preempted)
        assert step.before == tuple(before)
        before = []
    taken = [p for step in log.steps for plan in (step, *step.before) for p in plan.preempted]
    assert not before and len(taken) > 2
    assert [step.start_s for step in log.steps] == steps.start_s.tolist()
    np.testing.assert_allclose([s.start_s + s.seconds for s in log.steps], steps.end_s, rtol=1e-14)
    assert log.run == {"label": policy}


def test_requests_are_read_back_with_what_their_prompts_share(tmp_path):
    given = inputs()
    log, _, simulation = logged(given, parse_policy("vllm"), tmp_path)
    table = simulation.engines[0].core.requests
    assert [r.id for r in log.requests] == table.ids and len(set(table.ids)) > len(given.workload)
    row_of = {name: row for row, name in enumerate(given.workload.ids)}
    for request, view in zip(log.requests, table, strict=True):
        assert (request.arrival_s, request.prompt_tokens) == (view.arrival_s, view.prompt_tokens)
        if request.id in row_of:
            row = row_of[request.id]
            assert request.output_tokens == given.workload.output_tokens[row]
            assert request.prefix.tolist() == content_ids(given.workload, row, 16).tolist()
        else:
            assert request.prefix is None  # the pool's
    assert log.longest == max(int(v.prompt_tokens + v.output_tokens) for v in table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    mostly_nightly(POLICIES, "vllm", "bros:swap=false,kv=paged", "vllm-v0:preemption_mode=swap"),
)
def test_runs_spread_out_are_the_steps_of_the_exact_way(policy, tmp_path):
    fast, plans, _ = logged(inputs(), parse_policy(policy), tmp_path)
    exact, single, _ = logged(inputs(exact=True), parse_policy(policy), tmp_path)
    assert fast.steps == exact.steps
    assert [r.id for r in fast.requests] == [r.id for r in exact.requests]
    if policy != "vllm-v0:preemption_mode=swap":  # which seldom decodes undisturbed here
        assert len(plans) < 0.9 * len(single)  # runs there were


@pytest.mark.slow
def test_free_blocks_are_those_of_the_ledger_after_each_plan(tmp_path):
    given, spec = inputs(exact=True), parse_policy("vllm")
    simulation = Simulation(given, spec, decisions=True)
    core, free = simulation.engines[0].core, []
    decide = core.plan

    def plan(now):
        decided = decide(now)
        if len(decided.rows):
            free.append(core.ledger.free_blocks)
        return decided

    core.plan = plan
    simulation.run()
    (tmp_path / FILE).write_bytes(log_bytes({}, core.requests, simulation.engines[0].recorder))
    assert [step.free_blocks for step in read_log(tmp_path / FILE).steps] == free
    fast, _, _ = logged(inputs(), spec, tmp_path)
    assert [step.free_blocks for step in fast.steps] == free


class Hesitant(Toy):
    """Drops its first row in a plan that computes nothing, and admits it again with the next
    one."""

    name = "hesitant"
    uses_estimator = False

    def plan(self, view, ledger):
        if self.plans == 3:
            self.plans += 1
            ledger.begin_step()
            row = self.rows.pop(0)
            ledger.drop(row)
            self.new.append(row)
            return StepPlan(preempted=[(row, Preemption.RECOMPUTE)])
        if self.plans == 4 and self.new:
            requests, known = view.requests, view.requests.known_tokens
            row = self.new.pop()
            self.plans += 1
            ledger.begin_step()
            assert ledger.admit(row, int(known(row)))
            rows = np.array([*self.rows, row])
            assert ledger.grow_all(rows[:-1], known(rows[:-1]))
            self.rows.append(row)
            tokens = known(rows) - requests.computed_tokens[rows]
            return StepPlan(rows=rows, tokens=tokens, admitted=[(row, 0)])
        return super().plan(view, ledger)


def test_what_a_plan_without_a_step_took_away_is_kept(tmp_path):
    workload = Workload.build([0.0, 0.0], [20, 30], [8, 8])
    log, plans, simulation = logged(
        inputs(workload), PolicySpec("hesitant", own=Hesitant), tmp_path
    )
    assert not len(plans[3].rows) and plans[3].preempted == [(0, Preemption.RECOMPUTE)]
    assert len(log.steps) == len(plans) - 1
    dropped = LoggedPlan({}, ((0, Preemption.RECOMPUTE),), ())
    assert [step.before for step in log.steps] == [
        (),
        (),
        (),
        (dropped,),
        *[()] * (len(log.steps) - 4),
    ]
    assert not any(step.preempted for step in log.steps)
    assert log.steps[3].admitted == {0: 0} and log.steps[3].grants == {1: 1, 0: 23}
    assert simulation.engines[0].core.requests.recomputes.tolist() == [1, 0]


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(tmp_path):
    given, spec = inputs(), parse_policy("bros")
    one, two = (run_policy(given, spec, decisions=True) for _ in range(2))
    assert one.decisions == two.decisions and one.decisions[4:8] == bytes(4)  # gzip's time stamp
    assert run_policy(given, spec).decisions is None
    out = write_run(tmp_path / "run", one)
    assert (out / FILE).read_bytes() == one.decisions
    log = read_log(out / FILE)
    assert log.run["label"] == "bros" and log.run["kv"]["num_blocks"] == 90
    assert len(log.steps) == one.summary["scheduler"]["steps"]


@pytest.fixture(scope="module")
def content() -> bytes:
    return run_policy(
        inputs(Workload.build([0.0, 0.1], [20, 30], [8, 8])), parse_policy("vllm"), decisions=True
    ).decisions


def damages(content: bytes) -> dict[str, bytes]:
    text = gzip.decompress(content)
    odd = b'{"start_s":1,"ends_s":[2],"grants":[[0],[1]],"free_blocks":[1],"preempted":[[0,"x"]]}\n'
    step = b'{"start_s":1,"ends_s":[9],"grants":[[2],[1]],"free_blocks":[1]}\n'
    drafts = b',"verified":[[0],[1],[1],[1]]}\n'
    return {
        "cut": content[: len(content) // 2],
        "no trailer": content[:-8],
        "a bit": content[:40] + bytes([content[40] ^ 0xFF]) + content[41:],
        "not gzip": text,
        "empty": b"",
        "no lines": gzip.compress(b""),
        "not JSON": gzip.compress(text[:-20]),
        "not ours": gzip.compress(b'{"a": 1}\n'),
        "a list": gzip.compress(b"[1]\n"),
        "uneven": gzip.compress(text.replace(b'"free_blocks":[', b'"free_blocks":[5,', 1)),
        "unknown kind": gzip.compress(text + odd),
        "unknown row": gzip.compress(text + step),
        "others verified": gzip.compress(text + step.replace(b"[2]", b"[1]", 1)[:-2] + drafts),
    }


def test_a_torn_log_is_one_line(tmp_path, content):
    path = tmp_path / FILE
    path.write_bytes(content)
    assert isinstance(read_log(path).steps[0], LoggedStep)
    for how, damaged in damages(content).items():
        path.write_bytes(damaged)
        with pytest.raises(ResultsError, match="torn, or not a decision log") as caught:
            pytest.fail(f"{how}: {read_log(path)}")
        assert "\n" not in str(caught.value) and str(path) in str(caught.value), how


def test_a_log_that_is_missing_says_what_to_do(tmp_path):
    with pytest.raises(
        ResultsError,
        match="there is no decision log; run simulate again with --decisions --out DIR",
    ):
        read_log(tmp_path / FILE)
