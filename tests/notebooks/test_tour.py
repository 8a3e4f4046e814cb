"""The guided tour runs from top to bottom, and what it says about its results is true."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

TOUR = Path(__file__).resolve().parents[2] / "notebooks" / "tour.ipynb"


def notebook() -> dict:
    return json.loads(TOUR.read_text(encoding="utf-8"))


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def tour(tmp_path_factory) -> dict:
    """The notebook's names after its last cell; run in an empty folder, without original traces."""
    matplotlib = pytest.importorskip("matplotlib")
    names: dict = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tour")
        patch.chdir(folder)
        patch.delenv("TWINSERVE_TRACES", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        before = matplotlib.get_backend()
        matplotlib.use("Agg")
        for number, source in enumerate(code_cells(), start=1):
            exec(compile(source, f"tour.ipynb, code cell {number}", "exec"), names)  # noqa: S102
        names["plt"].close("all")
        matplotlib.use(before)
        names["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))
    return names


def test_format_is_plain_and_outputs_are_saved():
    book = notebook()
    assert (book["nbformat"], book["nbformat_minor"] >= 5) == (4, True)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in book["cells"]:
        assert "".join(cell["source"]).strip()
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
    shown = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert TOUR.stat().st_size < 200_000


@pytest.mark.parametrize("source", code_cells(), ids=lambda source: source.splitlines()[0])
def test_cells_are_python_without_magic(source: str):
    ast.parse(source)
    assert max(map(len, source.splitlines())) <= 120


@pytest.mark.slow
def test_one_policy_serves_the_replica(tour):
    assert tour["workload"].provenance.replica
    assert tour["first"].summary["completed"] == 400
    assert 0 < tour["first"].summary["kv"]["prefix_hit_rate"] < 1


@pytest.mark.slow
def test_bros_meets_objectives_that_vllm_misses(tour):
    rt = {label: result.summary["classes"]["rt"] for label, result in tour["results"].items()}
    assert rt["bros"]["ttft_attainment"] > 0.9
    assert rt["vllm"]["ttft_attainment"] < 0.5
    assert rt["bros"]["submitted"] == rt["vllm"]["submitted"]


@pytest.mark.slow
def test_files_hold_what_the_run_gave(tour):
    assert "tour-results/bros/requests.parquet" in tour["files"]
    for label, result in tour["results"].items():
        assert len(tour["requests"][label]) == len(result.rows.requests)
        assert (
            tour["steps"][label]["kv_used_blocks"].max() == result.summary["kv"]["peak_used_blocks"]
        )
        mine = tour["requests"][label]
        mean_s = mine.loc[mine["service_class"] == "rt", "ttft_s"].mean()
        assert mean_s * 1000 == pytest.approx(result.summary["classes"]["rt"]["mean_ttft_ms"])


@pytest.mark.slow
def test_plots_draw_every_policy(tour):
    cdf, memory = tour["left"], tour["right"]
    assert {"vllm", "bros"} <= {line.get_label() for line in cdf.get_lines()}
    assert len(memory.get_lines()) == 3
    for line in cdf.get_lines()[:2]:
        assert line.get_ydata()[-1] == pytest.approx(1.0)


@pytest.mark.slow
def test_own_policy_serves_short_prompts_first(tour):
    vllm, ours = tour["summaries"]["vllm"], tour["summaries"]["shortest-prompt-first"]
    assert ours["completed"] == vllm["completed"] == 1500
    assert ours["mean_ttft_ms"] < vllm["mean_ttft_ms"]
    assert ours["p99_ttft_ms"] > vllm["p99_ttft_ms"]
