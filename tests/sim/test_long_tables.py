"""Columns of steps are made in parts, what is recorded is packed, and requests are settled: with
the same bits."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.sim.results import files, metrics_requests, recorder
from twinserve.sim.results.files import RunResult, read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.metrics_requests import largest, summed
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation

LEAST = 128  # what numpy adds up without halving


@given(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 2**32))
def test_sums_in_parts_are_those_of_numpy(n, begin, seed):
    values = np.random.default_rng(seed).random(n + begin) * 10.0 ** (seed % 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_requests, "_CHUNK", LEAST)
        assert summed(lambda a, b: values[a:b], begin, n + begin) == values[begin:].sum()
        if n:
            assert largest(lambda a, b: values[a:b], begin, n + begin) == values[begin:].max()


@pytest.mark.parametrize(
    "more",
    [
        {"policy": ("vllm",), "replicas": 3, "router": "vllm-dp"},
        {"policy": ("bros",), "pool": 4, "num_blocks": 500},
    ],
)
def test_packing_and_parts_change_no_bit(monkeypatch, tmp_path, more):
    given = SimulationConfig(trace="sharegpt", requests=60, rate=12.0, seed=3, **more)
    inputs = resolve(given)

    def run(settles):
        simulation = Simulation(inputs, inputs.policies[0])
        simulation.fleet.settles = settles
        simulation.run()
        requests = simulation.fleet.requests
        assert bool(requests.unsettled()) is not settles
        rows = simulation.rows()
        told = [(r.id, r.output_tokens, r.prompt_tokens, r.group, r.ended_s) for r in requests]
        return rows, (summarise(rows), told, [r.placements[0].row for r in requests])

    rows, said = run(False)
    monkeypatch.setattr(recorder, "_PACK", 3)
    monkeypatch.setattr(metrics_requests, "_CHUNK", LEAST)
    monkeypatch.setattr(files, "ROWS", 50)
    packed, same = run(True)
    assert same == said
    for name in ("requests", "placements"):
        assert getattr(packed, name).equals(getattr(rows, name)), name
    written = read_run(write_run(tmp_path / "run", RunResult(packed, {}, {}, said[0]))).rows
    assert written.steps[list(rows.steps)].equals(rows.steps) and written.gaps.equals(rows.gaps)
    assert pq.read_metadata(tmp_path / "run" / "steps.parquet").num_row_groups > 1
    steps = packed.step_columns
    edges = np.random.default_rng(0).integers(0, len(steps) + 1, (20, 2))
    for begin, end in np.sort(edges).tolist():
        for name in rows.steps:
            assert np.array_equal(steps.each(name, begin, end), rows.steps[name][begin:end]), name
    assert packed.steps.equals(rows.steps) and packed.gaps.equals(rows.gaps)
