"""The optimality experiment: its bookkeeping by hand, and the whole of it, small."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.optimality import main as optimality
from twinserve.experiments.optimality.runs import (
    OPTIONS,
    OTHERS,
    PROBLEMS,
    deadlines_of_runs,
    gap_rows,
    iterations_of_a_run,
    random_iterations,
)
from twinserve.policies.bros.problem import Solution
from twinserve.policies.registry import parse_policy


def batch(rate: float, lost: int = 0, served: int = 0, feasible: bool = True) -> Solution:
    return Solution(np.ones(1, bool), feasible, 1.0, lost, rate, (lost, -served, 0))


def test_what_is_counted():
    pairs = [
        (4, batch(8.0), batch(10.0)),  # a gap of 20 %
        (4, batch(10.0), batch(10.0)),  # as good
        (5, batch(0.0), batch(0.0)),  # as good, and no best-effort request fits
        (5, batch(9.0, lost=2), batch(3.0, lost=1)),
        (5, batch(9.0, lost=1), batch(3.0, lost=1, served=1)),
        (5, batch(9.0, lost=1, feasible=False), batch(3.0, lost=1)),
    ]
    whole, four, five = gap_rows("own", pairs)
    assert (whole["requests"], four["requests"], five["requests"]) == (0, 4, 5)
    assert (whole["iterations"], four["iterations"], five["iterations"]) == (6, 2, 4)
    shares = {
        name: 6 * whole[name]
        for name in ("optimal", "outside", "loses_more", "extra_lost", "other_goal", "compared")
    }
    assert shares == pytest.approx(dict.fromkeys(shares, 1) | {"optimal": 2, "compared": 2})
    assert four["gap_mean"] == pytest.approx(0.1) and four["gap_max"] == pytest.approx(0.2)
    assert five["gap_mean"] == 0.0 and five["optimal"] == 0.25


def test_problems_are_what_their_policies_solve():
    assert {
        name: parse_policy(text).policy.Options(**parse_policy(text).options)
        for name, text in PROBLEMS.items()
    } == OPTIONS


@pytest.fixture(scope="module")
def drawn() -> pd.DataFrame:
    return pd.DataFrame(random_iterations(0, 40)).query("requests == 0").set_index("problem")


def test_random_iterations(drawn):
    assert list(drawn.index) == list(PROBLEMS) and (drawn.iterations == 40).all()
    assert drawn.equals(
        pd.DataFrame(random_iterations(0, 40)).query("requests == 0").set_index("problem")
    )
    assert (
        (drawn.gap_mean >= 0).all() and (drawn.gap_max <= 1).all() and (drawn.extra_lost >= 0).all()
    )
    parts = drawn.optimal + drawn.outside + drawn.loses_more + drawn.other_goal
    assert (parts <= 1 + 1e-9).all() and drawn.compared["own"] > 0
    # The less the problem asks beyond what Algorithm 1 is after, the smaller the gap.
    assert drawn.gap_mean["own"] > drawn.gap_mean["most-requests"]


def test_nobody_is_late_where_that_is_asked_for(drawn):
    kept = (
        pd.DataFrame(random_iterations(0, 40, late=False))
        .query("requests == 0")
        .set_index("problem")
    )
    assert kept.loses_more["own"] <= drawn.loses_more["own"]


SMALL = dict(seconds=3.0, rate=1.0, pool=2, slo="ttft=0.2,tpot=0.1")


@pytest.mark.slow
def test_the_iterations_of_a_run_and_its_deadlines():
    watched = (
        pd.DataFrame(iterations_of_a_run(0, **SMALL)).query("requests == 0").set_index("problem")
    )
    assert list(watched.index) == list(PROBLEMS) and (watched.iterations > 20).all()
    assert watched.gap_mean["own"] >= watched.gap_mean["most-requests"]
    rows = pd.DataFrame(deadlines_of_runs(0, **SMALL)).set_index("problem")
    assert list(rows.index) == list(OTHERS) and (rows.requests > 0).all()
    assert rows.fallback["split prompts"] == 1
    for name in ("ttft", "tokens"):
        parts = rows[[f"{name}_{who}" for who in ("both", "this_only", "bros_only", "neither")]]
        assert np.allclose(parts.sum(axis=1), 1.0) and (parts >= 0).all(axis=None)
    assert rows.fallback.between(0, 1).all() and (rows.be_tokens >= 0).all()


@pytest.mark.slow
def test_the_command_writes_tables_and_a_plot(tmp_path, capsys):
    optimality.main(["--quick", "--workers", "1", "--out", str(tmp_path)])
    assert (tmp_path / "optimality.md").read_text(encoding="utf-8") == capsys.readouterr().out
    assert (tmp_path / "optimality.png").read_bytes()[1:4] == b"PNG"
    iterations = pd.read_csv(tmp_path / "iterations.csv")
    assert set(iterations.source) == {"random", "random, none late", "ttft=0.4,tpot=0.2"} and set(
        iterations.seed
    ) == {0, 1}
    assert set(pd.read_csv(tmp_path / "deadlines.csv").problem) == set(OTHERS)


@pytest.mark.parametrize(
    "arguments, message", [(["--seeds", "1"], "--seeds must be from 2"), (["--sed", "3"], "--sed")]
)
def test_bad_input_gets_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        optimality.main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and message in said and said.count("\n") == 1
