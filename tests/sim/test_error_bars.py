"""Error bars: the same requests with step times off, and what becomes of each metric."""

import json
from dataclasses import replace

import pytest

import twinserve
from tests.commands import status
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.evidence import ExpectedErrors, StepError, expected_errors
from twinserve.profiles.front_end import published, save_front_end
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import main, simulate_main
from twinserve.sim.report.table import SECTIONS, render_table
from twinserve.sim.results.files import read_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.error_bars import (
    METRICS,
    add_error_bars,
    check_error_bars,
    corners,
    ranges,
    said_of_bars,
    with_front_ends_off,
)
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy

RUN = "--trace fixed:400,20 --requests 40 --rate 20 --quiet".split()
H100 = ["--profile", "llama-3.1-8b@h100"]


def errors(decode: float, prefill: float) -> ExpectedErrors:
    one = StepError(decode, "a test")
    return ExpectedErrors(one, one, StepError(prefill, "a test"))


@pytest.fixture(scope="module")
def inputs():
    settings = {"trace": "fixed:400,20", "rate": 20.0, "requests": 15}
    return resolve(SimulationConfig(profile="llama-3.1-8b@h100", pool=4, **settings))


def ended(command, words: list[str]) -> None:
    """Runs a command to its end, which has to be a good one."""
    assert not status(command, words)


def bars(inputs, of: ExpectedErrors) -> tuple[dict, dict]:
    """(summary, its error bars) of a run whose step times err by as much."""
    spec = inputs.policies[0]
    result = run_policy(inputs, spec)
    add_error_bars(inputs, spec, result, errors=of)
    return result.summary, result.summary["error_bars"]


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b@h100", "llama-3.1-8b@h100/operators", "llama-3.1-8b@rtx4090"]
)
def test_whole_decodes_and_what_prompts_add_are_off_by_their_factors(name):
    profile = load_profile(name)
    for off in corners(0.2, 0.4):
        model, scaled = profile.model(), off.of(profile).model()
        for requests in (1, 40):
            work = decode_work(requests, 700)
            ours = model.step_seconds(work)
            assert scaled.step_seconds(work) == pytest.approx(off.decode * ours)
        work = prefill_work(4096)
        host = model.host_seconds(1)
        prompt = off.prefill * (model.step_seconds(work) - host) + off.decode * host
        assert scaled.step_seconds(work) == pytest.approx(prompt)


@pytest.mark.parametrize(
    ("front_end", "version", "labels"),
    [
        ("none", None, []),
        ("vllm", "0.11", ["host factor 0.8", "host factor 1.4", "chats"]),
        ("vllm:host_factor=1.1", None, ["chats"]),
        ("vllm:chat=true", None, ["host factor 0.8", "host factor 1.4"]),
        ("vllm:chat=false,host_factor=1", None, []),
    ],
)
def test_what_was_not_said_of_a_front_end_is_in_the_range(front_end, version, labels):
    settings = {"trace": "fixed:400,20", "rate": 20.0, "requests": 15}
    inputs = resolve(SimulationConfig(front_end=front_end, engine_version=version, **settings))
    assert [label for label, _ in with_front_ends_off(inputs)] == labels
    assert all(label in said_of_bars(inputs) for label in labels)
    spec = inputs.policies[0]
    result = run_policy(inputs, spec)
    add_error_bars(inputs, spec, result, errors=errors(0.0, 0.0))
    low, high = result.summary["error_bars"]["classes.rt.mean_ttft_ms"]
    assert (low < high) is bool(labels) and low <= result.summary["mean_ttft_ms"] <= high
    assert result.config["error_bars"].get("front_end", "") == ", ".join(labels)
    if version == "0.11":  # the templates of chats are parsed
        assert high - low > 12.7


@pytest.mark.slow
def test_a_larger_expected_error_gives_a_range_at_least_as_wide(inputs):
    """Of a calm run, in which a longer step makes all of it later."""
    narrow, wide = (bars(inputs, errors(e, 2 * e))[1] for e in (0.05, 0.2))
    for path in ("classes.rt.mean_ttft_ms", "classes.rt.mean_tpot_ms", "classes.rt.p99_ttft_ms"):
        assert wide[path][0] <= narrow[path][0] <= narrow[path][1] <= wide[path][1], path
        assert wide[path][0] < wide[path][1]


@pytest.mark.slow
def test_the_same_bars_come_again(inputs):
    assert bars(inputs, errors(0.1, 0.3))[1] == bars(inputs, errors(0.1, 0.3))[1]


def test_ranges_hold_for_metrics_that_only_some_runs_have():
    summaries = [{"duration": 2.0, "kv": {"peak_use": None}}, {"duration": 1.0}]
    assert ranges(summaries) == {"duration": [1.0, 2.0]}


def test_every_line_of_the_table_with_a_better_end_has_a_range():
    paths = {
        path
        for lines in SECTIONS.values()
        for line in lines
        for path in line.paths
        if line.better and not path.startswith(("timing.", "fair_ratio."))
    }
    assert paths <= set(METRICS)


# -- the command -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bars")
    ended(simulate_main, [*RUN, *H100, "--error-bars", "--out", str(folder / "with")])
    ended(simulate_main, [*RUN, *H100, "--out", str(folder / "without")])
    return folder


@pytest.mark.slow
def test_a_quiet_run_without_ranges_carries_what_to_expect_of_its_step_times(written, capsys):
    profile = load_profile("llama-3.1-8b@h100")
    expected = expected_errors(profile)
    for name in ("run.json", "summary.json"):
        (found,) = json.loads((written / "without" / name).read_text())["step_times"]
        assert (found["profile"], found["form"]) == (profile.name, profile.step_model.form)
        assert found["decode"]["error"] == expected.decode.error and found["decode"]["known"]
        assert found["prefill"]["source"] == expected.prefill.source
    words = ["-t", "fixed:400,20", "--requests", "5", "--rate", "20", "--json"]
    ended(simulate_main, [*words, "--profile", "gpt-oss-20b@h100"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (found,) = run["step_times"]
    assert found["decode"]["error"] > 0.1 and "points of servers" in found["decode"]["source"]
    ended(main, ["report", str(written / "without"), "--out", str(written / "plain.html")])
    assert (
        "expected error of the step times of llama-3.1-8b@h100"
        in (written / "plain.html").read_text()
    )


def test_the_run_itself_is_the_one_without_bars(written):
    with_bars, plain = (read_run(written / name) for name in ("with", "without"))
    assert with_bars.rows.requests.equals(plain.rows.requests)
    assert with_bars.rows.steps.equals(plain.rows.steps)
    del with_bars.summary["error_bars"], with_bars.config["error_bars"]
    assert with_bars.summary == plain.summary and with_bars.config == plain.config


def test_the_table_has_two_more_columns_and_fits_a_terminal(written):
    text = render_table({"vllm": read_run(written / "with")})
    head, ttft = (
        next(row for row in text.splitlines() if word in row) for word in ("low", "TTFT mean")
    )
    assert head.split() == ["vllm", "low", "high"]
    assert max(map(len, text.splitlines())) <= 80
    assert "low" not in render_table({"vllm": read_run(written / "without")})


def test_columns_of_several_runs_stay_with_their_run(written):
    runs = {name: read_run(written / name) for name in ("with", "without")}
    text = render_table(runs, width=200)
    assert text.splitlines()[0].split() == ["with", "low", "high", "without"]
    parts = render_table(runs | {"third": runs["with"]}).splitlines()
    heads = [row.split() for row in parts if "low" in row]
    assert len(heads) == 2  # they need two tables
    words = [word for head in heads for word in head]
    for name in ("with", "third"):
        at = words.index(name)
        assert words[at : at + 3] == [name, "low", "high"]


@pytest.mark.parametrize(("known", "said"), [(40, False), (4, True)])
def test_more_requests_at_once_than_were_measured_are_said_and_err_by_more(
    known, said, tmp_path, capsys
):
    """The fit's own error, 4 %, is of steps with up to `known` requests."""
    engine = load_profile("llama-3.1-8b@h100")
    update = {"source": "measured", "fit_error": 0.04, "fitted_requests": known}
    save_profile(engine.model_copy(update=update), tmp_path / "p.json")
    words = ["--trace", "fixed:40,20", "--requests", "30", "--rate", "9000", "-q", "--error-bars"]
    ended(simulate_main, [*words, "--profile", f"{tmp_path}/p.json", "--out", f"{tmp_path}/out"])
    shown = " ".join(capsys.readouterr().out.split())
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (f"up to {known} requests at once; here up to 30" in shown) is said
    assert any("requests at once" in line for line in run["notices"]) is said
    error = expected_errors(engine).decode.error if said else 0.04
    assert error >= 0.04 and run["error_bars"]["decode"]["error"] == pytest.approx(error)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    low, high = summary["error_bars"]["classes.rt.mean_tpot_ms"]
    assert high / low > (1 + error) ** 1.5


@pytest.mark.slow
def test_the_report_shows_them(written, capsys):
    ended(main, ["report", str(written), "--out", str(written / "page.html")])
    page = (written / "page.html").read_text()
    assert "<small>" in page and "small print below a number is its range" in page


@pytest.mark.slow
def test_a_verdict_that_the_bars_turn_is_seen():
    """The bound lies between the ends of the range of TTFT."""
    config = SimulationConfig(
        trace="sharegpt", rate=20.0, requests=120, slo="ttft mean < 11 ms, tpot mean < 90 ms"
    )
    inputs = resolve(config)
    (spec,) = inputs.policies
    result = run_policy(inputs, spec)
    add_error_bars(inputs, spec, result)
    low, high = result.summary["error_bars"]["classes.rt.mean_ttft_ms"]
    assert low < 11 < high
    assert result.summary["error_bars"]["objectives.0"] == [0, 1]
    assert result.summary["error_bars"]["objectives.1"] == [1, 1]
    lines = render_table({"vllm": result}).splitlines()
    (turned,) = [line.split() for line in lines if "TTFT mean <" in line]
    assert turned[-2:] == ["missed", "kept"]


@pytest.mark.slow
def test_a_front_end_whose_range_is_absurd_is_refused_before_the_run(tmp_path):
    file = tmp_path / "slow.json"
    threads = replace(published()["vllm"].threads, accept_s=9.5, host_factor=1.0)
    save_front_end(replace(published()["vllm"], name="slow", threads=threads), file)
    inputs = resolve(SimulationConfig(trace="fixed:40,4", requests=3, front_end=str(file)))
    with pytest.raises(ProfileError, match="front end with host factor 1.1: accept_s"):
        check_error_bars(inputs)


def test_step_times_that_cannot_be_off_are_refused_before_the_run():
    told: list = []
    run = {"trace": "fixed:9,500", "requests": 9, "rate": 1.0, "progress": told.append}
    ranks = {"profile": "qwen3-30b-a3b@h100:dp2:ep", "replicas": 2}
    with pytest.raises(ProfileError, match="share experts cannot be scaled"):
        twinserve.simulate(error_bars=True, **run, **ranks)
    assert not told
    twinserve.simulate(**run, **ranks)
    assert told
