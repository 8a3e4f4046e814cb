"""Step times read off events: from runs that the simulator made, the model's own come back."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.test_validation import _requests, _truth, _write_run
from tests.parameters import mostly_nightly
from twinserve.experiments.validation.events import (
    Offsets,
    intervals,
    read_events,
    shortage,
    step_ends,
)
from twinserve.experiments.validation.runs import CASES, model_of, profile_of, read_run, simulate
from twinserve.experiments.validation.step_times import (
    by_range,
    counted,
    step_times,
    validate_events,
)
from twinserve.profiles.operators.model import OperatorModel

CASE = CASES[1]


def _made(tmp_path, requests: pd.DataFrame, **engine):
    """A run as its events would have been recorded had the simulator been the engine; and its
    rows."""
    _write_run(tmp_path, CASE, requests, **engine)
    planned = read_run(tmp_path, CASE)
    rows = simulate(planned, profile_of(planned))
    made = rows.requests.assign(i=rows.requests.request_id.astype(int)).sort_values(
        "i", ignore_index=True
    )
    measured = requests.assign(
        queued_s=made.first_scheduled_s,
        scheduled_s=made.first_scheduled_s,
        first_token_s=made.first_token_s,
        last_token_s=made.last_token_s,
        prefix_blocks_seen_before=made.hit_tokens // 16,
    )
    _write_run(tmp_path, CASE, measured, **engine)
    ends = rows.steps.end_s.to_numpy()
    ticks = np.arange(1.0, ends[-1] + 1.0)
    tokens = np.concatenate(
        [
            ends[(ends >= a - 1e-9) & (ends <= b + 1e-9)]
            for a, b in zip(made.first_token_s, made.last_token_s, strict=True)
        ]
    )
    at = np.clip(np.searchsorted(rows.steps.start_s.to_numpy(), ticks, side="right") - 1, 0, None)
    series = {
        "t": ticks,
        "running": rows.steps.running.to_numpy()[at],
        "waiting": 0,
        "kv_cache_pct": 0.0,
    }
    series |= {"gen_throughput": np.histogram(tokens, np.r_[0.0, ticks])[0]}
    pd.DataFrame(series).to_csv(
        tmp_path / "vllm_runs" / CASE.folder / "timeseries.csv", index=False
    )
    return read_run(tmp_path, CASE), rows


@pytest.mark.parametrize("budget", [512, 2048])
def test_the_models_own_step_times_come_back(tmp_path, budget):
    run, rows = _made(tmp_path, _requests(60), max_num_batched_tokens=budget, max_num_seqs=48)
    profile = profile_of(run)
    model, events = model_of(run, profile), read_events(run, profile)
    assert not events.links["contradicts"] and events.links["agrees"] > 0 and events.calm.all()
    ends = rows.steps.end_s.to_numpy()
    number = np.searchsorted(ends, events.ends - 1e-6)
    assert np.abs(ends[number] - events.ends).max() < 1e-6
    for component in set(events.component.tolist()):
        listed = events.component == component
        assert (np.diff(events.step[listed]) == np.diff(number[listed])).all()
    found = intervals(run, events)
    for one in found:
        # contexts of requests that end in another count are known to a few tokens
        assert sum(model.step_seconds(work) for work in one.works) == pytest.approx(
            one.real_s, rel=1e-3
        )
    assert sum(len(one.works) for one in found) > 0.6 * len(ends)
    table = step_times(run, events, model, skip_s=0.0)
    assert (table.tokens > 0).sum() > 10 and (table.tokens == 0).sum() > 5
    np.testing.assert_allclose(table.real_ms, table.ours_ms, rtol=1e-3)
    assert np.median(np.abs(table.real_ms / table.ours_ms - 1)) < 1e-6
    if budget == 512:
        assert (events.chunks > 1).sum() > 3


class _Late(OperatorModel):
    def terms(self, work):
        return super().terms(work) | {
            "late": 0.005 if len(work.prefill_new) and work.new_tokens > 96 else 0.0
        }


def test_a_term_that_the_model_lacks_is_found(tmp_path):
    """The model has 5 ms more than the run in each step larger than every captured graph."""
    run, _ = _made(tmp_path, _requests(60), max_num_seqs=48, max_num_batched_tokens=2048)
    profile = profile_of(run)
    events = read_events(run, profile)
    table = step_times(run, events, _Late(profile.model(48).form), skip_s=0.0)
    large = table[table.tokens > 96]
    assert len(large) > 5
    assert all(
        row["error_ms"] == pytest.approx(5, abs=0.01)
        for row in by_range(large, "tokens", (96, 512, 2048))
    )


@pytest.mark.slow
def test_tokens_counted_each_second_tell_the_decode_steps(tmp_path):
    columns = {"request_id": range(12), "arrival_s": np.linspace(0, 0.5, 12), "input_toks": 200}
    requests = pd.DataFrame(columns).assign(output_toks=np.linspace(400, 1400, 12).astype(int))
    run, _ = _made(
        tmp_path,
        requests.assign(queued_s=0.0, first_token_s=1.0, last_token_s=2.0),
        max_num_seqs=48,
    )
    model = model_of(run, profile_of(run))
    found = counted(run, model)
    assert found["steps"] >= 8 and found["scale"] == pytest.approx(
        1, abs=max(0.005, 3 * found["scale_error"])
    )
    # a scarce second before hides what came before it; counts that are missing tell nothing
    assert shortage(run).size == 0
    run.series.loc[3, "kv_cache_pct"] = 99.0
    assert shortage(run).tolist() == [4.0] and counted(run, model)["from_s"] == 5.0
    events = read_events(run, profile_of(run))
    assert (
        not events.calm[(events.ends > 3.01) & (events.ends < 4.99)].any()
        and events.calm[events.ends > 5.01].all()
    )
    assert (
        counted(
            run.__class__(**{**vars(run), "series": run.series.drop(columns="gen_throughput")}),
            model,
        )
        == {}
    )


def test_counts_of_steps_by_hand():
    counts = Offsets(4)
    assert (
        counts.link(0, 1, 5) is None
        and counts.link(2, 3, 1) is None
        and counts.link(1, 2, 2) is None
    )
    assert counts.link(0, 3, 8) is True and counts.link(3, 0, -7) is False
    (a, at), (b, to) = counts.find(0), counts.find(3)
    assert a == b and to - at == 8
    frame = pd.DataFrame({"first_token_s": [1.0, 2.0], "last_token_s": [3.0, 4.0]})
    # 1.0001 and 3.0002 lie just after tokens, 2.5 does not: it is moved back by what those are late
    frame = frame.assign(queued_s=[0.5, 2.5], scheduled_s=[1.0001, 3.0001])
    np.testing.assert_allclose(step_ends(frame), [1, 2, 2.4999, 3, 4], atol=1e-9)
    table = pd.DataFrame(
        {
            "decodes": [1, 2, 9],
            "steps": [1, 3, 2],
            "real_ms": [10.0, 20, 40],
            "ours_ms": [11.0, 21, 30],
            "comm_ms": 2.0,
        }
    )
    low, high = by_range(table, "decodes", (0, 8, 16))
    assert (
        low["real_ms"] == 17.5
        and low["ours_ms"] == 18.5
        and low["steps"] == 4
        and high["error"] == -0.25
    )
    assert high["comm_ms"] == 2 and high["comm_implied_ms"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("index", mostly_nightly(range(3), 0))
def test_measured_runs(index):
    report = validate_events(_truth(), CASES[index])
    assert report["links"]["contradicts"] == 0 and report["links"]["agrees"] > 10
    if index == 0:  # memory was short nearly all the time
        (counts,) = report["counted"]
        assert counts["scale_error"] < 0.01 and 0.9 < counts["scale"] < 1.1
    else:
        steps = {part: sum(row["steps"] for row in report[part]) for part in ("decode", "prompt")}
        assert steps["decode"] > 1000 and steps["prompt"] > 100
