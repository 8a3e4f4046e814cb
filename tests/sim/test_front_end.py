"""A front end before the fleet: what its clients see, what the engine and its policy know, and that
without one nothing changes."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.parameters import mostly_nightly
from tests.sim.harness import Small, build, hybrid, of_rows, same_rows, simulate
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.profiles.front_end import NO_DELAYS, Delays, Service
from twinserve.sim.cli.main import main, simulate_main
from twinserve.sim.cli.simulate import headline
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.front_end import ServerThread
from twinserve.sim.results.files import RunResult, read_run, write_run
from twinserve.sim.results.metrics import latencies, summarise
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_policy
from twinserve.traces.workload import Workload

SLOW = Delays(request_s=0.02, prompt_token_s=1e-4, response_s=0.03)
ENGINES = ["engine_arrival_s", "engine_first_token_s"]
CROWD = {"blocks": 150, "client_timeout": 0.25}


def by_request(run: Small) -> pd.DataFrame:
    return run.requests.set_index("request_id")


def listed(n: int = 30, prompt: int = 200, output: int = 20, **columns) -> Workload:
    return Workload.build(np.arange(n) * 0.05, np.full(n, prompt), np.full(n, output), **columns)


# -- nothing in between ----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(["vllm", "bros", "justitia", "mlfq"], "vllm"))
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_front_end_that_takes_no_time_changes_no_bit(policy, replicas):
    def run(front_end):
        workload = hybrid(3, pool=6)
        return simulate(workload, policy, front_end=front_end, replicas=replicas, **CROWD).rows

    without, there = run(None), run(NO_DELAYS)
    assert (without.requests["outcome"] == "timed_out").any()
    assert not set(ENGINES) & set(without.requests)
    for name in ENGINES:
        before = without.requests[name.removeprefix("engine_")]
        pd.testing.assert_series_equal(there.requests[name], before, check_names=False)
    bare = {name: getattr(there, name).drop(columns=ENGINES) for name in ("requests", "unsent")}
    same_rows(without, replace(there, **bare))


def test_what_only_clients_see_changes_no_step_of_an_open_loop():
    late = Delays(0.0, 0.0, 0.25)
    without, there = (simulate(listed(), front_end=d).rows for d in (None, late))
    pd.testing.assert_frame_equal(without.steps, there.steps, check_exact=True)
    pd.testing.assert_frame_equal(without.gaps, there.gaps, check_exact=True)
    pd.testing.assert_frame_equal(without.placements, there.placements, check_exact=True)
    for name in ("first_token_s", "last_token_s", "ended_s"):
        assert (there.requests[name] == without.requests[name] + 0.25).all()


# -- two clocks ------------------------------------------------------------------------------------
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_clients_and_engine_differ_by_the_terms_of_every_request(replicas):
    run = simulate(hybrid(5, pool=4), front_end=SLOW, replicas=replicas)
    rows = run.requests
    assert rows["finished"].all()
    on_the_way = SLOW.request_s + SLOW.prompt_token_s * rows["prompt_tokens"]
    assert (rows["engine_arrival_s"] == rows["arrival_s"] + on_the_way).all()
    assert (rows["first_token_s"] == rows["engine_first_token_s"] + SLOW.response_s).all()
    engine = rows["engine_first_token_s"] - rows["engine_arrival_s"]
    more = latencies(rows)["ttft_s"] - engine
    np.testing.assert_allclose(more, on_the_way + SLOW.response_s, rtol=1e-9)
    stays = run.rows.placements.set_index("request_id")["placed_s"]
    assert (stays[rows["request_id"]].to_numpy() == rows["engine_arrival_s"]).all()


def test_a_policy_knows_when_the_engine_got_a_request_and_no_more():
    told = []

    class Told(VllmPolicy):
        def on_arrival(self, row, requests):
            told.append((requests.ids[row], requests.arrival_s[row], requests.placed_s[row]))
            super().on_arrival(row, requests)

    rows = by_request(simulate(listed(), Told, front_end=SLOW, estimator=False))
    assert len(told) == len(rows)
    for name, arrival_s, placed_s in told:
        assert arrival_s == placed_s == rows.loc[name, "engine_arrival_s"]


# -- closed loops ----------------------------------------------------------------------------------
def test_the_next_turn_is_sent_when_the_last_one_was_seen():
    workload = Workload.build(
        np.array([0.0, np.nan, np.nan]), np.full(3, 100), np.full(3, 10),
        group=np.zeros(3, np.int64), stage=np.arange(3), delay_s=np.array([0.0, 0.0, 0.5]),
        group_names=["one"],
    )  # fmt: skip
    rows = simulate(workload, front_end=SLOW).requests.sort_values("stage")
    sent, seen = rows["arrival_s"].to_numpy(), rows["last_token_s"].to_numpy()
    assert sent[1] == seen[0] and sent[2] == seen[1] + 0.5


# -- clients that give up --------------------------------------------------------------------------
def alone(front_end: Delays | None, timeout: float | None) -> pd.Series:
    """The only request of a run; without a front end it takes its client `takes` seconds."""
    workload = listed(n=1)
    return simulate(workload, front_end=front_end, client_timeout=timeout).requests.iloc[0]


def test_a_client_may_leave_while_its_request_is_in_the_front_end():
    row = alone(SLOW, 0.5 * SLOW.request_side(200))
    assert (row["outcome"], row["output_tokens"]) == ("timed_out", 0)
    assert np.isnan(row["first_scheduled_s"])


@pytest.mark.slow
def test_past_saturation_all_requests_fail_from_some_moment_on():
    """Each seat is then taken by a request that has waited too long to end in time."""

    def run(rate: float, timeout_s: float) -> pd.DataFrame:
        trace = f"vllm:num_prompts=300,request_rate={rate},burstiness=inf,random_input_len=100"
        config = SimulationConfig(
            trace=trace, profile="llama-3.1-8b@h100", max_num_seqs=8, client_timeout=timeout_s,
            slo="none", front_end="vllm",
        )  # fmt: skip
        inputs = resolve(config)
        return run_policy(inputs, inputs.policies[0]).rows.requests

    assert (run(7.0, 4.0)["outcome"] == "completed").all()
    rows = run(12.0, 4.0)
    ends_well = (rows["outcome"] == "completed").to_numpy()
    serves_s = float((rows["last_token_s"] - rows["first_scheduled_s"])[ends_well].median())
    fails_from_s = (4.0 - serves_s) / (12.0 * serves_s / 8 - 1)
    assert rows["arrival_s"][ends_well].max() == pytest.approx(fails_from_s, rel=0.1)
    assert ends_well.sum() == pytest.approx(12.0 * fails_from_s, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_whatever_clients_do(seed):
    run = simulate(hybrid(seed, pool=6), front_end=SLOW, replicas=2, **CROWD)
    rows, sent = run.requests, len(run.requests)
    assert rows["outcome"].notna().all() and set(rows["outcome"]) >= {"completed", "timed_out"}
    assert rows["request_id"].is_unique and sent == run.source.submitted
    done = rows[rows["finished"]]
    assert ((done["last_token_s"] - done["arrival_s"]) <= 0.25 + 1e-9).all()
    assert (done["ended_s"] == done["last_token_s"]).all()


def test_a_token_is_seen_when_the_replica_that_gave_it_sent_it():
    """A request that goes on elsewhere had its first token before; it may end there without one."""

    def row(*crashes: float) -> pd.Series:
        failures = [{"replica": i, "at_s": at_s} for i, at_s in enumerate(crashes)]
        config = SimulationConfig(
            trace="fixed:200,200", requests=2, rate=0.01, profile="llama-3.1-8b@h100",
            slo="none", front_end="vllm", replicas=2, on_failure="migrate",
            failures=json.dumps(failures),
        )  # fmt: skip
        inputs = resolve(config)
        return run_policy(inputs, inputs.policies[0]).rows.requests.iloc[0]

    undisturbed = row(1e6)
    crash_s = undisturbed["arrival_s"] + 0.5
    moved, gone = row(crash_s), row(crash_s, crash_s + 0.001)
    assert moved["outcome"] == "completed" and moved["last_token_s"] > undisturbed["last_token_s"]
    assert moved["first_token_s"] == gone["first_token_s"] == undisturbed["first_token_s"]
    assert gone["outcome"] == "failed" and crash_s - 0.1 < gone["last_token_s"] < crash_s + 0.01


# -- threads ---------------------------------------------------------------------------------------
SERVICE = Service(
    accept_s=1e-3, submit_s=1e-3, prompt_token_s=1e-6, tokenise_s=2e-6, step_s=3e-4, token_s=2e-5,
    chunk_s=3e-5, client_request_s=4e-4, client_chunk_s=3e-5, detokenise_s=5e-7,
)  # fmt: skip
QUEUED = Delays(1e-3, 0.0, 5e-4, SERVICE)


def crowd(n: int = 200, output: int = 20, at_once: bool = True) -> Workload:
    arrival = np.zeros(n) if at_once else np.arange(n) * 2.0
    return Workload.build(arrival, np.full(n, 100), np.full(n, output))


def beyond(run: Small) -> np.ndarray:
    """Seconds of each TTFT that are not the engine's."""
    rows = run.requests
    engine = rows["engine_first_token_s"] - rows["engine_arrival_s"]
    return (rows["first_token_s"] - rows["arrival_s"] - engine).to_numpy()


def test_alone_a_request_takes_the_sum_of_its_jobs():
    more = beyond(simulate(crowd(4, at_once=False), front_end=QUEUED))
    jobs = 4e-4 + 2e-3 + 3e-6 * 100 + 1e-3  # until it is in the engine's queue
    jobs += 3e-4 + 2e-5 + 5e-7 * 100 + 1.5e-5 + 1.5e-5 + 5e-4
    np.testing.assert_allclose(more, jobs, rtol=1e-6)


@pytest.mark.parametrize("output", [1, 20])
def test_replicas_whose_steps_end_together_detokenise_alike(output):
    """The end of the first one's step is heard before the second's is booked, which asynchronous
    scheduling recorded when it began."""
    service = replace(SERVICE, client="many", detokenise_s=0.02)
    run = simulate(
        crowd(2, output), asynchronous=True, replicas=2, front_end=replace(QUEUED, service=service)
    )
    rows = run.requests
    assert rows["engine_first_token_s"].nunique() == rows["first_token_s"].nunique() == 1
    assert rows["first_token_s"][0] - rows["engine_first_token_s"][0] > 100 * 0.02


@pytest.mark.slow
def test_requests_at_once_wait_for_each_other():
    one, two, none = (
        beyond(simulate(crowd(), front_end=replace(QUEUED, service=service)))
        for service in (SERVICE, replace(SERVICE, servers=2), replace(SERVICE, client="none"))
    )
    assert one.max() > 200 * (2e-3 + 1e-4)  # each one's work on the thread is behind the others'
    assert 0.4 < two.max() / one.max() < 0.8
    assert none.mean() != one.mean()


def test_requests_at_once_are_all_taken_in_before_the_first_is_sent_on():
    service = replace(SERVICE, client="none", client_request_s=0.0)
    rows = simulate(crowd(100), front_end=replace(QUEUED, service=service)).requests
    there_s = np.sort(rows["engine_arrival_s"] - rows["arrival_s"])
    assert there_s[0] > 100 * service.accept_s
    each_s = service.accept_s + service.submit_s + 100 * service.prompt_token_s
    assert 100 * each_s < there_s[-1] < 100 * each_s * 1.5  # outputs of the first ones between


def test_no_token_is_seen_before_its_step_ended_and_none_before_an_earlier_one():
    run = simulate(crowd(), front_end=QUEUED, replicas=2)
    rows = run.requests
    assert rows["finished"].all()
    assert (rows["first_token_s"] > rows["engine_first_token_s"]).all()
    for _, mine in rows.sort_values("engine_first_token_s").groupby("replica"):
        assert mine["first_token_s"].is_monotonic_increasing
    assert (rows["last_token_s"] >= rows["first_token_s"]).all()
    assert (rows["ended_s"] == rows["last_token_s"]).all()


def in_turns(
    service: Service, steps: list[tuple[float, float, float]]
) -> tuple[list[float], float]:
    """When outputs are written, and when the thread is free: one output after another, those that
    wait together in one go."""
    seen, free, i = [], 0.0, 0
    while i < len(steps):
        begin = max(free, steps[i][0])
        taken = [step for step in steps[i:] if step[0] <= begin]
        stream = service.chunk_s * taken[0][1]
        fixed = sum(service.step_s + service.token_s * tokens for _, tokens, _ in taken)
        fixed += service.detokenise_s * sum(prompts for _, _, prompts in taken)
        seen += [begin + fixed + 0.5 * stream] * len(taken)
        free, i = begin + fixed + stream, i + len(taken)
    return seen, free


@pytest.mark.parametrize("tokens", [1, 60, 400])
@pytest.mark.parametrize("pieces", [1, 7, 300])
def test_runs_of_steps_are_handled_as_their_steps_would_be(tokens, pieces):
    rng = np.random.default_rng(tokens)
    ends, thread = np.cumsum(rng.exponential(0.01, 300)), ServerThread(SERVICE, 0)
    prompts = 4000.0 * rng.integers(0, 2, 300)  # tokens, of first outputs
    for part, first in zip(*(np.array_split(a, pieces) for a in (ends, prompts)), strict=True):
        thread.outputs(part, np.full(len(part), float(tokens)), first)
    steps = zip(ends.tolist(), [tokens] * 300, prompts.tolist(), strict=True)
    seen, free = in_turns(SERVICE, list(steps))
    np.testing.assert_allclose(thread.seen_s, seen)
    assert thread.free_s == pytest.approx(free)


def test_an_idle_engine_plans_its_second_step_when_the_first_is_launched():
    """A request that comes in between is in the second step, not in the third."""

    def first_tokens(launch_s: float) -> list[float]:
        workload = Workload.build(np.array([0.0, 0.002]), np.full(2, 400), np.full(2, 5))
        run = build(workload)
        for engine in run.engines:
            engine.core.asynchronous, engine.launch_s = True, launch_s
        asked = run.clock.process(under_way(run, 0.002))
        times = by_request(run.run())["first_token_s"].tolist()
        assert asked.value == (True, None)  # a second step's memory is not known before its plan
        return times

    def under_way(run: Small, at_s: float):
        yield run.clock.at(at_s, BEFORE_STEPS)
        (engine,) = run.engines
        return engine._step is not None, engine.run()

    (one, late), (same, soon) = first_tokens(0.0), first_tokens(0.0025)
    assert same == one > 0.0025 and soon < late


# -- metrics ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_with_a_front_end_is_written_read_and_repeated(tmp_path, capsys):
    words = "-t fixed:300,10 --rate 4 --requests 40 --quiet".split()
    assert run_command(simulate_main, [*words, "--out", str(tmp_path / "none")]) is None
    assert "engine TTFT" not in capsys.readouterr().out
    front = ["--front-end", "vllm", "--out", str(tmp_path / "vllm")]
    assert run_command(simulate_main, [*words, *front]) is None
    assert "engine TTFT mean / p90 / p99, ms" in capsys.readouterr().out

    found, without = read_run(tmp_path / "vllm"), read_run(tmp_path / "none")
    assert summarise(found.rows) == of_rows(found.summary)
    assert found.config["front_end"]["threads"]["accept_s"] == 0.0004
    assert "front_end" not in without.config and not set(ENGINES) & set(without.rows.requests)
    more = found.summary["mean_ttft_ms"] - found.summary["mean_engine_ttft_ms"]
    assert 2.5 < more < 6.5

    again = ["--config", str(tmp_path / "vllm" / "run.json"), "--out", str(tmp_path / "again")]
    assert run_command(simulate_main, [*again, "--quiet"]) is None
    assert read_run(tmp_path / "again").summary == found.summary
    page = tmp_path / "page.html"
    assert run_command(main, ["report", str(tmp_path / "vllm"), "--out", str(page)]) is None
    assert "engine TTFT" in page.read_text()


def test_requests_that_were_never_sent_are_written_with_the_others(tmp_path):
    run = simulate(hybrid(1, pool=4), front_end=SLOW, **CROWD)
    assert run.rows.never_sent
    read = read_run(write_run(tmp_path / "run", RunResult(run.rows))).rows
    same = {"check_exact": True, "check_dtype": False}
    for name in ("requests", "unsent"):
        pd.testing.assert_frame_equal(getattr(read, name), getattr(run.rows, name), **same)
    assert read.unsent["arrival_s"].isna().all()


def test_what_stands_before_the_engine_is_said_before_a_run():
    config = SimulationConfig(trace="fixed:40,4", rate=5.0, requests=3)
    said = "front end vllm: one thread, 1.02 ms a request"
    there = config.model_copy(update={"front_end": "vllm"})
    assert said in headline(resolve(there)) and "front end" not in headline(resolve(config))


def test_a_profiles_release_counts_and_each_engine_launches_as_its_ranks_do():
    settings = {"trace": "fixed:40,4", "rate": 5.0, "requests": 3, "front_end": "vllm:chat=yes"}
    old = resolve(SimulationConfig(profile="qwen3-8b@h100", **settings))
    hardware = old.hardware
    of_file = hardware.profile.model_copy(update={"engine_version": "0.11.0"})
    parsed = replace(old, hardware=replace(hardware, profile=of_file)).delays.service
    assert parsed.accept_s - old.delays.service.accept_s == pytest.approx(1.2 * 12.7e-3)
    candidate = resolve(SimulationConfig(engine_version="0.11.0rc2", **settings))
    assert candidate.delays.service.accept_s == parsed.accept_s
    assert not Simulation(candidate, candidate.policies[0]).engines[0].core.asynchronous
    pools = [{"profile": "qwen3-8b@h100:tp2"}, {"profile": "qwen3-8b@h100"}]
    fleet = resolve(SimulationConfig(fleet=json.dumps({"pools": pools}), **settings))
    engines = Simulation(fleet, fleet.policies[0]).engines
    assert [engine.launch_s for engine in engines] == [0.0, pytest.approx(3e-3)]


def run_command(command, words: list[str]) -> object:
    """None, or the status that it exits with."""
    try:
        command(words)
    except SystemExit as stop:
        return stop.code or None
