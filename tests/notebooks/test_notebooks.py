"""Notebooks run from top to bottom in a kernel of their own, show what is stored in them, and what
their text says of it is true."""

import ast
import importlib.util

import nbformat
import pytest

from tests.notebooks import books

LIVE = "simulated_against_live"
# What the text of a notebook says, as a cell after its last one.
CLAIMS = {
    "first_simulation": """
from itertools import pairwise
assert run.summary["classes"]["rt"]["saturation"]["verdict"] == "keeps up"
shares = found.table["classes.rt.slo_attainment"].tolist()
assert shares[0] > 0.99 > 0.6 > shares[2] and all(a >= b for a, b in pairwise(shares))
""",
    "bros_against_vllm": """
assert shares["vllm"] < 0.1 and min(shares["bros"], shares["bros:chunk=fit"]) > 0.98
assert all(0.85 < tokens[label] / tokens["vllm"] < 1 for label in ("bros", "bros:chunk=fit"))
name = "classes.rt.slo_attainment"
low, high = found.table.set_index("policy").loc[["vllm", "bros"], [name, f"{name}_ci"]].to_numpy()
assert high[0] - low[0] > 5 * (high[1] + low[1])
""",
    "your_own_policy": """
first, ours = (runs[label].summary for label in ("vllm", "shortest-prompt-first"))
assert ours["completed"] == first["completed"] == 1500
assert ours["mean_ttft_ms"] < first["mean_ttft_ms"] and ours["p99_ttft_ms"] > first["p99_ttft_ms"]
""",
    "plan_a_deployment": """
assert plan.best["sized"]["answer"] == "meets" and all(o["met"] for o in run.summary["objectives"])
rows = [one.best for one in (plan, strict)]
assert len({(row["gpu"], row["tp"], row["replicas"]) for row in rows}) == 2
""",
    "fleet_with_a_failure": """
kept = [one.summary["classes"]["rt"]["slo_attainment"] for one in runs.values()]
assert kept[1] < 0.7 and min(kept[0], kept[2]) > 0.99
assert len({one.summary["completed"] for one in runs.values()}) == 1
steps = runs["4 replicas, one fails"].steps
waiting = steps.groupby(steps.end_s // 20).waiting.max()
assert waiting[waiting.index < 9].max() < waiting.max() / 10 and 17 <= waiting.idxmax() <= 20
""",
    LIVE: """
assert shown.returncode == 0 and run.summary["kv"]["preemptions"]["recompute"] > 0
assert " 0" in next(line for line in shown.stdout.splitlines() if "drifted" in line)
""",
}


def cases() -> list:
    has_vllm = importlib.util.find_spec("vllm") is not None
    lacking = pytest.mark.skipif(not has_vllm, reason="needs vLLM")
    return [
        pytest.param(name, marks=[pytest.mark.live, lacking] if name == LIVE else [])
        for name in books.NAMES
    ]


def test_there_is_a_claim_for_every_notebook():
    assert set(CLAIMS) == set(books.NAMES)


@pytest.mark.parametrize("name", books.NAMES)
def test_it_is_plain_and_what_it_shows_is_stored(name):
    book = books.read(name)
    nbformat.validate(book)
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {kind for _, found in books.shown(book) for kind, _ in found}
    assert "text/html" in kinds and (name == LIVE or "image/png" in kinds)
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    for cell in code:
        ast.parse(cell.source)  # no magic
        assert max(map(len, cell.source.splitlines())) <= 100
    assert (books.FOLDER / f"{name}.ipynb").stat().st_size < 300_000


@pytest.mark.nightly
@pytest.mark.traces
@pytest.mark.parametrize("name", cases())
def test_it_runs_shows_what_is_stored_and_says_what_is_true(name, tmp_path):
    stored = list(books.shown(books.read(name)))
    book = books.read(name)
    book.cells.append(nbformat.v4.new_code_cell(CLAIMS[name]))
    now = list(books.shown(books.executed(book, tmp_path)))
    assert now[:-1] == stored
