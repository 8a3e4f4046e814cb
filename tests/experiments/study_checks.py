"""What the tests of all studies share: the study at its smallest size, its tables, and what each
figure must leave behind."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import pandas as pd
import pytest

from twinserve.experiments.study.study import Scale, Study
from twinserve.experiments.study.verdict import Claim


def quick_run(study: Study):
    """A fixture of a test module: the folder of `study`, run once at its smallest."""

    @pytest.fixture(scope="module")
    def out(tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp(study.system)
        study.run((), Scale(quick=True, seeds=(0,)), folder, workers=1)
        return folder

    return out


def table(out: Path, figure: str) -> pd.DataFrame:
    """The table of a figure. Only what is empty or `nan` is missing; words as `None` are labels."""
    return pd.read_csv(out / figure / "table.csv", keep_default_na=False, na_values=["nan", ""])


def reasoned(claim: dict) -> bool:
    """The claim agrees, or says why not."""
    return claim["verdict"] == "agrees" or len(claim["why"]) > 20


def check_figures(
    study: Study,
    out: Path,
    *,
    tables_only: Collection[str] = (),
    claims: bool = True,
    said: Callable[[dict], bool] = reasoned,
) -> None:
    """Every figure has points, a table with rows, a plot and claims, and stands in the report.

    tables_only  figures without a plot
    claims       every figure has some
    said         what holds of each claim
    """
    report = (out / "paper_vs_ours.md").read_text()
    assert "not run" not in report
    for figure in study.figures:
        found = _check_files(out, figure.name, plot=figure.name not in tables_only)
        assert found["title"] in report
        assert found["claims"] or not claims, figure.name
        for claim in found["claims"]:
            assert claim["paper"] and claim["ours"] and said(claim), claim


def check_one_figure(study: Study, name: str, out: Path) -> None:
    """Runs that figure alone, at its smallest."""
    study.run((name,), Scale(quick=True, seeds=(0,)), out, workers=1)
    found = _check_files(out, name, plot=True)
    report = (out / "paper_vs_ours.md").read_text()
    assert found["title"] in report and "not run" in report
    assert all(claim["paper"] and claim["ours"] for claim in found["claims"])


def _check_files(out: Path, figure: str, plot: bool) -> dict:
    """The figure's claims.json."""
    files = {"points.csv", "table.csv", "claims.json"} | ({"plot.png"} if plot else set())
    assert {path.name for path in (out / figure).iterdir()} == files, figure
    assert len(table(out, figure)), figure
    return json.loads((out / figure / "claims.json").read_text())


def measured(rows: Iterable[dict], half: float = 0.001) -> pd.DataFrame:
    """A table of a study: each number of `rows` (no whole number) has an interval of that half
    width, unless it has its own."""
    return pd.DataFrame(
        [{f"{k}_ci": half for k, v in row.items() if isinstance(v, float)} | row for row in rows]
    )


def all_differ(claims: Sequence[Claim]) -> None:
    """Every claim does, and says why."""
    assert claims and not [claim for claim in claims if claim.verdict != "differs"]
    assert all(len(claim.why) > 20 for claim in claims)
