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


@pytest.mark.slow
def test_the_whole_of_it_small(tmp_path, capsys):
    study.main(["--quick", "--workers", "1", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out == (tmp_path / "out" / "report.md").read_text()
    table = pd.read_csv(tmp_path / "out" / "table.csv").set_index("drafts")
    assert table.verified["none"] == 0 and 0.1 < table.verified["k=3, 0.8"] < 1
    assert table.normalized_ms_change["k=3, 0.8"] < 1
    assert (tmp_path / "out" / "deadlines.png").stat().st_size > 10_000


def test_the_kept_report_comes_from_the_kept_runs():
    points = pd.read_csv(KEPT / "points.csv", keep_default_na=False, na_values=[""])
    assert points.groupby(study.BY).size().min() >= 3
    found = study.table(points)
    assert study.report(found) == (KEPT / "report.md").read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_report():
    page = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    for line in (KEPT / "report.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            assert line in page
