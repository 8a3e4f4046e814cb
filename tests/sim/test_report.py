"""The report: one page that needs nothing else, with figures that draw what the runs say."""

from __future__ import annotations

import base64
import io
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from tests.sim.test_results_rows import empty_rows, toy_rows
from twinserve.sim.report import html
from twinserve.sim.report.axes import draw_cdf, over_time, span
from twinserve.sim.report.figures import windows_figure
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import ResultsError, RunResult, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.options import MetricsOptions, Objective


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "runs"
    for name, prefer in (("fcfs", False), ("<rt> & first", True)):
        rows = toy_rows(80, prefer_rt=prefer, group_size=4, rate=20.0, blocks=200)
        config = {"policy": name, "seed": 0, "kv": {"blocks": 200}}
        write_run(folder / name, RunResult(rows, config, {"wall_s": 1.0}, summarise(rows)))
    return folder


@pytest.fixture(scope="module")
def page(runs) -> Path:
    return write_report([runs], runs.parent / "out")


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """One figure, a single point: drawing all of them is most of the time that a report takes."""
    png = io.BytesIO()
    Figure(figsize=(0.01, 0.01)).savefig(png)
    monkeypatch.setattr(html, "draw_all", lambda runs, progress: {"load": png.getvalue()})


class Page(HTMLParser):
    """Collects tags that are left open, what is loaded, and the images."""

    VOID = ("meta", "img", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.images, self.loads = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action"):
                (self.images if value.startswith("data:image/png") else self.loads).append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page):
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == []
    assert len(parsed.images) == 4
    assert "://" not in re.sub(r"base64,[^\"]*", "", text) and "<script" not in text


def test_figures_stand_beside_the_page_as_they_are_in_it(page):
    files = sorted(path.name for path in page.parent.glob("*.png"))
    names = ("attainment", "completion", "latency", "load")
    assert files == [f"report-{name}.png" for name in names]
    inside = {base64.b64decode(src.split(",", 1)[1]) for src in Page(page.read_text()).images}
    for name in files:
        data = (page.parent / name).read_bytes()
        assert data in inside
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 1000 and height > 300


def test_labels_are_escaped_and_differing_settings_shown(page):
    text = page.read_text()
    assert "&lt;rt&gt; &amp; first" in text and "<rt>" not in text
    settings = text[text.index('<table class="settings">') :].split("</table>")[0]
    assert "<td>policy</td>" in settings and "kv.blocks" not in settings
    assert "&quot;seed&quot;: 0" in text  # the whole of run.json stands below


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(runs, page, tmp_path):
    again = write_report([runs], tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()


def test_one_run_without_objectives_has_fewer_figures(tmp_path):
    rows = toy_rows(20, be_share=0.0, slo=(float("nan"), float("nan")))
    write_run(tmp_path / "run", RunResult(rows, {}, {}, summarise(rows)))
    page = write_report([tmp_path / "run"], tmp_path / "page.html")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "page-latency.png",
        "page-load.png",
    ]
    assert "not share" not in page.read_text()


def test_a_run_without_requests_can_be_reported(tmp_path):
    write_run(tmp_path / "run", RunResult(empty_rows(), {}, {}, summarise(empty_rows())))
    assert Page(write_report([tmp_path / "run"], tmp_path).read_text()).images == []


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
    with pytest.raises(ResultsError, match="no runs given"):
        write_report([], tmp_path)
    with pytest.raises(ResultsError, match="given twice"):
        write_report([runs / "fcfs", runs / "fcfs"], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        write_report([runs], tmp_path / "file" / "report.html")


def test_a_page_that_is_there_is_only_replaced_where_that_was_said(undrawn, runs, tmp_path):
    page = tmp_path / "notes.html"
    page.write_text("mine")
    with pytest.raises(ResultsError, match="is there already: .* --overwrite"):
        write_report([runs], page)
    assert page.read_text() == "mine" and list(tmp_path.iterdir()) == [page]
    page.rename(tmp_path / "other-load.png")
    with pytest.raises(ResultsError, match="other-load.png: is there already"):
        write_report([runs], tmp_path / "other.html")
    page.mkdir()
    with pytest.raises(ResultsError, match="is a folder"):
        write_report([runs], page, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2
    page.rmdir()
    assert "<h1>" in write_report([runs], page, overwrite=True).read_text()


def test_runs_of_one_name_are_told_apart_by_their_parents(undrawn, tmp_path):
    rows = toy_rows(10)
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "run", RunResult(rows, {}, {}, summarise(rows)))
    text = write_report([tmp_path / "x", tmp_path / "y"], tmp_path / "out").read_text()
    assert "<th>x/run</th><th>y/run</th>" in text


def test_the_curve_of_a_distribution_ends_at_all_requests_and_crosses_the_median():
    ax = Figure().subplots()
    draw_cdf(ax, {"a": np.array([0.3, 0.1, 0.2, 0.4])}, "TTFT", "time", "ms")
    x, y = ax.lines[0].get_data()
    assert y[-1] == 1.0 and x[-1] == pytest.approx(400)
    assert dict(zip(np.round(x[1:]), y[1:], strict=True))[200] == 0.5
    big = Figure().subplots()
    draw_cdf(big, {"a": np.random.default_rng(0).random(50_000)}, "TTFT", "time", "s")
    x, y = big.lines[0].get_data()
    assert len(x) < 3000 and y[-1] == 1.0
    assert np.interp(0.5, x, y) == pytest.approx(0.5, abs=0.02)


def test_time_means_weigh_steps_by_their_time_and_idle_as_nothing():
    steps = pd.DataFrame(
        {"replica": 0, "start_s": [0.0, 1.0, 6.0], "end_s": [1.0, 4.0, 8.0], "waiting": [2, 4, 10]}
    )
    means = over_time(steps, "waiting", np.array([0.0, 2.0, 4.0, 6.0, 10.0]))
    np.testing.assert_allclose(means, [(2 + 4) / 2, 4, 0, 20 / 4])
    both = pd.concat([steps, steps.assign(replica=1)])
    np.testing.assert_allclose(over_time(both, "waiting", np.array([0.0, 8.0])), 2 * 34 / 8)
    overlapping = steps.assign(start_s=[0.0, 0.5, 6.0])  # pipelined: planned before the last ended
    np.testing.assert_allclose(over_time(overlapping, "waiting", np.array([0.0, 8.0])), 34 / 8)


def test_windows_are_drawn_as_steps_for_the_runs_that_have_them():
    rows = toy_rows(60)
    summary = summarise(rows, MetricsOptions(every_s=2.0))
    runs = {"plain": RunResult(rows, summary=summarise(rows))}
    assert windows_figure(runs) is None
    figure = windows_figure(runs | {"cut": RunResult(rows, summary=summary)})
    served, inside, latency, attained = figure.axes
    ((arrivals, flow), (there,), (p99,), (share,)) = (
        [patch.get_data() for patch in ax.patches] for ax in (served, inside, latency, attained)
    )
    windows = summary["windows"]
    assert there.edges.tolist() == [w["start_s"] for w in windows] + [windows[-1]["end_s"]]
    online = [w["classes"]["rt"] for w in windows]  # best-effort ones would drown them
    assert arrivals.values.tolist() == [w["arrivals_per_s"] for w in online]
    assert flow.values.tolist() == [w["served_per_s"] for w in online]
    assert there.values.tolist() == [w["in_system"] for w in online]
    assert p99.values[0] == online[0]["p99_ttft_ms"] / 1000
    assert share.values[0] == online[0]["slo_attainment"]
    assert not np.isfinite(p99.values[-1])  # nobody arrived while the last ones were served


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


def test_titles_name_the_best_and_the_worst_run():
    show = "{:.0f}".format
    assert span("wait", {"a": 3.0, "b": 1.0, "c": 2.0}, show) == "wait 1 (b) to 3 (a)"
    assert span("done", {"a": 3.0, "b": 1.0}, show, high=True) == "done 3 (a) to 1 (b)"
    assert span("wait", {"a": 3.0, "b": None}, show) == "wait 3"
    assert span("wait:", {"a": None}, show) == "wait"
