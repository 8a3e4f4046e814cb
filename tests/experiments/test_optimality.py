"""The optimality experiment: its bookkeeping by hand, and the whole of it, small."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.experiments.study_checks import quick_run, table
from twinserve.experiments.optimality.main import STUDY
from twinserve.experiments.optimality.runs import (
    OPTIONS,
    OTHERS,
    PROBLEMS,
    deadlines_of_runs,
    first_tokens_of_runs,
    gap_rows,
    iterations_of_a_run,
    least_token_s,
    most_in_time,
)
from twinserve.policies.bros.problem import Solution
from twinserve.policies.registry import parse_policy
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli.main import main

out = quick_run(STUDY)


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


# -- the most first tokens -------------------------------------------------------------------------
def by_trying_all(ready, due, cost) -> int:
    """The largest set of jobs that, run in order of their due times, are all in time."""
    n = len(ready)

    def in_time(jobs) -> bool:
        end = -np.inf
        for j in jobs:
            end = max(end, ready[j]) + cost[j]
            if end > due[j]:
                return False
        return True

    return max(k for k in range(n + 1) if any(map(in_time, combinations(range(n), k))))


seconds = st.integers(0, 12).map(float)


@given(jobs=st.lists(st.tuples(seconds, st.integers(1, 6).map(float)), max_size=7), slack=seconds)
@examples(200)
def test_the_most_in_time_is_what_trying_all_sets_finds(jobs, slack):
    ready = np.sort(np.array([begin for begin, _ in jobs]))
    cost = np.array([length for _, length in jobs])
    due = ready + slack
    assert most_in_time(ready, due, cost) == by_trying_all(ready, due, cost)


def test_jobs_must_be_in_order():
    with pytest.raises(ValueError, match="in order"):
        most_in_time(np.array([1.0, 0.0]), np.array([2.0, 3.0]), np.ones(2))


def test_no_step_computes_prompt_tokens_faster():
    model = load_profile("qwen2.5-14b@a100-40g:tp2").model()
    least = least_token_s(model)
    for tokens in (1, 77, 1023, 1025, 3333, 16_000):
        step = StepComposition(prefill_new=np.array([tokens]), prefill_resident=np.zeros(1, int))
        assert model.step_seconds(step) >= tokens * least


@pytest.mark.nightly
def test_no_run_keeps_more_first_tokens_than_are_possible():
    rows = pd.DataFrame(first_tokens_of_runs(0, 1.0, 40.0, 4, "ttft=0.05,tpot=0.05"))
    assert (rows.requests > 20).all() and rows.bound.nunique() == 1
    assert (rows.kept <= rows.bound).all() and rows.kept.min() < 1


SMALL = dict(seconds=3.0, rate=1.0, pool=2, slo="ttft=0.2,tpot=0.1")


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_every_source_and_problem_is_in_the_tables(out):
    slo = "ttft=0.4,tpot=0.2"
    found = table(out, "iterations")
    assert set(found.source) == {slo}
    assert set(found.problem) == set(PROBLEMS) and (found.iterations > 0).all()
    found = table(out, "deadlines")
    assert set(found.problem) == set(OTHERS) and set(found.slo) == {slo}
    assert set(table(out, "first_tokens").rate) == {15.0, 25.0}
    assert "not run" not in (out / "tables.md").read_text()


DOCS = Path(__file__).parents[2] / "docs"


def kept(figure: str, *by: str) -> pd.DataFrame:
    return pd.read_csv(DOCS / "results" / "optimality" / figure / "table.csv").set_index(list(by))


def page_rows(section: str) -> list[list[str]]:
    """Cells of the table in a section of the page, without its head."""
    text = (
        (DOCS / "optimality.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    )
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return [line for line in lines[2:] if "**" not in line[0]]


def said(cell: str, row: pd.Series, name: str) -> None:
    """The cell has the mean and its interval, per cent, to the digits that it shows."""
    for text, number in zip(cell.split(" ± "), row[[name, f"{name}_ci"]], strict=True):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(100 * number, abs=0.51 * 10**-digits), (cell, name)


def test_single_steps_on_the_page_are_the_kept_ones():
    table = kept("iterations", "source", "problem")
    rows = page_rows("Single steps")
    for steps, problem, n, loses, gap in rows:
        row = table.loc[(steps.removeprefix("runs, "), problem)]
        assert n == f"{row.iterations:,.0f}"
        said(loses, row, "loses_more")
        said(gap, row, "gap_mean")
    assert len(rows) == 5


def test_whole_runs_on_the_page_are_the_kept_ones():
    table = kept("deadlines", "slo", "problem")
    columns = ("ttft_both", "ttft_this_only", "ttft_bros_only", "tokens_bros_only", "be_tokens")
    rows = page_rows("Whole runs")
    for slo, problem, *cells in rows:
        row = table.loc[(slo, "split prompts" if "chunk=256" in problem else problem)]
        for cell, name in zip(cells, columns, strict=True):
            said(cell, row, name)
    assert len(rows) == 5 and set(table.requests) == {78}


def test_first_tokens_on_the_page_are_the_kept_ones():
    table = kept("first_tokens", "rate", "slo", "policy")
    rows = page_rows("First tokens")
    for rate, slo, *cells in rows:
        for cell, policy in zip(cells, ("bros", "bros:chunk=fit", "vllm"), strict=True):
            said(cell, table.loc[(float(rate), slo, policy)], "share")
    assert len(rows) == 4


def test_one_seed_is_too_few(capsys):
    with pytest.raises(SystemExit):
        main(["study", "optimality", "--seeds", "1"])
    assert "--seeds must be from 2" in capsys.readouterr().err
