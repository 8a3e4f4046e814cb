"""A run written as `vllm bench serve` writes one: our own reader of such files finds the same
requests in it, and the metrics are those of the summary."""

import json

import numpy as np
import pytest

from tests.commands import status
from twinserve.sim.cli.main import BAD_INPUT, main
from twinserve.sim.results.export import bench_result, write_bench
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate
from twinserve.sim.twin.served import of_measurement, of_run
from twinserve.traces.readers.formats import detect_format, read_measurement

LOAD = {"trace": "fixed:300,20", "rate": 30.0, "requests": 40, "slo": "none"}


@pytest.fixture(scope="module")
def runs():
    return simulate(SimulationConfig(policy=("vllm", "tgi"), **LOAD))


def test_what_is_written_reads_as_the_run(runs, tmp_path):
    file = tmp_path / "bench.json"
    write_bench(file, {"vllm": runs["vllm"]})
    assert detect_format(file.read_bytes(), "f") == "vllm-bench"
    found = read_measurement(file)
    ours, theirs = of_run("run", runs["vllm"]), of_measurement(found)
    for name in ("ttft", "tpot", "e2el"):
        assert theirs.latencies[name] == pytest.approx(ours.latencies[name])
    assert np.array_equal(theirs.prompt_tokens, ours.prompt_tokens)
    assert theirs.arrival_s == pytest.approx(ours.arrival_s)
    assert found.stated["mean_ttft_ms"] == runs["vllm"].summary["mean_ttft_ms"]


def test_a_request_that_was_not_served_has_no_times_and_says_why(tmp_path):
    slow = SimulationConfig(**LOAD | {"rate": 1000.0}, max_num_seqs=2, client_timeout=0.5)
    (result,) = simulate(slow).values()
    found = bench_result("vllm", result)
    lost = [i for i, error in enumerate(found["errors"]) if error]
    assert len(lost) == 40 - result.summary["completed"] > 0
    assert all(found["latencies"][i] == 0 and not found["itls"][i] for i in lost)


def test_several_policies_and_sweeps_are_a_list(runs, tmp_path):
    write_bench(tmp_path / "both.json", runs)
    assert [one["policy"] for one in json.loads((tmp_path / "both.json").read_text())] == list(runs)
    write_bench(tmp_path / "summary.json", {"vllm": runs["vllm"]})
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 1


def test_the_command_writes_it_and_replaces_nothing_unasked(tmp_path, capsys):
    words = "simulate -t fixed:300,20 --rate 30 --requests 10 -q --bench-json".split()
    file = tmp_path / "bench.json"
    for further, code in (([], 0), ([], BAD_INPUT), (["--overwrite"], 0)):
        assert status(main, [*words, file, *further]) == code
    assert "bench.json" in capsys.readouterr().err
    assert len(read_measurement(file)) == 10
