"""A trace that can be shared: nothing of whose it is stays, all that a simulation needs does."""

import json

import numpy as np
import pytest

from tests.commands import status
from twinserve.sim.cli.main import main
from twinserve.traces.anonymise import anonymise, kept
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.sidecar import path_of
from twinserve.traces.stats import statistics
from twinserve.traces.workload import Workload, WorkloadError
from twinserve.traces.write import write_trace

SECRET = "acme-corp"


@pytest.fixture
def secret_trace(tmp_path):
    """A file of sessions that share blocks, stamped with the time of day and full of names."""
    w = load_trace("agents:sessions=12,turns=4,groups=2", seed=2)
    file = write_trace(w, tmp_path / f"{SECRET}.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["request_id"] = f"{SECRET}-{number}"
        row["session_id"] = f"{SECRET}-{row['session_id']}"
        if "timestamp" in row:
            row["timestamp"] += 1_761_000_000_000
        row["customer"] = SECRET
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_no_name_and_no_date_is_left(secret_trace, tmp_path, capsys):
    target = tmp_path / "out" / "shared.jsonl"
    assert not status(main, ["trace", "anonymise", secret_trace, target, "--jitter", "0.5"])
    written = target.read_text() + path_of(target).read_text()
    assert SECRET not in written and "17610000" not in written
    assert load_trace(target).arrival_s[0] == 0.0
    shown = capsys.readouterr().out
    assert "lru_hit_rate unlimited" in shown and "kept" in shown


def test_without_jitter_every_statistic_is_kept(secret_trace):
    w = load_trace(secret_trace)
    shared = anonymise(w)
    check_workload(shared)
    for name, before, after in kept(w, shared):
        exact = name not in ("first_arrival_s", "gap_cv", "rate_per_s", "span_s")
        assert after == before if exact else after == pytest.approx(before, abs=1e-5), name


def test_who_shares_which_blocks_is_kept_under_other_ids(secret_trace):
    w = load_trace(secret_trace)
    shared = anonymise(w, salt="a")
    assert (w.prefix.ids != shared.prefix.ids).mean() > 0.9
    pairs = set(zip(w.prefix.ids.tolist(), shared.prefix.ids.tolist(), strict=True))
    assert len(pairs) == w.prefix.distinct == shared.prefix.distinct


def test_a_salt_gives_the_same_trace_again_and_none_another_one(secret_trace):
    w = load_trace(secret_trace)
    one, two = (anonymise(w, salt="a", jitter_s=1.0) for _ in range(2))
    assert np.array_equal(one.arrival_s, two.arrival_s, equal_nan=True)
    assert one.prefix.ids.tolist() == two.prefix.ids.tolist()
    assert anonymise(w).prefix.ids.tolist() != anonymise(w).prefix.ids.tolist()


def test_jitter_moves_arrivals_and_delays_by_no_more_than_it_says():
    w = load_trace("stages:2x200,input=10,output=5")
    shared = anonymise(w, salt="a", jitter_s=0.25)
    check_workload(shared)
    moved = np.abs(np.sort(w.arrival_s) - w.arrival_s[0] - shared.arrival_s)
    assert 0.01 < moved.mean() and moved.max() <= 0.5 + 1e-9  # the first one moved too
    assert statistics(shared)["rate_per_s"] == pytest.approx(statistics(w)["rate_per_s"], rel=0.01)
    turns = Workload.build(
        [0.0, np.nan], [9, 9], [1, 1], group=np.array([0, 0]), stage=np.array([0, 1]),
        delay_s=np.array([0.0, 5.0]), group_names=["a"],
    )  # fmt: skip
    assert 0 < abs(anonymise(turns, salt="a", jitter_s=0.25).delay_s[1] - 5.0) <= 0.25


@pytest.mark.parametrize("jitter", [-1.0, float("inf"), float("nan")])
def test_a_jitter_that_cannot_be_is_refused(jitter):
    with pytest.raises(WorkloadError, match="jitter"):
        anonymise(load_trace("stages:2x20"), jitter_s=jitter)
