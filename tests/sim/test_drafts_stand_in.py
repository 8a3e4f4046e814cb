"""The loop of a live run, mostly with drafts, on a stand-in for the engine: drafts are found,
verified and given as vLLM's scheduler counts them, from numbers in the place of texts. tests/live
has vLLM."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.sim.test_recorded_drafts import DRAFTING, again, lines, resolved
from twinserve.backends.acceptance import uniform
from twinserve.backends.live.engine.engine import StepAnswer
from twinserve.backends.live.engine.planned import PlannedStep, ScheduledStep
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.plan import Preemption
from twinserve.policies.registry import parse_policy
from twinserve.sim.results.decisions import DecisionLog, parse_log
from twinserve.sim.results.files import RunResult, write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_simulation
from twinserve.sim.twin.live import LiveRun, blank_settings
from twinserve.traces.workload import Workload


@dataclass
class Request:
    """Tokens: of its prompt, to be given, given, computed; drafts of its next step."""

    key: int
    prompt: int
    most: int
    given: int = 0
    computed: int = 0
    drafts: int = 0

    def drawn(self, salt: int) -> int:
        """0 to 3, by its output position."""
        key = np.array([self.key + salt], np.uint64)
        return int(4 * uniform(key, np.array([self.given]))[0])


class StandIn:
    """Where `VllmEngine` stands in a LiveRun."""

    vocab = 100

    def __init__(self) -> None:
        self.settings = replace(blank_settings(drafts=3, swap_blocks=9), max_step_tokens=10_000)
        self.scheduler = SimpleNamespace(drift=0, steps=0, first_drift="")
        self.requests: dict[str, Request] = {}

    def submit(self, name: str, prompt: list[int], output_tokens: int, arrival_s: float) -> None:
        self.requests[name] = Request(len(self.requests) * 100, len(prompt), output_tokens)

    def abort(self, name: str) -> None:
        del self.requests[name]

    def step(self, planned: PlannedStep) -> StepAnswer:
        for name, kind in planned.preempted:
            if kind is Preemption.RECOMPUTE:
                self.requests[name].computed = self.requests[name].drafts = 0
        for name, hit in planned.hits.items():
            self.requests[name].computed = hit
        scheduled = ScheduledStep(dict(planned.grants), dict(planned.hits), 0)
        answer = StepAnswer(scheduled, {}, [], {}, [])
        for name, tokens in planned.grants.items():
            self.compute(name, self.requests[name], tokens, answer)
        return answer

    def compute(self, name: str, request: Request, tokens: int, answer: StepAnswer) -> None:
        known = request.prompt + request.given
        request.computed += tokens
        if request.computed < known:
            return
        drafts = min(request.computed - known, request.drafts)
        right = min(request.drawn(1), drafts)
        new = min(right + 1, request.most - request.given)
        request.given += new
        request.computed = request.prompt + request.given - 1
        request.drafts = request.drawn(2)
        answer.tokens[name] = [1] * new
        if drafts:
            answer.scheduled.drafts[name], answer.accepted[name] = drafts, right
        if request.given == request.most:
            answer.finished.append(name)
        else:
            answer.found[name] = request.drafts


def live(engine: StandIn, policy: str = "vllm", predicted: bool = True, **more) -> RunResult:
    inputs = resolved(policy, **more)
    run = LiveRun(
        inputs, inputs.policies[0], engine, wall=False, predicted=predicted, decisions=True
    )
    result = run_simulation(run)
    assert run.parted() == ""
    return result


def check_again(first: RunResult, folder: Path, policy: str = "vllm", **more) -> DecisionLog:
    """The log of `first`, which a simulation makes again, step by step."""
    second = again(write_run(folder, first), policy, **more)
    log = parse_log(first.decisions)
    assert lines(log) == lines(parse_log(second.decisions))
    for name in ("requests", "steps"):
        theirs, ours = (getattr(result.rows, name) for result in (first, second))
        pd.testing.assert_frame_equal(theirs, ours, check_exact=True)
    return log


@pytest.mark.slow
@pytest.mark.parametrize("policy", DRAFTING)
def test_a_simulation_decides_as_the_live_loop_did(policy, tmp_path):
    log = check_again(live(StandIn(), policy), tmp_path / "run", policy)
    seen = [part for step in log.steps for part in (step.verified or {}).values()]
    assert {(drafts, right) for drafts, right, _ in seen} == {
        (drafts, right) for drafts in range(4) for right in range(drafts + 1)
    }
    assert sum(len(step.preempted) for step in log.steps) > 5


def test_clients_leave_with_drafts_to_verify(tmp_path):
    first = live(StandIn(), client_timeout=0.2)
    log = check_again(first, tmp_path / "run", client_timeout=0.2)
    found, lost = {}, 0  # row -> drafts for its next step
    for step in log.steps:
        lost += sum(found.get(row, 0) > 0 for row in step.withdrawn)
        found |= {row: ahead for row, (_, _, ahead) in (step.verified or {}).items()}
    assert lost > 3


def test_what_comes_back_between_two_steps_is_computed_next():
    """The real-time request takes the other one's memory. When it has ended, a plan brings the
    other back and computes nothing, and no further event would ask for the next plan."""
    config = SimulationConfig(policy=("conserve",), num_blocks=4, block_tokens=16, host_blocks=8)
    load = Workload.build([0.0, 1e-9], [40, 40], [8, 4], service_class=[1, 0])
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy("conserve"),), ())
    run = LiveRun(inputs, inputs.policies[0], StandIn(), wall=False)
    run.run()
    assert run.rows().requests.swaps.tolist() == [1, 0] and run.parted() == ""


@pytest.mark.slow
def test_steps_of_other_times_have_the_recorded_drafts(tmp_path):
    """Where neither memory nor budget takes drafts away; otherwise it matters who is beside whom.
    Steps of the stand-in take next to nothing."""
    room = {"num_blocks": 400, "max_num_batched_tokens": 10_000}
    first = live(StandIn(), predicted=False, **room)
    second = again(write_run(tmp_path / "run", first), **room)
    logs = [parse_log(result.decisions) for result in (first, second)]
    assert lines(logs[0]) != lines(logs[1])
    verified = [
        {
            row: [step.verified[row] for step in log.steps if row in (step.verified or {})]
            for row in range(len(log.requests))
        }
        for log in logs
    ]
    assert verified[0] == verified[1]


class Wrong(StandIn):
    """Says of the first step that verifies drafts something else than it did."""

    said = False

    def step(self, planned: PlannedStep) -> StepAnswer:
        answer = super().step(planned)
        if not self.said and answer.scheduled.drafts:
            self.said = True
            self.lie(next(iter(answer.scheduled.drafts)), answer)
        return answer


class OtherDrafts(Wrong):
    def lie(self, name: str, answer: StepAnswer) -> None:
        answer.scheduled.drafts[name] += 1


class MoreAccepted(Wrong):
    def lie(self, name: str, answer: StepAnswer) -> None:
        answer.accepted[name] += 1


class OtherTokens(Wrong):
    def lie(self, name: str, answer: StepAnswer) -> None:
        answer.tokens[name] *= 2


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (OtherDrafts, "verified other drafts than planned, request .*: a step verifies"),
        (MoreAccepted, "tokens of a step are booked, and the engine gave"),
        (OtherTokens, "tokens of a step are booked, and the engine gave"),
    ],
)
def test_an_engine_that_does_something_else_ends_the_run_in_one_line(engine, said):
    with pytest.raises(LiveEngineError, match=said) as error:
        live(engine())
    assert "\n" not in str(error.value) and "recorded run" not in str(error.value)
