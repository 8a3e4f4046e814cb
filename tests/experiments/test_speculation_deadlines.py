"""Drafts beside BROS's deadlines: pairing by seed, and that the page has what the kept runs say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from twinserve.experiments.speculation import deadlines as study

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "results" / "speculation" / "deadlines"


def test_changes_are_paired_by_seed():
    columns = {*study.SHARES, *study.RATIOS, "tpot_s", "ttft_p99_s", "batch", "verified"}
    rows = []
    for seed in range(3):
        same = dict.fromkeys(columns, 1.0 + seed) | {"saturated": 0.0, "unclear": 1.0}
        rows.append({"drafts": "none", "rate": 5.0, "seed": seed, **same})
        more = {"be_rps": 1.5 * (1.0 + seed), "ttft_attainment": 1.25 + seed}
        rows.append({"drafts": "k=3, 0.8", "rate": 5.0, "seed": seed, **same, **more})
    found = study.table(pd.DataFrame(rows)).set_index("drafts")
    drafted = found.loc["k=3, 0.8"]
    assert drafted.be_rps_change == pytest.approx(1.5) and drafted.be_rps_change_ci < 1e-9
    assert drafted.ttft_attainment_change == pytest.approx(0.25)
    assert drafted.be_rps_ci > 1 and drafted.unclear == 3 and drafted.saturated == 0


def read(name: str) -> pd.DataFrame:
    """One of the kept files; only an empty field is missing."""
    return pd.read_csv(KEPT / name, keep_default_na=False, na_values=[""])


def page() -> str:
    return " ".join((ROOT / "docs" / "policies.md").read_text(encoding="utf-8").split())


def test_the_kept_report_comes_from_the_kept_runs():
    points = read("points.csv")
    assert points.groupby(study.BY).size().min() >= 3
    found = study.table(points)
    assert study.TEXT(found) == (KEPT / "report.md").read_text(encoding="utf-8")


def test_the_rows_of_the_page_are_those_of_the_report():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    said = (KEPT / "report.md").read_text(encoding="utf-8")
    at_ten = said.partition("**10 real-time requests/s**")[2].partition("**")[0].splitlines()
    rows = [line for line in page.splitlines() if line.startswith(("| none |", "| k=3"))]
    assert len(rows) == 3 and not set(rows) - set(at_ten)
    assert "(results/speculation/deadlines/report.md)" in page


@pytest.fixture
def kept() -> pd.DataFrame:
    return read("table.csv").set_index(["rate", "drafts"])


def test_the_kept_table_comes_from_the_kept_runs(kept):
    points = read("points.csv")
    again = study.table(points).set_index(["rate", "drafts"])
    pd.testing.assert_frame_equal(kept, again, check_dtype=False, rtol=1e-12)
    assert sorted(points.seed.unique()) == [0, 1, 2]  # which the page names


def test_what_the_page_says_of_the_tables_is_in_them(kept):
    low = kept[kept.index.get_level_values("rate") < study.FULL]
    right = low[low.index.get_level_values("drafts").str.contains("0.8")]
    half = low[low.index.get_level_values("drafts").str.contains("0.5")]

    def change(name, rate, drafts, digits=2):
        row = kept.loc[(rate, drafts)]
        return f"{row[f'{name}_change']:.{digits}f} ± {row[f'{name}_change_ci']:.{digits}f}"

    always = "k=3, 0.8, always"
    for said in (
        f"gains up to {100 * (right.be_rps_change.max() - 1):.0f} % or loses up to "
        f"{100 * (1 - right.be_rps_change.min()):.0f} %",
        f"up to {-100 * right.ttft_attainment_change.min():.1f} % more of all miss",
        f"falls to {change('normalized_ms', 5.0, always)} of that",
        f"to {change('normalized_ms', 10.0, always)} at 10",
        f"fall to {half.be_rps_change.min():.2f} to {half.be_rps_change.max():.2f}",
    ):
        assert said in page(), said
    assert (right.normalized_ms_change < 1).all() and (low.tpot_attainment == 1).all()
    assert 0.979 < right.ttft_attainment.min() and right.ttft_attainment.max() < 1
