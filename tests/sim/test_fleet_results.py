"""What a fleet leaves behind: replicas that differ, rows of requests that nobody got, files."""

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.sim.test_fleet import happen, small
from twinserve.policies.registry import parse_policy
from twinserve.sim.results.files import RunResult, read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import Workload

NAN = float("nan")


def test_replicas_may_differ_in_all_and_results_say_so(tmp_path):
    config = CROWDED.model_copy(update={"replicas": 2})
    other = resolve_hardware(config.model_copy(update={"num_blocks": 61, "block_tokens": 16}))
    spec = parse_policy("vllm")
    inputs = Inputs(config, crowd(2), resolve_hardware(config), (spec,), ())
    made_of = [
        Description(inputs.hardware, spec),
        Description(other, parse_policy("bros:kv=paged")),
    ]
    run = Simulation(inputs, spec, made_of=made_of, migrates=True)
    run.clock.process(happen(run.clock, run.fleet, [(0.05, lambda fleet: fleet.fail(1))]))
    result = run_simulation(run)
    lives = result.rows.replicas
    assert lives[["policy", "ledger", "num_blocks", "block_tokens", "failed"]].values.tolist() == [
        ["vllm", "paged", 40, 8, False],
        ["bros:kv=paged", "paged", 61, 16, True],
    ]
    stays = result.rows.placements
    assert set(stays.replica) == {0, 1} and (stays.outcome == "moved").any()
    assert result.rows.requests.finished.all() and result.summary["kv"]["total_blocks"] is None
    used = result.rows.steps.groupby("replica")["kv_used_blocks"].max() / lives["num_blocks"]
    assert result.summary["kv"]["peak_use"] == used.max()
    again = read_run(write_run(tmp_path / "run", result))
    for table in ("requests", "placements", "replicas", "steps", "gaps"):
        ours, theirs = getattr(result.rows, table), getattr(again.rows, table)
        pd.testing.assert_frame_equal(
            ours[list(theirs)], theirs, check_dtype=False, check_exact=True
        )
    said = dict(result.summary)
    assert said.pop("step_times")  # of the profiles, which rows do not have
    assert summarise(again.rows) == said


def test_a_request_that_was_never_sent_has_a_row_in_the_file(tmp_path):
    load = Workload.build(
        [0.0, NAN], [8] * 2, [50, 5], group=np.zeros(2, int), stage=np.arange(2),
        delay_s=np.zeros(2), group_names=["talk"],
    )  # fmt: skip
    rows = small(load, client_timeout=3.0).run().rows
    file = pq.read_table(write_run(tmp_path / "run", RunResult(rows)) / "requests.parquet")
    ends = dict(zip(*(file[name].to_pylist() for name in ("request_id", "outcome")), strict=True))
    assert ends == {"r0": "timed_out", "r1": "never_sent"}
    again = read_run(tmp_path / "run").rows
    assert again.requests.request_id.tolist() == ["r0"] and again.never_sent == 1


def test_a_replica_that_is_not_up_all_the_time_is_busy_while_it_is():
    """Two replicas, a request of ten seconds each; one of them fails after half of that."""
    load = Workload.build([0.0, 0.0], [8] * 2, [10, 10])
    sim = small(load, [(5.0, lambda fleet: fleet.fail(0))]).run()
    # four whole steps of the five seconds before it failed, ten of ten
    assert summarise(sim.rows)["scheduler"]["busy"] == pytest.approx(14 / 15)
