"""Traces that we write, run by vLLM's own benchmark against a live server; and our results in the
tools that read that benchmark's."""

import argparse
import json
from importlib.util import find_spec

import numpy as np
import pytest

from twinserve.backends.live.serving.client import bench
from twinserve.experiments.serving.limit import engine_arguments, start, write_small
from twinserve.sim.results.export import export_requests, write_bench
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy, simulate
from twinserve.traces.readers.formats import read_measurement

pytestmark = pytest.mark.live

LENGTHS = "random_input_len=90,random_output_len=8,random_range_ratio=0.5"
LOAD = f"vllm:request_rate=4,num_prompts=16,{LENGTHS}"
BLOCKS = ("--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001")


@pytest.mark.nightly
def test_vllms_benchmark_runs_a_trace_that_a_run_exported(vllm, tmp_path):
    """Every request, with its lengths, at its time."""
    model = write_small(tmp_path)
    inputs = resolve(SimulationConfig(trace=LOAD, slo="none", async_scheduling=True))
    result = run_policy(inputs, inputs.policies[0])
    trace = export_requests(result, inputs.workload, tmp_path / "trace.jsonl")
    server = start(tmp_path, model, engine_arguments())
    try:
        server.wait()
        named = {"dataset_name": "timed_trace", "dataset_path": str(trace), "num_prompts": 16}
        file = bench(server, tmp_path / "bench.json", named, 1, *BLOCKS)
    finally:
        server.stop()
    found, asked = read_measurement(file), inputs.workload
    assert found.failed == 0 and len(found) == len(asked)
    order = np.argsort(found.arrival_s)
    assert found.output_tokens[order].tolist() == asked.output_tokens.tolist()
    assert found.prompt_tokens[order].tolist() == asked.prompt_tokens.tolist()
    sent = found.arrival_s[order]
    since = asked.arrival_s - asked.arrival_s[0]
    assert (sent - sent[0] >= since - 0.05).all(), (sent, since)  # never early


def test_vllms_tools_read_a_run(vllm, tmp_path, capsys):
    """`vllm bench sweep plot`, and the timeline of `vllm bench serve --plot-timeline`."""
    from vllm.benchmarks.plot import construct_timeline_data
    from vllm.benchmarks.sweep import plot

    for rate in (5.0, 10.0):
        runs = simulate(SimulationConfig(trace="fixed:300,20", rate=rate, requests=20, slo="none"))
        (tmp_path / f"{rate:g}").mkdir()
        write_bench(tmp_path / f"{rate:g}" / "summary.json", runs)
    parser = argparse.ArgumentParser()
    plot.SweepPlotArgs.add_cli_args(parser)
    words = [str(tmp_path), "--var-x", "request_rate", "--var-y", "mean_ttft_ms"]
    words += ["--fig-by", "policy"] + ["--dry-run"] * (find_spec("seaborn") is None)
    plot.main(parser.parse_args(words))
    said = capsys.readouterr().out
    assert "[END FIGURE]" in said and "'policy': 'vllm'" in said

    (run,) = json.loads((tmp_path / "5" / "summary.json").read_text())
    lists = ("start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens")
    names = ("start_time", "ttft", "itl", "latency", "prompt_len", "output_tokens")
    rows = zip(*(run[each] for each in lists), strict=True)
    requests = [dict(zip(names, row, strict=True)) for row in rows]
    timeline = construct_timeline_data(requests, [0.025, 0.05], ["short", "middle", "long"])
    assert sum(part["type"] == "TTFT" for part in timeline) == 20
    assert len(timeline) == 20 * 20  # a first token and 19 gaps each
