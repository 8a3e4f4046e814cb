"""What docs/papers.md and result pages say of the four papers comes from results that are here."""

import json
from dataclasses import asdict
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest

from twinserve.experiments.bros.main import STUDY as BROS
from twinserve.experiments.echo.main import STUDY as ECHO
from twinserve.experiments.justitia.main import STUDY as JUSTITIA
from twinserve.experiments.layerkv.main import STUDY as LAYERKV
from twinserve.experiments.measured.truth import FILES
from twinserve.experiments.study.command import STUDIES as KINDS
from twinserve.experiments.study.study import CLAIMS_FILE, TEXT_FILE, Study, read_points
from twinserve.experiments.study.verdict import Verdict, counted
from twinserve.experiments.systems.main import STUDY as SYSTEMS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
# of all systems: figures whose page says that they have not been run
NOT_RUN: set[str] = set()
STUDIES = {"BROS": BROS, "Echo": ECHO, "LayerKV": LAYERKV, "Justitia": JUSTITIA}
SHOWN = [verdict for verdict in get_args(Verdict) if verdict != "not reproduced"]


def row(name: str, study: Study) -> str:
    """The row of a system on the page."""
    words = counted(study.claims(RESULTS / study.system))
    numbers = [str(words.get(verdict, 0)) for verdict in SHOWN]
    link = f"[{name}](results/{study.system}/{study.report})"
    return "| " + " | ".join([link, *numbers]) + " |"


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_counts_what_the_results_say(name):
    text = (ROOT / "docs" / "papers.md").read_text()
    assert f"| | {' | '.join(SHOWN)} |" in text
    assert row(name, STUDIES[name]) in text


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_claim_that_does_not_agree_says_why(study):
    for claim in study.claims(RESULTS / study.system):
        assert claim.verdict == "agrees" or len(claim.why) > 8, claim


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_what_is_claimed_is_what_the_tables_say(study):
    """The tables as anybody reads them: the claims that the study makes of each are those kept."""
    for figure in study.figures:
        folder = RESULTS / study.system / figure.name
        if (folder / CLAIMS_FILE).is_file():
            kept = json.loads((folder / CLAIMS_FILE).read_text())["claims"]
            found = figure.claims(pd.read_csv(folder / "table.csv"))
            assert [asdict(claim) for claim in found] == kept, figure.name


FIGURES = {
    f"{name}/{figure.name}": figure
    for name in KINDS
    if isinstance(found := import_module(f"twinserve.experiments.{name}.main").STUDY, Study)
    for figure in found.figures
    if (RESULTS / name / figure.name / "points.csv").is_file()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_table_comes_from_the_runs_beside_it(name):
    """As far as the digits of points.csv tell, and so does its text."""
    figure, folder = FIGURES[name], RESULTS / name
    table = figure.table(read_points(folder))
    again = pd.read_csv(StringIO(table.to_csv(index=False)))
    pd.testing.assert_frame_equal(again, pd.read_csv(folder / "table.csv"), rtol=1e-9)
    if figure.text is not None:
        assert figure.text(table) == (folder / TEXT_FILE).read_text()


# page, what stands in it, kept table, its row, and columns with a factor in the page's units
QUOTED = (
    ("bros", "`all` loses {:.0f} ± {:.0f} points at 15/s", "bros/parts_high",
     {"variant": "replacement until one fails"},
     (("slo_attainment_change", -100), ("slo_attainment_change_ci", 100))),
    ("bros", "latency {:.0f} %, best-effort throughput {:.0f} % at 10/s", "bros/parts",
     {"variant": "fixed batch size"}, (("normalized_ms_change", 100), ("be_rps_change", 100))),
    ("bros", "at load 1: {:,.0f} ± {:,.0f} best-effort tokens/s", "systems/prefixes",
     {"load": 1.0, "system": "prefix cache", "policy": "bros:chunk=fit,kv=paged"},
     (("be_tokens_per_s", 1), ("be_tokens_per_s_ci", 1))),
    ("bros", "tokens/s, {:,.0f} ± {:,.0f} without", "systems/prefixes",
     {"load": 1.0, "system": "no prefix cache", "policy": "bros:chunk=fit,kv=paged"},
     (("be_tokens_per_s", 1), ("be_tokens_per_s_ci", 1))),
    *(("validation", "{:.1f} %, {:.1f} %, {:.1f} % |", "validation/steps",
       {"model": model, "form": form}, (("all", 100), ("decode", 100), ("other", 100)))
      for model in ("llama-2-70b", "codellama-34b") for form in ("operators", "roofline")),
)  # fmt: skip


@pytest.mark.parametrize(("page", "text", "kept", "of", "columns"), QUOTED)
def test_a_sentence_has_the_numbers_of_a_kept_table(page, text, kept, of, columns):
    rows = pd.read_csv(RESULTS / kept / "table.csv")
    for name, value in of.items():
        rows = rows[rows[name] == value]
    said = text.format(*(factor * rows[name].item() for name, factor in columns))
    assert said in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_page_has_the_kept_errors_of_measured_runs():
    rows = pd.read_csv(RESULTS / "validation" / "runs" / "table.csv").query("form == 'operators'")
    text, page = "{:+.1f} % ({:+.1f}, {:+.1f})", (ROOT / "docs" / "validation.md").read_text()
    of = 100 * rows[["mean", "p50", "p99"]]
    said = pd.Series([text.format(*row) for row in of.to_numpy()], rows.index)
    for run, cells in said.groupby(rows.run, sort=False):
        assert f"{' | '.join(cells)} |" in page, run


def test_the_manifest_of_measurements_names_what_reads_them():
    studies = {name: import_module(f"twinserve.experiments.{name}.main").STUDY for name in KINDS}
    figures = {f"{name} {one.name}" for name, study in studies.items() for one in study.figures}
    for file, of in FILES.items():
        assert of["what"] and of["source"] and of["read_by"], file
        assert all(by in figures or (ROOT / by).is_file() for by in of["read_by"]), file


def test_every_figure_of_all_systems_is_whole_and_the_page_names_it():
    folder = RESULTS / SYSTEMS.system
    names = {figure.name for figure in SYSTEMS.figures}
    assert {file.parent.name for file in folder.glob("**/table.csv")} == names - NOT_RUN
    page = (ROOT / "docs" / "systems.md").read_text()
    assert all(f"`{name}`" in page for name in names)
