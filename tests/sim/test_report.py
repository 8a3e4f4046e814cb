"""The report of runs: one page that needs nothing else, with every run once, in order, and the
numbers of the runs' files."""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.disk import no_file_above
from tests.sim.reported import Page, write_toy
from tests.sim.test_results_rows import empty_rows, toy_rows
from twinserve.sim.report import page as pages
from twinserve.sim.report.chart import number
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import ResultsError, RunResult, read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.options import MetricsOptions, Objective

ORDER = ["zulu", "run-2", "run-10", "<rt> & first"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for i, name in enumerate(ORDER):
        write_toy(folder / name, prefer_rt=i % 2 == 1, seed=i, every_s=1.0)
    return folder


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page")
    return write_report([runs / name for name in ORDER], out)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """No charts: drawing them is most of the time that a report takes."""
    monkeypatch.setattr(pages._Drawn, "chart", lambda self, chart: "")


@pytest.mark.slow
def test_the_page_is_one_file_that_is_whole_and_loads_nothing(page):
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == []
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]
    assert "default-src 'none'" in text and "connect-src" not in text


@pytest.mark.slow
def test_every_run_is_there_once_in_the_order_given(page):
    (head, *_), *_ = Page(page.read_text()).tables
    assert head == ["", *ORDER]


@pytest.mark.slow
def test_a_point_of_a_chart_is_the_number_of_its_run(page, runs):
    text = page.read_text()
    summaries = {name: read_run(runs / name).summary for name in ORDER}
    head, *rows = Page(text).numbers(text, "throughput-ttft")
    assert [row[1] for row in rows] == ORDER
    for _, name, x, y in rows:
        assert x == number(summaries[name]["total_token_throughput"])
        assert y == number(summaries[name]["classes"]["rt"]["p99_ttft_ms"])
    head, *rows = Page(text).numbers(text, "attainment-rt")
    for _, name, _, share, low, high in rows:
        assert share == number(summaries[name]["classes"]["rt"]["slo_attainment"])
        assert float(low) <= float(share) <= float(high)
    head, *rows = Page(text).numbers(text, "windows-in_system")
    for name in ORDER:
        windows = [w["classes"]["rt"]["in_system"] for w in summaries[name]["windows"]]
        assert [row[3] for row in rows if row[0] == name] == [number(w) for w in windows]


@pytest.mark.slow
def test_a_chart_says_what_is_seen_to_who_cannot_see_it(page, runs):
    parsed = Page(page.read_text())
    assert len(parsed.alts) == len(parsed.figures) > 12
    medians = {name: read_run(runs / name).summary["classes"]["rt"] for name in ORDER}
    alt = parsed.alts[parsed.figures.index("cdf-rt-ttft_s")]
    low = min(medians, key=lambda name: medians[name]["median_ttft_ms"])
    assert f"{medians[low]['median_ttft_ms'] / 1000:.4g} s ({low})" in alt


@pytest.mark.slow
def test_labels_are_escaped_and_differing_settings_shown(page):
    text = page.read_text()
    assert "&lt;rt&gt; &amp; first" in text and "<rt>" not in text
    settings = text[text.index('<table class="settings') :].split("</table>")[0]
    assert ">policy</td>" in settings and ">seed</td>" not in settings
    assert "&quot;seed&quot;: 0" in text  # the whole of run.json stands below


@pytest.mark.slow
def test_how_to_run_each_again_is_said_and_can_be_typed(page, runs):
    text = page.read_text()
    assert f"simulate --config {runs}/run-2/run.json --metrics-every 1 --out again" in text
    assert "&lt;rt&gt; &amp; first/run.json&#x27;" in text  # quoted for a shell


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(runs, page, tmp_path):
    again = write_report([runs / name for name in ORDER], tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()


@pytest.mark.slow
def test_without_the_library_charts_are_pictures_and_the_page_says_so(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    text = write_report([runs / "zulu"], tmp_path / "p.html").read_text()
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == [] and "://" not in text
    assert text.count("<svg") == len(parsed.figures) > 8 and "<script" not in text
    assert "twinserve[report]" in text and "var(--ink)" in text


@pytest.mark.slow
def test_one_run_without_objectives_has_fewer_charts(tmp_path):
    rows = toy_rows(20, be_share=0.0, slo=(float("nan"), float("nan")))
    write_run(tmp_path / "run", RunResult(rows, {}, {}, summarise(rows)))
    parsed = Page(write_report([tmp_path / "run"], tmp_path / "page.html").read_text())
    assert not any(key.startswith(("attainment", "front", "throughput")) for key in parsed.figures)
    assert "cdf-rt-ttft_s" in parsed.figures and "cdf-be-ttft_s" not in parsed.figures


def test_a_run_without_requests_can_be_reported(tmp_path):
    write_run(tmp_path / "run", RunResult(empty_rows(), {}, {}, summarise(empty_rows())))
    assert Page(write_report([tmp_path / "run"], tmp_path).read_text()).figures == []


def test_runs_of_different_lists_and_unfinished_requests_are_told(undrawn, tmp_path):
    for seed in (0, 1):
        rows = toy_rows(20, seed=seed)
        rows.requests.loc[5, "finished"] = seed == 0
        write_run(tmp_path / f"s{seed}", RunResult(rows, {}, {}, summarise(rows)))
    text = write_report([tmp_path / "s0", tmp_path / "s1"], tmp_path / "out").read_text()
    assert "do not share one list" in text
    assert "s1: 1 of 20 requests did not finish" in text


def test_errors_are_one_line(undrawn, runs, tmp_path):
    with pytest.raises(ResultsError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path)
    with pytest.raises(ResultsError, match="no folders given"):
        write_report([], tmp_path)
    with pytest.raises(ResultsError, match="given twice"):
        write_report([runs, runs / "zulu"], tmp_path)
    with pytest.raises(ResultsError, match="holds no run"):
        write_report([tmp_path], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        write_report([runs], tmp_path / "file" / "report.html")


def test_a_page_that_is_there_is_only_replaced_where_that_was_said(undrawn, runs, tmp_path):
    page = tmp_path / "notes.html"
    page.write_text("mine")
    with pytest.raises(ResultsError, match="is there already: .* --overwrite"):
        write_report([runs], page)
    assert page.read_text() == "mine" and list(tmp_path.iterdir()) == [page]
    page.unlink()
    page.mkdir()
    with pytest.raises(ResultsError, match="is a folder"):
        write_report([runs], page, overwrite=True)
    page.rmdir()
    assert "<h1>" in write_report([runs], page, overwrite=True).read_text()


def test_a_full_disk_leaves_the_old_page(undrawn, runs, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    with no_file_above(2000), pytest.raises(ResultsError, match="cannot be written"):
        write_report([runs], page, overwrite=True)
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


@pytest.mark.slow
def test_runs_of_one_name_are_told_apart_by_their_parents(undrawn, tmp_path):
    for parent in ("x", "y"):
        write_toy(tmp_path / parent / "run", n=10)
    text = write_report([tmp_path / "x", tmp_path / "y"], tmp_path / "out").read_text()
    assert Page(text).tables[0][0] == ["", "x/run", "y/run"]


def test_verdicts_are_in_the_page(undrawn, tmp_path):
    rows = toy_rows(20)
    objectives = (
        Objective("rt", "ttft", 0.4, statistic="p50"),
        Objective("rt", "e2el", 0.001, statistic="p99"),
    )
    summary = summarise(rows, MetricsOptions(objectives=objectives))
    write_run(tmp_path / "run", RunResult(rows, {}, {}, summary))
    text = write_report([tmp_path / "run"], tmp_path / "out").read_text()
    assert "<td>rt: TTFT p50 &lt; 400 ms</td><td>kept</td>" in text
    assert "<td>rt: E2E p99 &lt; 1 ms</td><td>missed (0.0 %)</td>" in text


@pytest.mark.nightly
def test_a_page_is_as_small_for_two_thousand_times_the_rows(tmp_path):
    small = toy_rows(100, rate=20.0)
    many = 2000
    requests = pd.concat([small.requests] * many, ignore_index=True)
    requests["request_id"] = [f"r{i}" for i in range(len(requests))]
    steps = pd.concat([small.steps] * many, ignore_index=True)
    shift = np.repeat(np.arange(many) * float(small.steps["end_s"].max()), len(small.steps))
    steps["start_s"] += shift
    steps["end_s"] += shift
    large = RunResult(type(small)(requests, steps, small.gaps, small.kv_total_blocks))
    sizes = []
    for name, run in (("small", RunResult(small)), ("large", large)):
        run.summary = summarise(run.rows)
        write_run(tmp_path / name, run)
        page = write_report([tmp_path / name], tmp_path / f"{name}.html")
        sizes.append(page.stat().st_size)
    assert len(steps) > 400_000 and sizes[1] < 2 * sizes[0]
    text = page.read_text()
    assert "Thinned: means over" in text and f"up to {len(steps):,} steps" in text
    assert "are drawn at 600 of their ranks" in text


def test_the_extra_is_named_as_the_page_names_it():
    """What a page tells its reader to install is there to be installed."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert "report" in tomllib.loads(text)["project"]["optional-dependencies"]
