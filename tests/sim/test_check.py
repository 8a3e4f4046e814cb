"""`twinserve check`: a measured server at another rate. The "server" is a simulation of slower
hardware, so that what it does at the other rate is known."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import twinserve as ts
from tests.commands import status
from tests.sim.benched import bench
from tests.sim.test_serving_fit import AS_IT_IS, PROFILE, SLOWER, load, served_by
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import BAD_INPUT, main
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.predicted import stated_load
from twinserve.sim.twin.served import of_run
from twinserve.sim.twin.serving_fit import Fitted


def check(capsys, *words: str) -> tuple[int, str]:
    return status(main, ["check", *words, "--quiet"]), "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "bench.json"
    path.write_text(bench(served_by(SLOWER, load(8, 60))))
    return str(path)


@pytest.mark.slow
def test_what_the_server_does_at_twice_the_rate_is_in_the_range(file, capsys):
    code, said = check(capsys, file, "--profile", PROFILE, "--at", "2x", "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found["verdict"].startswith("Believe the range, not the number: ")
    assert not [notice for notice in found["notices"] if notice.startswith("note: ")]
    assert "at 2x up to" in found["verdict"] and found["error"] < 0.05 < found["error_before"]
    truth = of_run("truth", served_by(SLOWER, load(16, 60))).latencies
    means = {row["metric"]: row for row in found["numbers"] if row["statistic"] == "mean"}
    for metric in ("ttft", "tpot", "e2el"):
        row, there = means[metric], float(np.nanmean(truth[metric]))
        assert row["low"] <= there <= row["high"]
        assert row["predicted"] == pytest.approx(there, rel=0.1)
        assert row["measured"] < there  # a server with more to do is slower


@pytest.mark.parametrize(
    ("at", "error", "says"),
    [
        ("1x", 0.02, r"load of this length: .* 2.0% off on .* within those measured \(up to"),
        pytest.param("2", 0.02, "Believe the range, not the number: ", marks=pytest.mark.slow),
        pytest.param(
            "1x", 0.3, "Do not believe it: the simulation is 30.0% off on ", marks=pytest.mark.slow
        ),
    ],
)
def test_one_sentence_says_whether_to_believe_it(at, error, says, file, capsys, monkeypatch):
    fitted = Fitted(AS_IT_IS, {}, error, error, 1)
    monkeypatch.setattr(serving_fit, "fit", lambda loads, names, report: fitted)
    code, said = check(capsys, file, "--profile", PROFILE, "--at", at)
    assert code == 0 and re.search(says, said.splitlines()[0])
    assert f"at {float(at.removesuffix('x')):g}x" in said.splitlines()[2]
    found = ts.check(file, profile=PROFILE, at=at)
    assert str(found).split() == said.split() and found.verdict == said.splitlines()[0]
    assert (found.table.low <= found.table.predicted).all()


@pytest.mark.slow
def test_latencies_that_no_term_explains_are_named(file, capsys, monkeypatch):
    fitted = Fitted(AS_IT_IS, {}, 0.02, 0.02, 1)
    monkeypatch.setattr(serving_fit, "fit", lambda loads, names, report: fitted)
    code, said = check(capsys, file, "--profile", "llama-3.1-8b@a100")
    assert code == 0 and re.search(r"; not its TPOT, \d+% off at the measured rate", said)


@pytest.mark.slow
def test_too_much_is_said_and_can_be_believed(tmp_path, capsys, monkeypatch):
    path = tmp_path / "bench.json"
    trace = "vllm:request_rate=2,num_prompts=200,random_input_len=200,random_output_len=20"
    path.write_text(bench(served_by(AS_IT_IS, trace)))
    fitted = Fitted(AS_IT_IS, {}, 0.02, 0.02, 1)
    monkeypatch.setattr(serving_fit, "fit", lambda loads, names, report: fitted)
    words = (str(path), "--profile", PROFILE, "--max-num-seqs", "1")
    code, said = check(capsys, *words, "--at", "12x")
    assert code == 0 and said.startswith("Believe that 12x is too much: saturated: ")
    code, said = check(capsys, *words, "--at", "1x")
    assert code == 0 and "the server keeps up at 1x" in said.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--profile is needed"),
        (["--profile", PROFILE, "--at", "twice"], "--at twice: give a factor on the measured rate"),
        (["--profile", PROFILE, "--at", "0x"], "--at 0x: give a factor"),
        (["--profile", "nobody@h100"], "nobody"),
    ],
)
def test_bad_input_is_one_line(words, says, file, capsys):
    code, said = check(capsys, file, *words)
    assert code == BAD_INPUT and says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"total_input_tokens": None}, "as a summary it lacks total_input_tokens"),
        ({"request_rate": None}, "as a summary it lacks request_rate"),
        ({"total_output_tokens": None}, "field 'total_output_tokens' is missing"),
        ({"mean_ttft_ms": -5.0}, "field 'mean_ttft_ms' is -5, below 0"),
        ({}, r"request 4: TTFT is 2e-08 s, simulated 0\.\d+ s: too far off to fit"),
    ],
)
def test_what_is_missing_or_cannot_be_is_named(changes, says, file, tmp_path, capsys, monkeypatch):
    def no_factor(*given):
        raise ProfileError("factor 1e-05 of prefill must be positive")

    monkeypatch.setattr(serving_fit, "fit", no_factor)
    content = json.loads(Path(file).read_text()) | {"request_rate": 8.0}
    content["ttfts"][3] = 2e-8
    if changes:
        content = {k: v for k, v in content.items() if not isinstance(v, list)} | changes
        content = {"completed": 60, "total_input_tokens": 9000, "mean_ttft_ms": 40.0} | content
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    code, said = check(capsys, str(path), "--profile", PROFILE, "--at", "2x")
    assert code == BAD_INPUT and re.search(says, said) and said.count("\n") == 1


CLOSED = "vllm:num_prompts=60,max_concurrency=8,random_input_len=300,random_output_len=40"


@pytest.mark.parametrize("detailed", [True, False])
def test_a_closed_loop_has_other_clients_at_another_rate(detailed, tmp_path, capsys, monkeypatch):
    """A summary too: its load is made from what it states, and it is not fitted."""
    monkeypatch.setattr(serving_fit, "fit", lambda *given: Fitted(AS_IT_IS, {}, 0.02, 0.02, 1))
    served = ts.simulate("vllm", trace=CLOSED, profile=PROFILE, slo="none")
    content = json.loads(bench(served.result)) | {"max_concurrency": 8, "request_rate": "inf"}
    if not detailed:
        content = {k: v for k, v in content.items() if not isinstance(v, list)}
        content |= {"completed": 60, "total_input_tokens": 60 * 300, "total_output_tokens": 60 * 40}
        content["mean_ttft_ms"] = served.summary["mean_ttft_ms"]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    code, said = check(capsys, str(path), "--profile", PROFILE, "--at", "2x")
    assert code == 0 and "a closed loop: 16 requests at once, measured 8" in said
    assert ("the load that the summary states is 0.0% off" in said) != detailed
    if not detailed:
        assert "requests of its mean lengths, `vllm:num_prompts=60," in said
        assert (
            said.startswith("Believe the range") and "does not say how many were measured" in said
        )
    path.write_text(json.dumps(content | {"max_concurrency": None, "start_times": [1.0] * 60}))
    code, said = check(capsys, str(path), "--profile", PROFILE, "--at", "2x")
    assert code == BAD_INPUT and "there is no rate to change" in said


def test_a_stated_load_has_the_stated_requests_at_another_rate():
    stated = {"completed": 50, "num_prompts": 60, "request_rate": 4.0, "max_concurrency": 8}
    stated |= {"total_input_tokens": 5000, "total_output_tokens": 500}
    sizes = "burstiness=1,random_input_len=100,random_output_len=10"
    at_once = math.inf, "request_rate=inf,max_concurrency=16"
    for rate, asked in ((4.0, "request_rate=8,max_concurrency=8"), at_once):
        found = SimpleNamespace(path="f", stated=stated | {"request_rate": rate})
        assert stated_load(found, 2.0) == f"vllm:num_prompts=60,{asked},{sizes}"
