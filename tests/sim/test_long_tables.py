"""Columns of steps are made in parts, what is recorded is packed, and requests are settled: with
the same bits."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
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


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array(["a", None, "é", np.nan, ""], object), "string"),
        (np.array(["rt", None, "be"], object), None),
        (np.array(["rt", "be"]), None),
        (np.array([], object), "string"),
        (np.arange(5, dtype=np.uint8), "int64"),
        (np.arange(10)[::3], "int64"),
        (np.array([1.0, np.nan]), "double"),
        (np.array([1, 2]), "double"),
        (np.array([1.0, np.nan]), None),
        (np.array([True, False] * 5), "bool"),
        (np.array([True]), None),
        (np.arange(3, dtype=np.uint16), None),
        (np.array([1, None], object), "int64"),
        (np.array(["1", 2], object), "string"),
        (np.array([1.0, 2.0]), "int64"),
        (np.array([1, 2], ">i4"), "int64"),
        (np.zeros((2, 2), np.int64), "int64"),
        (np.ma.array([1, 2], mask=[0, 1]), "int64"),
    ],
)
def test_columns_are_those_that_arrow_makes_of_them(values, kind):
    def made(of, *args):
        try:
            return of(*args)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            return str(error)

    theirs = kind or ("large_string" if values.dtype.kind in "OU" else None)
    if kind == "double":
        expected = pa.array(values.astype(float))  # NaN stays
    else:
        expected = made(pa.Array.from_pandas, values, None, theirs and pa.type_for_alias(theirs))
    found = made(files._array, values, kind)
    if isinstance(found, pa.Array):
        found.validate(full=True)
        assert found.type == expected.type
    assert str(found) == str(expected)


def test_a_run_needs_no_pandas(tmp_path):
    code = (
        "import sys\nfrom twinserve.sim.cli.main import simulate_main\n"
        "try:\n    simulate_main()\nfinally:\n    print('pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--trace", "sharegpt", "--requests", "20"]
    command += ["--policy", "vllm", "--out", str(tmp_path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (tmp_path / "steps.parquet").exists() and shown.stdout.endswith("\nFalse\n")
