"""From which batch on speculation stops paying: the study's bookkeeping by hand, a small whole of
it, and that the page says what the kept results say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from twinserve.experiments.speculation import main as study
from twinserve.experiments.speculation.main import ENGINES
from twinserve.experiments.speculation.runs import LENGTHS, requests_of, run_point
from twinserve.experiments.study.command import GridOptions

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "results" / "speculation" / "batches"


def rows(gain: dict[int, tuple[float, ...]], longer: float, tokens: float) -> pd.DataFrame:
    """Runs whose throughput with drafts is `gain` times that without, by batch and seed."""
    found = []
    for batch, factors in gain.items():
        for seed, factor in enumerate(factors):
            axes = {"lengths": "chat", "engine": "e", "batch": batch, "seed": seed}
            base = 100.0 * (1 + seed)  # seeds differ; gains are paired
            plain = {"tokens_per_s": base, "step_s": 0.01, "step_tokens": 1.0, "preemptions": 0}
            drafted = {
                "tokens_per_s": base * factor,
                "step_s": 0.01 * longer,
                "step_tokens": tokens,
                "preemptions": 2,
            }
            found += [{**axes, "drafts": "none", **plain}, {**axes, "drafts": "eagle", **drafted}]
    return pd.DataFrame(found)


def test_gains_are_paired_by_seed_and_judged_by_their_interval():
    given = rows({8: (1.5, 1.51, 1.49), 64: (0.8, 1.2, 1.0), 256: (0.7, 0.71, 0.69)}, 3.0, 2.1)
    found = study.GAINS(given)
    assert found.gain.tolist() == pytest.approx([1.5, 1.0, 0.7])
    assert found.gain_ci.iloc[0] < 0.03 < found.gain_ci.iloc[1]
    assert found.verdict.tolist() == [study.PAYS, study.OPEN, study.LOSES]
    assert found.longer.tolist() == pytest.approx([3.0] * 3)
    assert study.stops(found) == "pays up to 8, not significant at 64"
    assert study.why(found).startswith("at 256 steps take 3 ")


def test_a_loss_that_longer_steps_do_not_explain_is_not_known():
    found = study.GAINS(rows({8: (0.7, 0.71, 0.69)}, 1.5, 2.1))
    assert study.why(found) == "not known" and study.stops(found) == "loses at 8"


def test_where_drafts_always_pay_nothing_is_to_be_explained():
    found = study.GAINS(rows({8: (1.5, 1.51, 1.49)}, 1.2, 2.1))
    assert study.stops(found) == "pays up to 8, the largest run" and study.why(found) == ""


@pytest.mark.slow
def test_clients_keep_the_batch_full():
    workload = requests_of(LENGTHS["chat"], 16, seed=1)
    assert workload.concurrency == 16 and len(workload) == 64
    assert workload.output_tokens.min() >= 500 and workload.prompt_tokens.max() <= 750
    again = requests_of(LENGTHS["chat"], 32, seed=1)
    assert len(again) == 128
    text = study.DRAFTED["ngram"]
    row = run_point("llama-3.1-8b@h100", text, "documents", 2, most=8, seed=0)
    assert 1.5 < row["in_batch"] <= 2 and 1.9 < row["step_tokens"] < 2.5


@pytest.mark.nightly
def test_the_whole_of_it_small(tmp_path):
    shown = study.STUDY.command((), GridOptions(quick=True, workers=1, out=tmp_path))
    assert shown == f"{tmp_path / 'tables.md'}\n"
    said = (tmp_path / "tables.md").read_text()
    assert "pays up to 16, the largest run" in said
    table = pd.read_csv(tmp_path / "batches" / "table.csv")
    assert (table.verdict == study.PAYS).all() and (table.gain > 1.4).all()
    assert (tmp_path / "batches" / "report.md").read_text() in said
    assert (tmp_path / "batches" / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_kept_report_comes_from_the_kept_runs():
    points = pd.read_csv(KEPT / "points.csv")
    assert points.groupby(["lengths", "engine", "drafts", "batch"], dropna=False).size().min() >= 3
    found = study.GAINS(points)
    assert study.report(found) == (KEPT / "report.md").read_text(encoding="utf-8")


def test_the_rows_of_the_page_are_those_of_the_report():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    said = (KEPT / "report.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page.splitlines() if line.startswith(tuple(f"| {e}" for e in ENGINES))]
    assert len(rows) == len(ENGINES) and not set(rows) - set(said)
    assert "(results/speculation/batches/report.md)" in page
