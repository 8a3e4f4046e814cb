"""A real server's loads beside the emulated server and the simulation: what counts on each side."""

import io
import json
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import numpy as np
import pandas as pd
import pytest

from twinserve.backends.live.emulate.steps import Lateness
from twinserve.experiments.campaign import beside
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.sim.twin.emulated_server import EmulatedServer

LOAD = {
    "date": "20261128-040824", "backend": "openai", "num_prompts": 4, "request_rate": "inf",
    "max_concurrency": 1, "duration": 4.0, "completed": 4, "total_output_tokens": 12,
    "input_lens": [512] * 4, "output_lens": [3] * 4, "start_times": [7.0, 8.0, 9.0, 10.0],
    "ttfts": [0.5] * 4, "errors": [""] * 4, "output_throughput": 3.0,
    "mean_ttft_ms": 500.0, "p99_ttft_ms": 500.0, "mean_tpot_ms": 10.0, "p99_tpot_ms": 10.0,
}  # fmt: skip


def no_package(name: str) -> str:
    raise PackageNotFoundError(name)


def test_prompts_that_the_server_knew_are_found_again(tmp_path):
    path = tmp_path / "512-3.json"
    path.write_text(json.dumps(LOAD))
    inputs = resolve(SimulationConfig(trace=str(path), policy=("vllm",)))
    known = beside.known_before(inputs.workload, 2)
    run = run_simulation(Simulation(replace(inputs, workload=known), inputs.policies[0]))
    hits = run.rows.requests["hit_tokens"].to_numpy()
    assert hits.tolist() == [0, 0, 496, 496, 0, 0]
    assert beside.of_simulated(run)["output_tokens_per_s"] > 12  # of four requests, and no pause


def test_a_row_a_source(tmp_path, monkeypatch, capsys):
    (tmp_path / "512-3.json").write_text(json.dumps(LOAD))
    of = {"ttft": np.full(4, 0.4), "tpot": np.full(4, 0.02), "e2el": np.full(4, 0.44)}
    parts = {"client late": np.full(4, 0.1), "computed": np.full(4, 0.2)}
    seen = EmulatedServer(np.arange(4.0), of, of, parts, Lateness(50, 1, 0.1, 2.0))
    seeds = []

    @contextmanager
    def server(inputs, spec):
        yield lambda workload, seed: seeds.append(seed) or seen

    monkeypatch.setattr(beside, "emulated_server", server)
    monkeypatch.setattr(beside, "installed_vllm", lambda: "0.32.0")
    assert beside.main([str(tmp_path), "--profile", "llama-3.1-8b@h200", "--repeats", "2"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert table.source.tolist() == ["real", "simulated (vllm)", "emulated", "emulated"]
    assert len(set(seeds)) == 3  # a prompt that comes again would be found in the cache
    real, ours, emulated = (table.iloc[row] for row in (0, 1, 2))
    assert real.mean_e2el_ms == pytest.approx(520) and np.isnan(real.p99_e2el_ms)
    assert emulated.mean_ttft_ms == pytest.approx(300) and emulated.late_steps_pct == 2
    assert emulated.output_tokens_per_s == pytest.approx(12 / 3.44, abs=1e-3)
    assert ours.computed_ms < ours.mean_ttft_ms


@pytest.mark.parametrize(
    ("load", "words", "said"),
    [
        (None, "", "has no file"),
        ("{", "", "512-3.json: cannot be read"),
        (LOAD | {"date": None}, "", "512-3.json: has no date"),
        (LOAD | {"output_lens": [3, 3, 3, 4]}, "", "512-3.json: answers of several lengths"),
        (LOAD, "--profile llama-3.1-8b@h2000", "h2000"),
        (LOAD, "--front-end none.json", "none.json"),
        (LOAD, "--repeats 1", "no vLLM"),
    ],
)
def test_what_cannot_run_is_one_line_before_the_first_row(
    load, words, said, tmp_path, monkeypatch, capsys
):
    if isinstance(load, dict):
        load = json.dumps({name: value for name, value in load.items() if value is not None})
    if load is not None:
        (tmp_path / "512-3.json").write_text(load)
    monkeypatch.setattr("twinserve.backends.live.versions.version", no_package)
    given = ["--profile", "llama-3.1-8b@h200", "--repeats", "0", *words.split()]
    assert beside.main([str(tmp_path), *given]) == 2
    out, error = capsys.readouterr()
    assert out == "" and said in error and error.startswith("error: ") and error.count("\n") == 1
