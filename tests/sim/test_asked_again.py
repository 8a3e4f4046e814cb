"""The command that a page prints asks the same question again, with all of its settings."""

import json
import re
import shlex
from dataclasses import asdict
from html import unescape
from pathlib import Path

import pytest

from tests.sim.planned import write_trace
from twinserve.sim.cli.main import main, simulate_main, twinserve_app
from twinserve.sim.plan import planner
from twinserve.sim.plan.planner import Question
from twinserve.sim.report import page as pages
from twinserve.sim.report.html import write_report
from twinserve.sim.report.plan_part import again
from twinserve.sim.results.files import plain
from twinserve.sim.results.versions import PLANS
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.sweep import draw
from twinserve.sim.sweep.executors import local

# Of each command: options that change nothing of what is asked, and every other one.
CARRIED_OUT = {"--workers", "--out", "--json", "--quiet", "--overwrite", "--resume", "--help"}
CARRIED_OUT |= {
    "--fail-on-miss", "--timeline", "--decisions", "--export", "--bench-json", "--version",
}  # fmt: skip
CARRIED_OUT |= {"--executor", "--plot", "--retry-failed", "--any-version", "--dry-run"}
STARTING = {
    "--baseline",
    "--emit",  # files beside the plan
    "*",
    "--from-vllm",
    "--preset",
    "--config",
    "--params",
    "--grid",
    "--link-vars",
}  # become settings
MEASURED = (
    "--goodput ttft:512.5 tpot:50 --warmup 0.00001s --percentiles 50,99.95 --error-bars".split()
)
PLAN = (
    *"--model m.json --trace a.csv --trace=-b.csv --gpus h100,l40s --tp 1,4 --prices p.csv".split(),
    *("--slo", "ttft p90 < 1 s", "--policy", "bros:chunk=fit", "--policy", "vllm"),
    *"--router random --grow 1.23456789 --peak 0.00005 --lead 12 --seeds 3 --most-gpus 9".split(),
    *"--pool 1000000 --survive 1 --on-failure retry --detection 2.5 --step-times roofline".split(),
    *"--front-end vllm --kv-cache-dtype fp8 --gpu-memory-utilization 0.85 --enforce-eager".split(),
    *"--engine-version 0.19 --max-model-len 4096 --max-num-seqs 77 --prefill-decode --all".split(),
    *"--max-num-batched-tokens 1024 --no-async-scheduling --rate 2.5".split(),
    *"--format csv --columns arrival=ts:ms,prompt=in,output=out".split(),
)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr(pages._Drawn, "chart", lambda self, chart: "")


def asked_of(command: str) -> set[str]:
    """The first name of each option of a verb that says what is asked."""
    app = twinserve_app([command])[command]
    groups = app.assemble_argument_collection(parse_docstring=False)
    return {one.names[0] for one in groups if one.parse and one.names} - CARRIED_OUT


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        simulate_main(words[1:]) if words[0] == "simulate" else main(words[1:])
    assert not end.value.code


def listings(page: Path) -> list[str]:
    return [unescape(t) for t in re.findall(r"<pre>(.*?)</pre>", page.read_text(), re.DOTALL)]


def question_of(words: list[str], monkeypatch) -> Question:
    found: list[Question] = []

    def asked(question, *_):
        found.append(question)
        raise SystemExit(0)

    monkeypatch.setattr(planner, "make_plan", asked)
    run(words)
    return found[0]


@pytest.mark.parametrize("words", [PLAN, PLAN[:2] + PLAN[2:4] + PLAN[11:13]])
def test_the_page_of_a_plan(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.csv").write_text("gpu,usd_per_hour\nh100,2.5\n")
    question = question_of(["twinserve", "plan", *words], monkeypatch)
    kept = json.loads(json.dumps(plain(asdict(question))))
    assert question_of(shlex.split(again(kept)), monkeypatch) == question
    document = {"question": kept, "asked": ["kept although one replica fails"], "rows": []}
    (tmp_path / "plan.json").write_text(
        json.dumps(PLANS.numbered({**document, "ranked_by": "usd"}))
    )
    page = write_report([tmp_path], tmp_path / "page.html")
    assert listings(page)[-1] == again(kept) and document["asked"][0] in page.read_text()


def test_every_option_of_a_plan_is_tried():
    given = {word.partition("=")[0] for word in PLAN if word.startswith("--")}
    assert {name.replace("--no-", "--") for name in given} == asked_of("plan") - STARTING


def test_every_measure_of_a_run_and_of_a_sweep_is_tried():
    given = {word for word in MEASURED if word.startswith("--")}
    settings = {f"--{name.replace('_', '-')}" for name in SimulationConfig.model_fields}
    for verb, further in (
        ("simulate", {"--metrics-every", "--spare"}),
        ("sweep", {"--seeds", "--repeat"}),
    ):
        assert asked_of(verb) - settings - STARTING == given | further


@pytest.mark.slow
def test_the_page_of_a_run_and_of_a_sweep(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twinserve.sim.sweep.executors.processes", local)
    monkeypatch.setattr(draw, "write_plots", lambda *_: None)
    write_trace(tmp_path / "t.csv", count=30)
    (tmp_path / "f.csv").write_text("replica,kind,at_s\n1,crash,1\n")
    base = "--trace t.csv --replicas 2 --failures f.csv --no-prefix-caching --window 0 9".split()
    one = ["simulate", *base, *MEASURED, "--metrics-every", "2.5", "--spare"]
    several = ["twinserve", "sweep", *base, *MEASURED, "--grid", "rate_scale=1,2", "--seeds", "2"]
    several += ["--seed", "7", "--workers", "1", "--plot", "x=rate_scale"]
    for words, files in (
        (one, ("run.json", "summary.json", "requests.parquet")),
        (several, ("table.csv", "sweep.json", "runs.parquet")),
    ):
        run([*words, "--out", "first", "--quiet"])
        shown = listings(write_report([Path("first")], Path("page.html"), overwrite=True))
        command = shlex.split(next(t for t in shown if t.endswith("--out again")))
        (tmp_path / "combinations.json").write_text(shown[-1])
        run([*command, "--quiet"])
        for name in files:
            first, second = (tmp_path / folder / name for folder in ("first", "again"))
            assert first.read_bytes() == second.read_bytes(), name
        for folder in ("first", "again"):
            (tmp_path / folder).rename(tmp_path / f"{folder}-{command[0]}")
