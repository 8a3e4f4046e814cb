"""The study of routers: every figure at its smallest size, and what must hold in it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.routers import main as routers
from twinserve.experiments.routers.main import one_text, questions
from twinserve.experiments.study.study import Scale
from twinserve.sim.fleet.routers.registry import parse_router

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("routers")
    routers.STUDY.run([], Scale(quick=True, seeds=(0,)), out, workers=2)
    return out


@pytest.mark.nightly
def test_every_figure_has_points_a_table_and_a_plot(found):
    report = (found / "tables.md").read_text()
    assert "not run" not in report
    for figure in routers.STUDY.figures:
        files = {path.name for path in (found / figure.name).iterdir()}
        assert files == {"points.csv", "table.csv", "plot.png", "claims.json", "report.md"}
        assert figure.title in report
        points = pd.read_csv(found / figure.name / "points.csv")
        assert points.prefix_hit_rate.between(0, 1).all() and (points.busiest >= 1).all()


@pytest.mark.nightly
def test_gains_are_over_round_robin_of_the_same_repeat(found):
    points = pd.read_csv(found / "documents" / "points.csv")
    table = pd.read_csv(found / "documents" / "table.csv")
    assert table[table.router == routers.BASE].ttft_gain.isna().all()
    load = points.load.iloc[0]
    ttft = points[points.load == load].set_index("router").ttft_s
    mine = table[table.load == load].set_index("router").ttft_gain
    assert mine["sglang"] == pytest.approx(ttft["sglang"] / ttft[routers.BASE] - 1)


def test_every_router_of_the_study_can_be_parsed():
    points = [p for figure in routers.STUDY.figures for p in figure.points(Scale())]
    for name in {p.arguments.get("settings", p.arguments)["router"] for p in points}:
        assert parse_router(name).build().name == name.partition(":")[0]


def test_aged_signals_are_compared_with_fresh_ones():
    rows = [
        {"fault": f, "amount": a, "router": "llm-d", "seed": s, "slo_attainment": 0.9 - a / 10,
         "ttft_s": 1.0 + a}
        for f, a in (("age", 0.0), ("age", 1.0), ("lost", 0.5)) for s in range(3)
    ]  # fmt: skip
    table = routers.of_fresh(pd.DataFrame(rows)).set_index(["fault", "amount"])
    assert np.isnan(table.ttft_gain["age", 0.0])
    assert table.ttft_gain["age", 1.0] == pytest.approx(1.0)
    assert table.ttft_gain["lost", 0.5] == pytest.approx(0.5)


@pytest.mark.nightly
def test_a_text_that_all_prompts_share_goes_to_one_worker_of_sglang():
    """Above its threshold, with fewer requests under way than its balance waits for."""
    shared = {"texts": 1, "concurrency": 36, "rate": 3.0, "seed": 0}
    assert one_text("sglang", 0.35, **shared)["busiest"] == 2.0
    assert one_text("sglang", 0.25, **shared)["busiest"] < 1.1
    assert one_text("round-robin", 0.35, **shared)["busiest"] < 1.1


@pytest.mark.nightly
def test_routers_that_know_caches_find_documents_again():
    hits = {r: questions(r, 1.0, 200, seed=0)["prefix_hit_rate"] for r in ("random", "sglang")}
    assert hits["sglang"] > 1.5 * hits["random"]


def test_the_page_has_rows_of_the_kept_reports():
    page = (DOCS / "routers.md").read_text()
    section = page.partition("## Routers compared")[2].partition("## Route to")[0]
    shown = {line for line in section.splitlines() if line.startswith("|")}
    reports = sorted((DOCS / "results" / "routers").glob("*/report.md"))
    assert shown - {line for file in reports for line in file.read_text().splitlines()} == set()
    assert len(shown) > 20
