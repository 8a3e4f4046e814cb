"""Drafts that an engine found in its texts, 0 to k of each request, are kept in the decision log,
and a simulation takes them from there: the same plans, steps and times."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from twinserve.backends.acceptance import Acceptance, DraftsPartedError, RecordedAcceptance, uniform
from twinserve.backends.live.engine.engine import StepAnswer
from twinserve.backends.live.engine.planned import PlannedStep, ScheduledStep
from twinserve.backends.live.versions import LiveEngineError
from twinserve.backends.speculating import SpeculatingBackend
from twinserve.policies.baselines.vllm_drafts import VllmDrafts
from twinserve.policies.plan import Preemption
from twinserve.policies.registry import parse_policy, policy_class, policy_for, policy_names
from twinserve.sim.results.decisions import DecisionLog, LoggedStep, parse_log
from twinserve.sim.results.files import ResultsError, RunResult, write_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.replicas import simulated_backend
from twinserve.sim.setup.run import Simulation, run_policy, run_simulation
from twinserve.sim.twin.live import (
    LiveRun,
    blank_settings,
    blocks_of_drafts,
    check_live_drafts,
    with_drafts,
)
from twinserve.sim.twin.replay import _kinds
from twinserve.traces.workload import Workload

SETTINGS = {
    "trace": "poisson", "rate": 300.0, "requests": 24, "cap_length": 180, "num_blocks": 26,
    "block_tokens": 32, "max_num_seqs": 12, "max_num_batched_tokens": 192,
    "async_scheduling": False,
}  # fmt: skip
DRAWN = "k=3,method=ngram,acceptance=0.6"
DRAFTING = [
    name if policy_class(name).default_kv == "paged" else f"{name}:kv=paged"
    for name in policy_names()
    if policy_for("drafts", policy_class(name)) is not None
]


class Found(Acceptance):
    """An engine's n-grams without an engine: at some positions of a text less than k are found."""

    drawn = False

    def ahead(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return (4 * uniform(keys + np.uint64(7), positions)).astype(np.int64)


def resolved(policy: str = "vllm", speculate: str = DRAWN, **more) -> Inputs:
    return resolve(SimulationConfig(**SETTINGS | more, policy=(policy,), speculate=speculate))


def recorded(policy: str = "vllm", **more) -> RunResult:
    """As an engine that finds drafts would have it."""
    inputs = resolved(policy, **more)

    def backend(*parts) -> SpeculatingBackend:
        made = simulated_backend(*parts)
        made.acceptance = Found(made.acceptance.rates.cumprod(), 3)
        return made

    simulation = Simulation(inputs, inputs.policies[0], decisions=True, backend=backend)
    return run_simulation(simulation)


def again(folder, policy: str = "vllm", k: int = 3, **more) -> RunResult:
    inputs = resolved(policy, f"k={k},method=ngram,recorded={folder}", **more)
    return run_policy(inputs, inputs.policies[0], decisions=True)


def lines(log: DecisionLog) -> list:
    return [(s.start_s, s.grants, s.admitted, s.preempted, s.verified) for s in log.steps]


@pytest.mark.slow
@pytest.mark.parametrize("policy", DRAFTING)
def test_a_simulation_takes_found_drafts_from_a_log(policy, tmp_path):
    first = recorded(policy)
    second = again(write_run(tmp_path / "run", first), policy)
    for name in ("requests", "steps"):
        theirs, ours = (getattr(result.rows, name) for result in (first, second))
        pd.testing.assert_frame_equal(theirs, ours, check_exact=True)
    log = parse_log(first.decisions)
    assert lines(log) == lines(parse_log(second.decisions))
    seen = [part for step in log.steps for part in (step.verified or {}).values()]
    assert {drafts for drafts, _, _ in seen} == {0, 1, 2, 3}
    assert {right for _, right, _ in seen} == {0, 1, 2, 3}
    assert sum(len(step.preempted) for step in log.steps) > 5
    assert first.summary["speculation"] == second.summary["speculation"]


def test_a_replayed_step_tells_drafts_from_prompts():
    """A prompt of 9 tokens, a decode with two drafts, and one without."""
    grants, verified = {4: 9, 5: 3, 6: 1}, {4: (0, 0, 1), 5: (2, 1, 0), 6: (0, 0, 3)}
    step = LoggedStep(0.0, 1.0, grants, {}, (), (), 9, verified=verified)
    own = {"prefill_tokens": 9, "decode_requests": 2}
    assert _kinds(step, np.array([9, 3, 1])) == own | {"draft_tokens": 2}
    assert _kinds(replace(step, verified=None), np.array([9, 1, 1])) == own


def test_a_run_that_parts_from_the_recorded_one_ends_in_one_line(tmp_path):
    """Another policy meets requests at other outputs."""
    folder = write_run(tmp_path / "run", recorded("vllm"))
    with pytest.raises(DraftsPartedError, match="was recorded there: give the policy") as error:
        again(folder, "sarathi:chunk_size=40")
    assert "\n" not in str(error.value)


def test_a_log_in_which_a_rejected_token_is_right_is_refused():
    log = parse_log(recorded().decisions)
    log.acceptance()
    verified = next(
        step.verified
        for step in log.steps
        for drafts, right, _ in (step.verified or {}).values()
        if right < drafts
    )
    row = next(row for row, (drafts, right, _) in verified.items() if right < drafts)
    drafts, right, found = verified[row]
    verified[row] = drafts, right + 1, found
    with pytest.raises(ResultsError, match=f"steps give request {log.requests[row].id} ") as error:
        log.acceptance()
    assert "\n" not in str(error.value)


def test_other_drafts_than_recorded_are_refused():
    acceptance = RecordedAcceptance()
    key = np.array([acceptance.key("a")], np.uint64)
    acceptance.note("a", 4, 2, 1)
    acceptance.note_found("a", 6, 3)
    at = np.array([4])
    assert acceptance.right(key, at, np.array([2])).tolist() == [1]
    assert acceptance.ahead(key, np.array([6])).tolist() == [3]
    with pytest.raises(DraftsPartedError, match="request a: a step verifies 3 drafts at output 4"):
        acceptance.right(key, at, np.array([3]))
    with pytest.raises(DraftsPartedError, match="no step was recorded"):
        acceptance.right(key, at + 1, np.array([2]))


def test_a_log_without_found_drafts_is_refused(tmp_path):
    inputs = resolve(SimulationConfig(**SETTINGS))
    plain = run_policy(inputs, inputs.policies[0], decisions=True)
    with pytest.raises(SettingsError, match="recorded=.*run: the decision log has no drafts that"):
        again(write_run(tmp_path / "run", plain))


def test_a_folder_without_a_log_is_refused_in_one_line(tmp_path):
    with pytest.raises(SettingsError, match="there is no decisions.jsonl.gz; record one") as error:
        again(tmp_path / "run")
    assert "\n" not in str(error.value) and str(error.value).startswith("--speculate: recorded=")


@pytest.mark.parametrize("k", [2, 4])
def test_another_number_of_drafts_than_recorded_is_refused(k, tmp_path):
    """Drafts that were found, 0 to 3, would fit both; padding would not."""
    folder = write_run(tmp_path / "run", recorded())
    with pytest.raises(SettingsError, match="was recorded with k=3; give that"):
        again(folder, k=k)


def test_a_log_of_drawn_drafts_is_refused():
    inputs = resolved()
    with pytest.raises(SettingsError, match="no engine would find the same"):
        run_policy(inputs, inputs.policies[0], decisions=True)


@pytest.mark.parametrize(
    ("given", "asynchronous", "said"),
    [
        ("k=3,method=eagle,acceptance=0.7", False, "drafts by n-grams alone, not by eagle"),
        ("k=3,method=ngram,acceptance=0.7,batches=1-4:2", False, "drop batches"),
        ("k=3,method=ngram,acceptance=0.7", True, "give --no-async-scheduling"),
    ],
)
def test_what_no_live_engine_drafts_is_refused_in_one_line(given, asynchronous, said):
    check_live_drafts(None, asynchronous)
    check_live_drafts(DRAWN, False)
    run = {"config": {"speculate": given, "async_scheduling": asynchronous}}
    for check in (
        lambda: check_live_drafts(given, asynchronous),
        lambda: with_drafts(blank_settings(), run),
    ):
        with pytest.raises(SettingsError, match=said) as error:
            check()
        assert "\n" not in str(error.value) and str(error.value).startswith("--speculate")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("k=3,method=eagle,acceptance=0.7,lookup=2-4", "lookup is for method=ngram"),
        ("k=3,recorded=run", "recorded is for method=ngram"),
        ("k=3,method=ngram,recorded=run,acceptance=0.5", "give one of"),
        ("k=3,method=ngram,recorded=run,batches=1-4:2", "drop one of them"),
        ("k=3,method=ngram,acceptance=0.5,lookup=4-2", "write tokens of the n-grams"),
        ("k=3,method=ngram,acceptance=0.5,lookup=a", "write tokens of the n-grams"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(given, said):
    with pytest.raises(SettingsError, match=said) as error:
        resolved(speculate=given)
    assert "\n" not in str(error.value) and str(error.value).startswith("--speculate")


def test_prompts_of_clients_that_left_are_forgotten():
    inputs = resolved(client_timeout=0.05, max_num_batched_tokens=24)
    run = Simulation(inputs, inputs.policies[0])
    run_simulation(run)
    policy = run.engines[0].core.policy
    assert isinstance(policy, VllmDrafts) and not policy._behind


def test_recorded_drafts_are_not_planned_ahead():
    with pytest.raises(SettingsError, match="give --no-async-scheduling"):
        resolved(speculate="k=3,method=ngram,recorded=run", async_scheduling=True)


def test_an_engine_has_room_for_drafts():
    config = {"speculate": "k=3,method=ngram,acceptance=0.5,lookup=2-4", "async_scheduling": False}
    sized = blank_settings()
    assert with_drafts(sized, {"config": {}}) is sized
    made = with_drafts(replace(sized, max_model_len=101), {"config": config})
    assert [blocks_of_drafts(config["speculate"], 24, size) for size in (2, 32)] == [48, 24]
    assert blocks_of_drafts(None, 24, 32) == 0
    assert (made.drafts, made.lookup, made.max_step_tokens) == (3, (2, 4), 3)
    # the longest request has 100 tokens, of which 99 are known to its last step with 3 drafts
    assert 99 + 3 + 3 <= made.max_model_len == 107


# The loop of a live run, mostly with drafts, on a stand-in for the engine: drafts are found,
# verified and given as vLLM's scheduler counts them, from numbers in the place of texts.
# tests/live has vLLM.
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
