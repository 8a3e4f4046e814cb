"""Reports of folders of any kind: nested ones, sweeps, plans, comparisons, validations; and of
folders that were damaged or that mean harm."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.sim.reported import Page, write_toy
from twinserve.sim.report import page as pages
from twinserve.sim.report.chart import number
from twinserve.sim.report.found import MARKS, find
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.folders import folder
from twinserve.sim.results.versions import LIMITS

TEX = r"$$\frac{1}{0}$$<i>\[x\]\(y\)"
HOSTILE = "<img src=x onerror=alert(1)>$\\frac{1}{0}$\x00</script>\u202e&amp;"


@pytest.fixture
def undrawn(monkeypatch) -> None:
    monkeypatch.setattr(pages._Drawn, "chart", lambda self, chart: "")


def sized(replicas: int = 2, answer: str = "meets", share: float = 0.97) -> dict:
    kept = {"metric": "ttft", "share": share, "low": share - 0.02, "high": share + 0.02}
    kept |= {"value_s": 0.5, "slack": 0.5, "answer": answer}
    memory = {"predicted_share": 0.31, "held_share": 0.25, "exceeded": 0.04}
    return {
        "replicas": replicas, "answer": answer, "attained": [[kept]], "peak_kv_share": 0.42,
        "memory": memory,
    }  # fmt: skip


def row(gpu: str, usd: float, answer: str = "meets", share: float = 0.97) -> dict:
    closer = {"sizes": [sized(2, answer, share)], "draws": 3, "steps_fast": 1, "steps_slow": 4}
    closer |= {"step_time_errors": "9%", "below": None, "steps_farthest": 16}
    return {
        **{"gpu": gpu, "tp": 2, "policy": "vllm", "router": "r", "status": "enough", "reason": ""},
        **{"at_least_replicas": 2, "replicas": 2, "gpus": 4, "binds": ["ttft"]},
        **{"usd_per_hour": usd, "usd_per_million_tokens": 1.25},
        **{"sized": sized(2, answer, share), "closer": closer, "commands": ["vllm serve m"]},
    }


PLAN = {
    "question": {"model": "m", "slo": "ttft p90 < 1 s", "traces": ["t.csv"], "gpus": ["a", "b"]},
    "rows": [row("h100", 7.5, "undecided", 0.91), row("h200", 9.25), row("a100", 11.0)],
    "ranked_by": "usd",
    "warnings": ["the first row is undecided"],
    "left_out": [{"gpu": "t4", "tp": 1, "reason": "no KV memory"}],
}
COMPARISON = {
    "verdicts": ["run does not agree"],
    "measured": ["bench.json"],
    "runs": ["run"],
    "rows": [
        {
            **{"service_class": "all", "metric": "ttft", "statistic": "mean", "measured": 0.123},
            **{"spread": None, "simulated": [0.15], "errors": [0.15 / 0.123 - 1]},
        }
    ],
    "windows": [
        {
            **{"metric": "ttft", "start_s": 0, "end_s": 5, "requests": 9, "measured": 0.1},
            **{"spread": None, "simulated": [0.2]},
        }
    ],
    "curves": [
        {"metric": "ttft", "name": "measured b", "seconds": [0.1, 0.2], "share": [0.5, 1.0]},
        {"metric": "ttft", "name": "simulated run", "seconds": [0.1, 0.3], "share": [0.5, 1.0]},
    ],
}
VALIDATION = {
    "vllm": "0.32",
    "config": {},
    "failed": {"echo": "the engine died"},
    "policies": [
        {
            "policy": "vllm",
            "locked": {"steps": 40, "drift": 0, "mean_absolute_error_pct": 4.1},
            "notes": ["partial, as the time was up: 1 of 3 live runs"],
            "metrics": [
                {
                    **{"metric": "ttft", "statistic": "mean", "simulated": 12.5, "live": 12.0},
                    **{"error_pct": 4.2, "spread_pct": None},
                }
            ],
        }
    ],
}
SWEEP = {"common": {"policy": ["vllm"], "trace": "sharegpt", "kv": None}, "seeds": [0, 1]}
SWEEP |= {"objectives": ["rt: TTFT < 2 s"]}


def _point(load: float, ttft_s: float, user: float) -> dict:
    kept = {"objective": "rt: TTFT p90 < 1 s", "share": 0.95, "value_s": ttft_s}
    return {"load": load, "attained": [kept], "tokens_per_s_user": user, "grows": False} | {
        "tokens_per_s_gpu": 100 * load
    }


LIMIT = {
    "objectives": ["rt: TTFT p90 < 1 s"],
    "bounds": [{"name": "TTFT p90", "metric": "ttft", "bound_s": 1.0, "bound": "1 s"}],
    "lines": ["a@h100: 4 requests/s keep the objectives"],
    "table": {"head": ["requests/s", "TTFT p90, ms"], "rows": [["4", "800"], ["5", "1,200"]]},
    "notices": [],
    "unit": "requests/s",
    "limits": [
        {"setting": "a@h100", "load": 4, "points": [_point(4, 0.8, 50), _point(5, 1.2, 40)]}
    ],
    "front": [{"setting": "a@h100", "load": 4}, {"setting": "a@h100", "load": 5}],
}


def put(folder: Path, kind: str, document: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKS[kind]).write_text(json.dumps(document))
    return folder


def put_sweep(folder: Path, policies=("vllm", "bros"), axis: str = "rate") -> Path:
    rates = [2.0, 4.0, 8.0]
    rows = [
        {
            **{"policy": p, axis: r, "seeds": 2, "total_token_throughput": 100 * r + i},
            **{"total_token_throughput_ci": 3.0, "classes.rt.slo_attainment": 0.9 - i / 10},
            **{"classes.rt.slo_attainment_ci": 0.05, "classes.rt.p99_ttft_ms": 10.0 * r},
            "classes.rt.p99_ttft_ms_ci": float("nan"),
        }
        for i, p in enumerate(policies)
        for r in rates
    ]
    put(folder, "sweep", SWEEP)
    pd.DataFrame(rows).to_csv(folder / "table.csv", index=False)
    gain = {"policy": policies[1], axis: rates, "number": "output_throughput", "difference": 7.0}
    gain |= {"baseline": policies[0], "runs": 2, "ci": 2.0, "verdict": "significant"}
    pd.DataFrame(gain).to_csv(folder / "differences.csv", index=False)
    return folder


def put_validation(folder: Path) -> Path:
    put(folder, "validation", VALIDATION)
    for name in ("simulated", "live-1"):
        write_toy(folder / "vllm" / name, n=12)
    steps = {"predicted_s": [0.01, 0.02], "measured_s": [0.011, 0.02], "prefill_tokens": [0, 5]}
    pd.DataFrame(steps).to_parquet(folder / "vllm-steps.parquet")
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("all") / "results"
    write_toy(folder / "deep" / "deeper" / "run-10", n=12)
    write_toy(folder / "deep" / "deeper" / "run-9", n=12)
    put_sweep(folder / "a sweep")
    put(folder / "plans" / "first", "plan", PLAN)
    put(folder / "compared", "comparison", COMPARISON)
    put_validation(folder / "validated")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "run.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def page(everything, tmp_path_factory) -> str:
    return write_report([everything], tmp_path_factory.mktemp("page")).read_text()


@pytest.mark.slow
def test_folders_of_every_kind_are_found_at_any_depth(everything):
    found = [(one.kind, one.label) for one in find([everything])]
    assert found == [
        ("sweep", "a sweep"), ("comparison", "compared"), ("run", "run-9"), ("run", "run-10"),
        ("plan", "first"), ("validation", "validated"), ("run", "live-1"), ("run", "simulated"),
    ]  # fmt: skip


def test_a_folder_that_is_given_twice_is_refused(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").touch()
    with pytest.raises(ResultsError, match="given twice; name each folder once"):
        find([tmp_path / "one", tmp_path])


@pytest.mark.slow
def test_each_has_a_chapter_and_runs_of_a_validation_are_in_its_own(page):
    parsed = Page(page)
    assert parsed.open == [] and parsed.loads == []
    chapters = [part.partition("</h2>")[0] for part in page.split("<h2>")[1:]]
    assert chapters == [
        "Runs", "Sweep a sweep", "Comparison compared", "Plan first", "Validation validated",
    ]  # fmt: skip
    assert parsed.tables[0][0] == ["", "run-9", "run-10"]
    assert ["", "live-1", "simulated"] in [table[0] for table in parsed.tables]


@pytest.mark.slow
def test_runs_of_one_command_are_in_the_order_of_its_policies(undrawn, tmp_path):
    for place, name in enumerate(("vllm", "bros:chunk=fit", "echo")):
        write_toy(tmp_path / "runs" / folder(name), name, place=place, n=10)
    text = write_report([tmp_path / "runs"], tmp_path / "p.html").read_text()
    assert Page(text).tables[0][0] == ["", "vllm", "bros:chunk=fit", "echo"]
    verdict = text.partition("<h2>Runs</h2>")[2].partition("</h3>")[0]
    assert verdict.startswith("\n<h3>Requests that keep their objectives: ")


@pytest.mark.slow
def test_a_sweep_shows_its_means_and_intervals(page):
    head, *rows = Page(page).numbers(page, "sweep-classes.rt.slo_attainment")
    shown = {(r[0], r[2]): r[3:] for r in rows}
    assert shown["vllm", "2"] == [number(0.9), number(0.85), number(0.95)]
    assert shown["bros", "8"] == [number(0.8), number(0.75), number(0.85)]
    head, *rows = Page(page).numbers(page, "sweep-throughput-p99_ttft_ms")
    assert [r[2] for r in rows] == ["200", "400", "800", "201", "401", "801"]
    assert "Objectives: rt: TTFT &lt; 2 s." in page
    assert "Differences to vllm" in page and "<td>7.0 ± 2.0 *</td>" in page
    assert "settings of all runs" in page  # of an earlier version, which kept no combinations


@pytest.mark.slow
def test_a_plan_shows_what_binds_its_memory_and_its_front(page):
    table = next(t for t in Page(page).tables if t[0][0] == "replicas of")
    first = dict(zip(table[0], table[1], strict=True))
    assert first["$/hour"] == "7.50" and first["answer"] == "undecided" and first["binds"] == "TTFT"
    assert (first["KV predicted, %"], first["KV held, %"]) == ("31.0", "25.0")
    assert (first["held over predicted, %"], first["KV peak, %"]) == ("4.0", "42.0")
    assert first["steps off"] == "1 to 4" and "the first row is undecided" in page
    head, *rows = Page(page).numbers(page, "plan-front")
    assert {r[2] for r in rows} == {"7.5", "9.25", "11"}
    assert "twinserve plan --model m --slo &#x27;ttft p90 &lt; 1 s&#x27; --trace t.csv" in page


@pytest.mark.slow
def test_limits_show_what_is_kept_and_the_front(tmp_path):
    put(tmp_path / "found", "limit", LIMITS.numbered(LIMIT))
    shown = write_report([tmp_path / "found"], tmp_path / "page.html").read_text()
    assert "<h1>Limit found" in shown and LIMIT["lines"][0] in shown
    assert ["4", "800"] in next(t for t in Page(shown).tables if t[0][0] == "requests/s")
    head, *rows = Page(shown).numbers(shown, "limit-front")
    assert {r[2] for r in rows} == {"40", "50"}


@pytest.mark.slow
def test_a_comparison_and_a_validation_show_both_sides(page):
    cells = [cell for table in Page(page).tables for line in table for cell in line]
    assert "<h3>run does not agree</h3>" in page
    assert "123 ms" in cells and "150 ms" in cells and "+22.0" in cells
    assert "12.5" in cells and "+4.2" in cells and "echo: failed: the engine died" in page
    assert "partial, as the time was up: 1 of 3 live runs." in page


def test_a_sweep_without_runs_says_so(undrawn, tmp_path):
    put(tmp_path / "s", "sweep", SWEEP)
    pd.DataFrame({"rate": [1], "seed": [0], "error": ["<b>bad</b>"]}).to_csv(
        tmp_path / "s" / "failures.csv", index=False
    )
    text = write_report([tmp_path / "s"], tmp_path / "p.html").read_text()
    assert "No run of this sweep has completed" in text and "&lt;b&gt;bad&lt;/b&gt;" in text


@pytest.mark.parametrize("kind", [kind for kind in MARKS if kind != "run"])
@pytest.mark.parametrize("text", ["{", "[]", "3", '{"a":' * 200 + "1" + "}" * 200, "\x00", "{}"])
def test_a_damaged_folder_is_one_line_with_its_file(tmp_path, kind, text):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / MARKS[kind]).write_text(text)
    with pytest.raises(ResultsError) as error:
        write_report([tmp_path / "odd"], tmp_path / "p.html")
    assert MARKS[kind] in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("kind", "document", "place", "value", "says"),
    [
        ("plan", PLAN, ("rows", 0, "usd_per_hour"), "7", "rows[0].usd_per_hour"),
        ("plan", PLAN, ("rows", 0, "sized", "peak_kv_share"), float("nan"), "peak_kv_share"),
        ("plan", PLAN, ("rows",), {}, "rows is dict"),
        ("comparison", COMPARISON, ("rows", 0, "simulated"), ["x"], "rows[0].simulated[0]"),
        ("comparison", COMPARISON, ("rows", 0, "simulated"), [], "not one number for each run"),
        ("comparison", COMPARISON, ("curves", 0, "seconds"), "abc", "curves[0].seconds"),
        ("validation", VALIDATION, ("policies", 0, "locked"), 3, "policies[0].locked"),
        ("sweep", SWEEP, ("seeds",), ["a"], "seeds[0]"),
    ],
)
def test_an_edited_number_is_told_by_its_place(tmp_path, kind, document, place, value, says):
    edited = json.loads(json.dumps(document))
    *path, last = place
    inner = edited
    for name in path:
        inner = inner[name]
    inner[last] = value
    put(tmp_path / "odd", kind, edited)
    with pytest.raises(ResultsError) as error:
        write_report([tmp_path / "odd"], tmp_path / "p.html")
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no table of a sweep"),
        ("policy,rate\nvllm,2\n", "no column seeds"),
        ("rate,seeds,a,a_ci\n1,2,many,0.1\n", "column a is not of numbers"),
        ("rate,seeds,a_ci\n1,2,0.1\n", "no column a"),
        ('rate,"seeds\n1,2', "no table of a sweep"),
    ],
)
def test_an_edited_table_of_a_sweep_is_told(tmp_path, content, says):
    put(tmp_path / "s", "sweep", SWEEP)
    (tmp_path / "s" / "table.csv").write_text(content)
    with pytest.raises(ResultsError, match=says) as error:
        write_report([tmp_path / "s"], tmp_path / "p.html")
    assert "\n" not in str(error.value)


def hostile_plan() -> dict:
    return PLAN | {
        "question": PLAN["question"] | {"model": HOSTILE},
        "rows": [one | {"gpu": HOSTILE, "commands": [HOSTILE]} for one in PLAN["rows"]],
        "warnings": [HOSTILE],
    }


@pytest.mark.slow
def test_a_hostile_folder_makes_an_escaped_page(tmp_path):
    put(tmp_path / "all" / "plan", "plan", hostile_plan())
    curves = [one | {"name": HOSTILE} for one in COMPARISON["curves"]]
    compared = COMPARISON | {"runs": [HOSTILE], "notices": [HOSTILE], "curves": curves}
    put(tmp_path / "all" / "compared", "comparison", compared)
    put_sweep(tmp_path / "all" / "sweep", (HOSTILE.replace("\x00", ""), "bros"), TEX)
    name = "<script>alert(1)<" + chr(92) + "script>$x$"
    write_toy(tmp_path / "all" / name, HOSTILE, {"error_bars": None, "trace": {"name": HOSTILE}})
    text = write_report([tmp_path / "all"], tmp_path / "p.html").read_text()
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == [] and "\x00" not in text
    assert "<img" not in text and "<script>alert" not in text and "&lt;img" in text


def test_links_in_a_circle_and_unreadable_files_end(undrawn, tmp_path):
    write_toy(tmp_path / "all" / "run", n=10)
    (tmp_path / "all" / "circle").symlink_to(tmp_path / "all")
    assert [one.label for one in find([tmp_path / "all"])] == ["run"]
    shutil.copytree(tmp_path / "all" / "run", tmp_path / "torn")
    (tmp_path / "torn" / "steps.parquet").write_bytes(b"PAR1")
    with pytest.raises(ResultsError, match="steps.parquet: torn"):
        write_report([tmp_path / "all", tmp_path / "torn"], tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()
