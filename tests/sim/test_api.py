"""`import twinserve as ts`: the same runs as the commands, results that can be looked at, errors of
one line."""

import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

import twinserve as ts
from tests.commands import status
from tests.sim.benched import LOAD, bench, run_of
from tests.sim.planned import MODEL, write_trace
from twinserve.policies.base import Policy
from twinserve.policies.parts.fill import fill
from twinserve.policies.requests import State
from twinserve.sim.api.settings import EngineSettings, Settings
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SimulationConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "terminal.md"
SMALL = {"trace": "sharegpt", "rate": 30.0, "requests": 60, "seed": 3}
FLAGS = ["-t", "sharegpt", "--rate", "30", "--requests", "60", "--seed", "3"]


class LastComeFirstServed(Policy):
    """A policy of a user's own, as in a notebook."""

    name = "last-come"

    def on_arrival(self, row, requests): ...

    def on_finish(self, row): ...

    def plan(self, view, ledger):
        r = view.requests
        ledger.begin_step()
        left = r.computed_tokens < r.prompt_tokens + r.output_tokens
        rows = np.flatnonzero((r.state != State.FINISHED) & left)[::-1]
        plan = fill(view, ledger, rows, seats=self.limits.max_num_seqs, chunk=512)
        plan.moves = ledger.take_moves()
        return plan


@pytest.fixture(scope="module")
def runs() -> ts.Runs:
    return ts.simulate(["vllm", "bros:chunk=fit"], pool=4, **SMALL)


@pytest.mark.slow
def test_a_run_is_that_of_the_command(runs, capsys):
    assert not status(
        main, ["simulate", "-p", "vllm", "-p", "bros:chunk=fit", "--pool", "4", *FLAGS, "--json"]
    )
    assert json.loads(capsys.readouterr().out)["runs"] == json.loads(
        json.dumps(
            [
                {"label": label, **run.summary, "notices": run.config["notices"]}
                for label, run in runs.items()
            ]
        )
    )


def test_one_policy_is_one_run_and_a_list_is_many():
    one, many = ts.simulate("vllm", **SMALL), ts.simulate(["vllm"], **SMALL)
    assert isinstance(one, ts.Run) and isinstance(many, ts.Runs)
    assert one.summary == many["vllm"].summary


def test_errors_name_arguments_as_they_are_written():
    with pytest.raises(ts.TwinserveError, match="^rate_scale is for recorded .*: use rate$"):
        ts.simulate("vllm", "poisson", rate_scale=2.0)
    with pytest.raises(ts.TwinserveError, match="^fleet .*async_scheduling|^slo 'x<1'"):
        ts.plan("llama-3.1-8b", "poisson", "x<1")


def test_the_package_has_a_version_and_a_run_a_first_plot(runs):
    assert ts.__version__.count(".") >= 2
    assert runs["vllm"].plot().alt == runs["vllm"].plot.cdf("ttft").alt


def test_requests_have_their_latencies(runs):
    rows = runs["vllm"].requests
    real_time = rows[rows.service_class == "rt"]
    assert len(real_time) == 60
    summary = runs["vllm"].summary["classes"]["rt"]
    assert real_time.ttft_s.mean() * 1000 == pytest.approx(summary["mean_ttft_ms"])
    assert real_time.tpot_s.mean() * 1000 == pytest.approx(summary["mean_tpot_ms"])
    assert (real_time.e2el_s >= real_time.ttft_s).all()


def test_representations_are_short_tables_are_whole(runs):
    assert len(repr(runs["vllm"])) < 200 and "\n" not in repr(runs["vllm"])
    assert "TTFT" in repr(runs["vllm"]) and repr(runs) == "<Runs: vllm, bros:chunk=fit>"
    assert "Best-effort" in str(runs) and "bros:chunk=fit" in str(runs)
    assert max(map(len, str(runs).splitlines())) <= 110


class Tags(HTMLParser):
    """Whether what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}"


def test_a_notebook_shows_every_number_of_the_table(runs):
    parser = Tags()
    parser.feed(runs._repr_html_())
    assert parser.open == []
    numbers = re.compile(r"\d[\d.,]*")
    shown = set(numbers.findall(parser.text))
    assert len(shown) > 20 and set(numbers.findall(str(runs))) <= shown


def test_text_is_text_in_a_notebook_too(runs, monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "Best-effort" in str(runs) and capsys.readouterr().out == ""


def test_a_label_is_no_markup():
    run = ts.simulate("vllm", **SMALL)
    named = ts.Runs([ts.Run("<script>", run.result)])
    assert "<script>" not in named._repr_html_()


@pytest.mark.slow
def test_plots_show_themselves(runs, tmp_path):
    plot = runs.plot.cdf("tpot")
    assert plot._repr_png_().startswith(b"\x89PNG")
    assert [line.get_label() for line in plot.figure.legends[0].get_lines()] == list(runs)
    for kind, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert plot.save(tmp_path / f"plot.{kind}").read_bytes().startswith(begin)
    for found in (runs.plot.queue(), runs["vllm"].plot.kv(), runs.plot.throughput()):
        assert found.alt and found.figure.axes
    with pytest.raises(ts.TwinserveError, match="png, .svg or .pdf"):
        plot.save(tmp_path / "plot.doc")
    with pytest.raises(ts.TwinserveError, match="no chart 'cdf-all-ttft_s'"):
        runs.plot.cdf("ttft", "all")
    with pytest.raises(ts.TwinserveError, match="ttft, tpot or e2el"):
        runs.plot.cdf("latency")


def test_saved_runs_are_read_again(runs, tmp_path):
    places = runs.save(tmp_path / "out")
    again = ts.read_runs(tmp_path / "out")
    assert sorted(again) == sorted(runs) and len(places) == 2
    assert again["vllm"].summary == json.loads(json.dumps(runs["vllm"].summary))
    assert again["vllm"].requests.ttft_s.equals(runs["vllm"].requests.ttft_s)
    repeated = ts.simulate(config=tmp_path / "out" / "vllm" / "run.json")
    assert repeated.label == "vllm"
    assert repeated.requests.ttft_s.equals(runs["vllm"].requests.ttft_s)


@pytest.mark.slow
def test_a_class_is_a_policy_beside_others(tmp_path):
    mine = ts.simulate([LastComeFirstServed, "vllm"], **SMALL)
    assert list(mine) == ["last-come", "vllm"]
    assert ts.simulate(LastComeFirstServed, **SMALL).summary == mine["last-come"].summary
    with pytest.raises(ts.TwinserveError, match="last-come is given twice"):
        ts.simulate([LastComeFirstServed, LastComeFirstServed], **SMALL)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"polcy": "vllm"}, "did you mean 'policy'"),
        ({"policy": "bross"}, "did you mean 'bros'"),
        ({"policy": []}, "the list is empty"),
        ({"policy": [3]}, "3 is no policy"),
        ({"trace": "no such trace"}, "no such trace"),
        ({"rate": "fast"}, "rate: "),
        ({"load": 0.5, "rate": 1.0}, "both set the arrival rate"),
        ({"preset": "bros"}, "bros-hybrid"),
        ({"config": "no/such/run.json"}, "no/such/run.json"),
        ({"warmup": "soon"}, "warmup soon"),
        ({"percentiles": [101]}, "no percentile"),
        ({"goodput": {"ttft": -1}}, "ttft"),
        ({"goodput": {"ttft": None}}, "no number of milliseconds"),
        ({"decisions": True, "replicas": 2}, "drop replicas"),
    ],
)
def test_what_is_wrong_is_one_line(wrong, said):
    with pytest.raises(ts.TwinserveError) as error:
        ts.simulate(**{**SMALL, **wrong})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_is_asked_of_the_metrics_is_kept_to_the_last_digit():
    run = ts.simulate(goodput={"ttft": 1234.5678, "e2el": 10**7}, percentiles=99.9, **SMALL)
    assert run.config["metrics"]["goodput_ms"] == {"ttft": 1234.5678, "e2el": 1e7}
    assert run.summary["percentiles"] == [99.9]


def test_settings_are_those_of_the_command():
    model = SimulationConfig.model_fields
    hints = get_type_hints(Settings)
    assert set(hints) == set(model) - {"policy", "trace"}
    assert all(model[name].annotation == kind for name, kind in hints.items())
    own = get_type_hints(EngineSettings)
    assert own.items() <= hints.items()


@pytest.mark.slow
def test_a_sweep_is_that_of_the_command(tmp_path, capsys):
    grid = {"policy": ["vllm", "bros"], "rate": [10, 30]}
    rest = {name: value for name, value in SMALL.items() if name != "rate"}
    found = ts.sweep(grid, seeds=2, workers=1, **rest)
    assert len(found.runs) == 8 and not len(found.failures) and found.axes == ("policy", "rate")
    for seed in (3, 4):
        one = ts.simulate("bros", **{**SMALL, "seed": seed, "rate": 10})
        row = found.runs.query(f"policy == 'bros' and rate == 10 and seed == {seed}")
        assert row["classes.rt.mean_ttft_ms"].item() == one.summary["classes"]["rt"]["mean_ttft_ms"]
    assert found.plot("rate", "classes.rt.mean_ttft_ms").figure.axes
    assert "±" in str(found) and "<table" in found._repr_html_()
    listed = [{"policy": "vllm", "rate": 10}, {"policy": "bros", "rate": 30}]
    assert len(ts.sweep(listed, workers=1, out=tmp_path / "kept", **rest).table) == 2
    done: list = []
    ts.sweep(
        listed, workers=1, out=tmp_path / "kept", progress=lambda *said: done.append(said), **rest
    )
    assert done == [(2, 0, 2)]  # nothing was run again


def test_an_array_is_a_grid():
    rates = {"rate": np.linspace(10, 30, 2)}
    found = ts.sweep(rates, workers=1, trace="fixed:100,5", requests=5)
    assert found.runs.rate.tolist() == [10, 30]


@pytest.mark.parametrize("grid", [{}, [], {"lod": [1]}, {"load": []}, {"load": [-1]}, [1]])
def test_a_grid_that_cannot_be_is_one_line(grid):
    with pytest.raises(ts.TwinserveError) as error:
        ts.sweep(grid, trace="sharegpt")
    assert "\n" not in str(error.value) and "grid" in str(error.value)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        ts.simulat  # noqa: B018
    assert set(ts.__all__) <= set(dir(ts))
    for name in ts.__all__:
        assert inspect.getdoc(getattr(ts, name)), name


def test_to_import_it_loads_nothing_heavy():
    code = "import sys, twinserve; print([m for m in ('numpy', 'pandas') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.nightly
@pytest.mark.traces
def test_the_python_of_the_page_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    names: dict = {}
    printed = ""
    shown = 0
    for language, text in blocks:
        if language == "text":
            assert printed == text
            shown += 1
            continue
        sink = io.StringIO()
        with contextlib.redirect_stdout(sink):
            exec(text, names)  # a page of ours
        printed = sink.getvalue()
    assert shown == 5


def test_ranks_of_a_profile_may_vary():
    asked = {"trace": "fixed:64,4", "requests": 2, "rate": 1.0, "profile": "qwen3-8b@h100"}
    found = ts.sweep({"tensor_parallel_size": [1, 2]}, workers=1, slo="none", **asked)
    assert found.table.tensor_parallel_size.tolist() == [1, 2]
    one, two = found.runs["classes.rt.mean_tpot_ms"]
    assert one > two


# -- plan and compare ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> tuple:
    """What to plan for: the command's words, and the call's arguments."""
    folder = tmp_path_factory.mktemp("plan")
    trace = write_trace(folder / "t.csv", count=80, rate=40.0)
    (folder / "prices.csv").write_text("gpu,usd_per_hour\na100-40g,1\nl40s,0.7\n")
    return trace, "ttft p90 < 120 ms, tpot p90 < 20 ms", folder / "prices.csv"


@pytest.mark.slow
def test_a_plan_is_that_of_the_command(asked, capsys):
    trace, slo, prices = asked
    call = {"gpus": ["a100-40g", "l40s"], "tp": [1], "most_gpus": 6}
    found = ts.plan(MODEL, trace, slo, prices=prices, **call)
    words = [*("plan", "--model", MODEL, "-t", trace, "--slo", slo, "--prices", str(prices))]
    words += ["--gpus", "a100-40g,l40s", "--tp", "1", "--most-gpus", "6", "--workers", "1"]
    status(main, [*words, "--json"])
    theirs, ours = json.loads(capsys.readouterr().out), json.loads(json.dumps(found.document))
    for document in (theirs, ours):  # the command names settings that nobody gave
        document["question"].pop("settings")
    assert theirs == ours
    assert found.best is not None and found.best["commands"]
    assert found.table.gpu.tolist() == [row["gpu"] for row in found.document["rows"]]
    assert found.best["gpu"] in repr(found) and "\n" not in repr(found)
    assert "to start " in str(found) and "<pre " in found._repr_html_()
    assert found.plot().figure.axes


def test_a_plan_takes_a_servers_words():
    found = ts.plan(
        from_vllm=f"vllm serve {MODEL} --max-num-seqs 64",
        trace="fixed:100,10",
        slo="ttft p90 < 1 s",
        rate=2.0,
        peak=20.0,
        gpus="h100",
        tp=[1],
    )
    asked = found.document["question"]
    assert (asked["model"], asked["settings"]) == (MODEL, {"max_num_seqs": 64})
    assert found.best is not None and found.best["replicas"] == 1


def test_limits_are_those_of_the_command(capsys):
    asked = {"trace": "sharegpt", "requests": 24, "profile": "qwen3-8b@h100", "max_num_seqs": 8}
    found = ts.limit("e2el p80 < 4 s", concurrency=True, **asked)
    words = "limit -t sharegpt --requests 24 --profile qwen3-8b@h100 --max-num-seqs 8".split()
    status(main, [*words, "--slo", "e2el p80 < 4 s", "--concurrency", "--workers", "1", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.document))
    assert found.load == found.document["limits"][0]["load"]
    assert sorted(found.table.load) == [p["load"] for p in found.document["limits"][0]["points"]]
    assert f"{found.load} clients" in repr(found) and "keep the objectives" in str(found)
    assert found.plot("e2el").figure.axes and "<pre " in found._repr_html_()
    with pytest.raises(ts.TwinserveError, match="no chart 'tpot'; there are e2el, front"):
        found.plot("tpot")


def test_a_plan_in_which_nothing_is_enough_says_so(asked):
    trace, _, prices = asked
    found = ts.plan(
        MODEL, trace, "ttft p90 < 1 ms", prices=prices, gpus="l40s", tp=[1], most_gpus=2
    )
    assert found.best is None and "nothing is enough" in repr(found)
    with pytest.raises(ts.TwinserveError, match="no front"):
        found.plot()


def test_runs_of_a_fleet_show_its_pools(tmp_path):
    file = tmp_path / "fleet.yaml"
    pool = "  - name: {0}\n    role: {0}\n    profile: llama-3.1-8b@h100\n"
    file.write_text("pools:\n" + pool.format("prefill") + pool.format("decode"))
    runs = ts.simulate(fleet=str(file), trace="fixed:100,5", requests=4, rate=10)
    for shown in (str(runs), runs._repr_html_()):
        assert "Pools, vllm" in shown and "TTFT by parts, vllm" in shown
    assert "Pools" not in str(ts.simulate(trace="fixed:100,5", requests=4, rate=10))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"model": None}, "no model; give model, or"),
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"gpus": ["h1000"]}, "h1000"),
        ({"workers": 0}, "workers 0"),
        ({"workers": "two"}, "workers two"),
        ({"tp": "x"}, "tp 'x'"),
        ({"tp": [1, 2.5]}, "tp 2.5"),
        ({"gpus": 8}, "gpus 8"),
        ({"grow": "much"}, "grow 'much'"),
        ({"seeds": None}, "seeds None"),
        ({"trace": 5}, "trace 5"),
        ({"slo": "fast"}, "fast"),
    ],
)
def test_a_bad_question_is_one_line(asked, wrong, said):
    trace, slo, _ = asked
    with pytest.raises(ts.TwinserveError) as error:
        ts.plan(**{"model": MODEL, "trace": trace, "slo": slo, **wrong})
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_comparison_is_that_of_the_command(tmp_path, capsys):
    slower = run_of(decode=1.5)
    (tmp_path / "bench.json").write_text(bench(slower))
    run = ts.simulate("vllm", LOAD, slo="none")
    run.save(tmp_path / "run")
    found = ts.compare(tmp_path / "run", tmp_path / "bench.json")
    status(main, ["compare", str(tmp_path / "run"), str(tmp_path / "bench.json")])
    shown = capsys.readouterr().out.replace(str(tmp_path / "run"), "vllm")
    assert shown.rstrip() == str(found)
    assert str(ts.compare(run, tmp_path / "bench.json")) == str(found)
    row = found.table.query("metric == 'tpot' and statistic == 'mean'").iloc[0]
    assert row["vllm error"] == pytest.approx(1 / 1.5 - 1, abs=0.1)
    assert "\n" not in repr(found) and "<pre " in found._repr_html_()
    assert (found.save(tmp_path / "out") / "compare.json").exists()
    for runs, files in ((run, []), ([], tmp_path / "bench.json")):
        with pytest.raises(ts.TwinserveError):
            ts.compare(runs, files)
