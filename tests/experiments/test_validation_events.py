"""Step times read off the events of measured runs: kept stretches, and counts each second."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.experiments.test_validation import _write_run, in_order
from tests.parameters import mostly_nightly
from tests.truth import truth
from twinserve.experiments.validation.runs import CASES, profile_of, read_run, simulate
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

CASE = CASES[1]


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
def test_measured_runs(index):
    report = validate_events(truth("vllm_runs").parent, CASES[index])
    if index == 0:  # memory was short nearly all the time
        (counts,) = report["counted"]
        assert counts["scale_error"] < 0.01 and 0.9 < counts["scale"] < 1.1
    else:
        steps = {part: sum(row["steps"] for row in report[part]) for part in ("decode", "prompt")}
        assert steps["decode"] > 1000 and steps["prompt"] > 100
