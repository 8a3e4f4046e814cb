"""The validation experiment: its bookkeeping on runs made here, and the errors on the measured
ones."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.parameters import mostly_nightly
from tests.truth import truth
from twinserve.experiments.validation import main as validation
from twinserve.experiments.validation.runs import (
    CASES,
    STATISTICS,
    MeasuredRun,
    latencies,
    profile_of,
    read_run,
    simulate,
    simulated_samples,
    workload,
)
from twinserve.experiments.validation.step_times import (
    Interval,
    by_range,
    counted,
    intervals,
    shortage,
    step_times,
    validate_events,
)
from twinserve.profiles.composition import StepComposition, decode_work
from twinserve.profiles.profile import load_profile
from twinserve.traces.workload import WorkloadError

CASE = CASES[1]
RANKS = CASES[3]


ENGINE = {"data_parallel_size": 1, "enable_expert_parallel": False, "max_num_seqs": 8}
ENGINE |= {"max_model_len": None, "max_num_batched_tokens": 512}


def _write_run(truth: Path, case, requests: pd.DataFrame, **engine) -> MeasuredRun:
    """A run's files, as the measured ones have them, and what is read of them."""
    folder = truth / "vllm_runs" / case.folder
    folder.mkdir(parents=True, exist_ok=True)
    requests.to_csv(folder / "requests.csv", index=False)
    series = {"t": [1.0, 2.0], "running": [1, 2], "waiting": 0, "kv_cache_pct": 0.0}
    pd.DataFrame(series).to_csv(folder / "timeseries.csv", index=False)
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": ENGINE | engine}))
    shared = [[*range(4), *range(100 * i, 100 * i + 40)] for i in range(1, len(requests) + 1)]
    with gzip.open(truth / "vllm_runs" / f"prefix_blocks_{case.prefix}.json.gz", "wt") as file:
        json.dump(shared, file)
    return read_run(truth, case)


def _requests(n: int = 30) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    columns = {"request_id": range(n), "arrival_s": np.cumsum(rng.exponential(0.05, n)) - 0.01}
    columns |= {"input_toks": rng.integers(70, 600, n), "output_toks": rng.integers(2, 60, n)}
    return pd.DataFrame(columns).assign(queued_s=0.0, first_token_s=1.0, last_token_s=2.0)


def in_order(rows) -> pd.DataFrame:
    """Simulated requests by number."""
    return rows.requests.sort_values("request_id", key=lambda i: i.astype(int), ignore_index=True)


def test_a_run_that_the_simulator_made_is_met_exactly(tmp_path):
    run = _write_run(tmp_path, CASE, _requests())
    rows = simulate(run, profile_of(run))
    made = in_order(rows)
    ends = {name: made[name] for name in ("first_token_s", "last_token_s")}
    queued = made.first_token_s - simulated_samples(rows)["TTFT"]
    measured = _requests().assign(queued_s=queued, **ends)
    _write_run(tmp_path, CASE, measured)
    report = {row["metric"]: row for row in validation.validate_run(tmp_path, CASE)}
    assert all(abs(row[name]) < 1e-9 for row in report.values() for name in STATISTICS)
    assert report["E2E"]["real_s"] > report["TTFT"]["real_s"] > 0
    # a slower engine is seen as one
    decoding = measured.last_token_s - measured.first_token_s
    _write_run(tmp_path, CASE, measured.assign(last_token_s=made.first_token_s + 1.25 * decoding))
    slower = {row["metric"]: row for row in validation.validate_run(tmp_path, CASE)}
    assert slower["TPOT"]["mean"] == pytest.approx(1 / 1.25 - 1, abs=1e-9)
    assert abs(slower["TTFT"]["mean"]) < 1e-9


def test_a_requests_time_starts_with_the_engines_next_step(tmp_path):
    run = _write_run(tmp_path, CASE, _requests())
    rows = simulate(run, profile_of(run))
    # ids and rows are in the same order here
    queued = rows.requests.first_token_s - simulated_samples(rows)["TTFT"]
    assert (queued >= rows.requests.arrival_s - 1e-12).all()
    assert np.isin(queued.round(9), rows.steps.start_s.round(9)).all()
    # asynchronous: seen when a step ends, planned beside the next one, first token no sooner than
    # the one after
    starts = rows.steps.start_s.to_numpy()
    busy = rows.requests.arrival_s > starts[0]
    pairs = zip(queued[busy], rows.requests.first_token_s[busy], strict=True)
    assert min((starts > q).sum() - (starts >= t).sum() for q, t in pairs) >= 1


def test_prefix_blocks_are_shared_and_an_open_block_is_not(tmp_path):
    run = _write_run(tmp_path, CASE, _requests())
    load = workload(run)
    shared = [load.prefix.of(i)[:4].tolist() for i in range(len(load))]
    assert all(ids == shared[0] for ids in shared)
    own = {block for i in range(len(load)) for block in load.prefix.of(i)[4:].tolist()}
    assert len(own) == len(load.prefix.ids) - 4 * len(load)
    assert simulate(run, profile_of(run)).requests.hit_tokens.iloc[1:].max() == 64
    assert load.arrival_s.min() == 0.0


def _ends_within(rows) -> int:
    """The most steps of one rank that end within a single step of the other."""
    one, two = (steps for _, steps in rows.steps.groupby("replica"))
    most = 0
    for mine, other in ((one, two), (two, one)):
        ends = other.end_s.to_numpy()
        for start, end in zip(mine.start_s, mine.end_s, strict=True):
            most = max(most, int(((ends > start + 1e-9) & (ends < end - 1e-9)).sum()))
    return most


def test_ranks_that_share_experts_step_together(tmp_path):
    together, apart = {"enable_expert_parallel": True}, {"enable_expert_parallel": False}
    found = {}
    for name, engine in (("together", together), ("apart", apart)):
        run = _write_run(tmp_path, RANKS, _requests(), data_parallel_size=2, **engine)
        found[name] = simulate(run, profile_of(run))
        assert found[name].requests.finished.all() and set(found[name].requests.replica) == {0, 1}
    # a recorded step holds the wait for the other's step, and then lasts no longer than the one it
    # shares
    assert _ends_within(found["together"]) <= 2 < _ends_within(found["apart"])
    steps = {name: rows.steps.end_s - rows.steps.start_s for name, rows in found.items()}
    assert steps["together"].mean() > steps["apart"].mean()


def test_latencies_by_hand():
    found = latencies([0, 0], [1, 3], [3, 7], [3, 5])
    expected = {"TTFT": [1, 3], "TPOT": [1, 1], "E2E": [3, 7]}
    assert {name: times.tolist() for name, times in found.items()} == expected


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSERVE_TRUTH", str(tmp_path))
    with pytest.raises(WorkloadError, match="vllm_runs .* not found; set TWINSERVE_TRUTH"):
        validation.of_a_run(CASE.label, "roofline", 0)
    (tmp_path / "vllm_runs").mkdir()
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_run(tmp_path, CASE)


def test_every_case_has_a_shipped_profile():
    for case in CASES:
        assert load_profile(case.profile).step_model.form == "operators"
    assert profile_of(_started(CASE), "roofline").step_model.form == "roofline"


def test_a_derived_profile_has_the_ranks_of_the_run():
    derived = profile_of(_started(CASES[-1], ranks=2, experts=True), "roofline")
    assert derived.name == "qwen3-30b-a3b@rtxpro6000:dp2:ep"


def _started(case, ranks: int = 1, experts: bool = False) -> MeasuredRun:
    arguments = {"data_parallel_size": ranks, "enable_expert_parallel": experts}
    nothing = pd.DataFrame()
    return MeasuredRun(case, nothing, nothing, {"engine_kwargs": arguments}, [], {})


# What mean errors are to stay within: the aims on dense runs, the errors of LLMServingSim 2 on the
# mixture of experts.
AIMS = {"TTFT": 0.05, "TPOT": 0.015, "E2E": 0.015}
# Aims that are missed (docs/validation.md), and how far: no error may grow unnoticed, and one that
# falls below is news.
MISSED = {
    (0, "TPOT"): 0.025, (0, "E2E"): 0.028, (1, "E2E"): 0.022, (3, "TPOT"): 0.033, (3, "E2E"): 0.035,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("index", mostly_nightly(range(len(CASES)), 0))
def test_measured_runs(index):
    found = validation.validate_run(truth("vllm_runs").parent, CASES[index])
    report = {row["metric"]: row for row in found}
    for metric, aim in AIMS.items():
        error = abs(report[metric]["mean"])
        if index == 3:
            aim = abs(report[metric]["theirs_mean"])
        limit = MISSED.get((index, metric), aim)
        assert error < limit, metric
        assert error > aim or limit == aim, (
            f"{metric} meets its aim now: take it out of MISSED and mend the docs"
        )
    assert not any(np.isnan(report["TPOT"][f"theirs_{name}"]) for name in STATISTICS)


def test_measured_steps():
    for row in validation.validate_steps(truth(validation.H100_STEPS).parents[1]):
        assert row["all"] < {"operators": 0.055, "roofline": 0.06}[row["form"]]
        assert row["steps"] > 500


# -- step times read off the events of measured runs: kept stretches, and counts each second -------
def _made(tmp_path, requests: pd.DataFrame, **engine):
    """A run as its events would have been recorded had the simulator been the engine."""
    planned = _write_run(tmp_path, CASE, requests, **engine)
    rows = simulate(planned, profile_of(planned))
    made = in_order(rows)
    measured = requests.assign(
        queued_s=made.first_scheduled_s,
        first_token_s=made.first_token_s,
        last_token_s=made.last_token_s,
    )
    _write_run(tmp_path, CASE, measured, **engine)
    starts, ends = rows.steps.start_s.to_numpy(), rows.steps.end_s.to_numpy()
    ticks = np.arange(1.0, ends[-1] + 1.0)
    spans = zip(made.first_token_s - 1e-9, made.last_token_s + 1e-9, strict=True)
    tokens = np.concatenate([ends[(ends >= first) & (ends <= last)] for first, last in spans])
    at = np.clip(np.searchsorted(starts, ticks, side="right") - 1, 0, None)
    series = {"t": ticks, "running": rows.steps.running.to_numpy()[at], "waiting": 0}
    series |= {"kv_cache_pct": 0.0, "gen_throughput": np.histogram(tokens, np.r_[0.0, ticks])[0]}
    folder = tmp_path / "vllm_runs" / CASE.folder
    pd.DataFrame(series).to_csv(folder / "timeseries.csv", index=False)
    return read_run(tmp_path, CASE)


def prompt_beside(decodes: int, tokens: int) -> StepComposition:
    return StepComposition(decodes, 100 * decodes, 100, np.array([tokens]), np.zeros(1, np.int64))


def test_a_term_that_the_model_lacks_is_found():
    """Each step with a prompt took 5 ms less than the model says; decodes as long as it says."""
    model = load_profile(CASE.profile).model(48)
    run = SimpleNamespace(arguments={"max_num_batched_tokens": 2048})
    found = []
    for i in range(12):
        works = [decode_work(4, 100 + i + j) for j in range(3)]
        found.append(Interval(2.0 + i, sum(map(model.step_seconds, works)), works))
        works = [prompt_beside(4, 300 + 100 * i), decode_work(4, 100)]
        found.append(Interval(20.0 + i, sum(map(model.step_seconds, works)) - 0.005, works))
    table = step_times(run, found, model)
    alone, prompts = (table[(table.tokens > 0) == is_prompt] for is_prompt in (False, True))
    np.testing.assert_allclose(alone.real_ms, alone.ours_ms)
    assert len(prompts) == 12 and (alone.steps == 3).all()
    for row in by_range(prompts, "tokens", (0, 512, 2048)):
        assert row["error_ms"] == pytest.approx(5)
    too_many = [Interval(2.0, 0.1, [prompt_beside(4, 4096)])]
    assert step_times(run, [*found, *too_many], model).equals(table)


def test_kept_stretches_have_decodes_and_prompts():
    for case, least in zip(CASES, (5, 400, 400), strict=False):
        found = list(intervals(case))
        assert len(found) >= least and all(one.real_s > 0 and one.works for one in found)
        assert [one.start_s for one in found] == sorted(one.start_s for one in found)
        assert case is CASES[0] or sum(map(len, (one.prompts for one in found))) > 100


@pytest.mark.slow
def test_tokens_counted_each_second_tell_the_decode_steps(tmp_path):
    columns = {"request_id": range(12), "arrival_s": np.linspace(0, 0.5, 12), "input_toks": 200}
    requests = pd.DataFrame(columns).assign(output_toks=np.linspace(400, 1400, 12).astype(int))
    run = _made(
        tmp_path,
        requests.assign(queued_s=0.0, first_token_s=1.0, last_token_s=2.0),
        max_num_seqs=48,
    )
    model = profile_of(run).model(48)
    found = counted(run, model)
    near = max(0.005, 3 * found["scale_error"])
    assert found["steps"] >= 8 and found["scale"] == pytest.approx(1, abs=near)
    # a scarce second before hides what came before it; counts that are missing tell nothing
    assert shortage(run).size == 0
    run.series.loc[3, "kv_cache_pct"] = 99.0
    assert shortage(run).tolist() == [4.0] and counted(run, model)["from_s"] == 5.0
    assert counted(replace(run, series=run.series.drop(columns="gen_throughput")), model) == {}


def test_ranges_by_hand():
    table = pd.DataFrame({"decodes": [1, 2, 9], "steps": [1, 3, 2], "comm_ms": 2.0})
    table = table.assign(real_ms=[10.0, 20, 40], ours_ms=[11.0, 21, 30])
    low, high = by_range(table, "decodes", (0, 8, 16))
    assert (low["real_ms"], low["ours_ms"], low["steps"]) == (17.5, 18.5, 4)
    assert (high["error"], high["comm_ms"], high["comm_implied_ms"]) == (-0.25, 2, 12)


@pytest.mark.slow
@pytest.mark.parametrize("index", mostly_nightly(range(3), 0))
def test_steps_of_measured_runs(index):
    report = validate_events(truth("vllm_runs").parent, CASES[index])
    if index == 0:  # memory was short nearly all the time
        (counts,) = report["counted"]
        assert counts["scale_error"] < 0.01 and 0.9 < counts["scale"] < 1.1
    else:
        steps = {part: sum(row["steps"] for row in report[part]) for part in ("decode", "prompt")}
        assert steps["decode"] > 1000 and steps["prompt"] > 100
