"""The benchmark of decisions runs and measures what it says; no figure is judged: that depends on
the machine."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from twinserve.experiments.benchmark.measure import CpuTimed
from twinserve.experiments.decision_time import main as decision_time
from twinserve.experiments.decision_time.main import (
    BATCH,
    QUICK,
    SteadyQueue,
    print_report,
    settings,
    short_blocks,
)
from twinserve.policies.requests import State
from twinserve.sim.setup.inputs import resolve

POLICIES = ["vllm", "echo", "justitia"]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("decisions") / "figures.json"
    chosen = [text for name in POLICIES for text in ("-p", name)]
    # how a command ends
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        decision_time.main([*chosen, "--quick", "--whole", "--out", str(out)])
    return json.loads(out.read_text())


@pytest.mark.nightly
def test_every_policy_and_length_is_there(report):
    assert [(r["policy"], r["queued"]) for r in report["growth"]] == [
        (p, n) for p in POLICIES for n in QUICK.queued
    ]
    assert [(r["policy"], r["num_blocks"]) for r in report["short"]] == [
        (p, short_blocks()) for p in POLICIES
    ]
    for run in (*report["growth"], *report["short"]):
        assert (
            0 < run["median_s"] <= run["p99_s"] and run["first_s"] > 0 and run["wall_median_s"] > 0
        )
        assert run["median_s"] in run["medians_s"] and len(run["medians_s"]) == QUICK.repeats
    assert [r["rate"] for r in report["table_iii"]] == list(QUICK.rates)
    assert report["table_iii"][0]["paper_s"] == pytest.approx(3.076e-3)
    assert [r["policy"] for r in report["hybrid"]] == ["vllm"]
    assert [r["policy"] for r in report["whole"]] == POLICIES and [
        r["policy"] for r in report["day"]
    ] == ["echo"]
    assert not any(r["refused"] for r in report["whole"])
    assert report["day"][0]["offline"] == QUICK.documents and report["day"][0]["steps"] > 0


def test_the_state_is_steady():
    """A full batch, the queue as long as asked for, and somebody ends and arrives at almost every
    step."""
    state = SteadyQueue(resolve(settings("vllm")), 50)
    state.decide(160)
    requests = state.engine.core.requests
    assert set(state.batches[5:]) == {BATCH}  # the first prompts take a few steps
    # looked at within an instant: who ended is replaced at once, and may not be gone yet
    active = state.engine.core.active
    assert 0 <= active - (BATCH + 50) <= 2 and np.mean(state.waiting[1:]) == pytest.approx(
        50, abs=2
    )
    assert (requests.state == State.FINISHED).sum() > 80
    assert len(requests) == active + int((requests.state == State.FINISHED).sum())


def test_same_seed_same_decisions():
    ids = []
    for _ in range(2):
        state = SteadyQueue(resolve(settings("bros")), 5, seed=3)
        state.decide(20)
        ids.append(
            (state.batches, state.waiting, state.engine.core.requests.computed_tokens.tolist())
        )
    assert ids[0] == ids[1]


def test_memory_for_three_quarters_of_a_batch_is_short():
    state = SteadyQueue(resolve(settings("vllm", num_blocks=short_blocks())), 50)
    state.decide(120)
    assert state.engine.core.requests.recomputes.sum() > 0


def test_calls_are_timed_one_by_one():
    timed = CpuTimed(lambda n: sum(range(n)))
    assert timed(10) == 45 and timed(2_000_000) == sum(range(2_000_000))
    assert len(timed.seconds) == 2 and 0 <= timed.seconds[0] < timed.seconds[1]


@pytest.mark.nightly
def test_tables(report, capsys):
    print_report(report, as_markdown=True)
    text = capsys.readouterr().out
    assert text.count("\n### ") == 7
    for policy in POLICIES:
        assert f"| `{policy}` |" in text
    widths = {
        len(line.split("|")) for line in text.split("### ")[1].splitlines() if line.startswith("|")
    }
    assert widths == {len(QUICK.queued) + 3}
    print_report(report, as_markdown=False)
    assert "A tidal day" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "nobody"], "no policy 'nobody'"),
        (["--repeats", "0"], "--repeats 0: at least one run"),
        (["--out", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_bad_input(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        decision_time.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
