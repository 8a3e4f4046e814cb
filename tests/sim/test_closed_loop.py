"""Closed loops: clients send the next request of the list when one of theirs has ended."""

from dataclasses import replace

import numpy as np
import pytest

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy, simulate


def rows_of(trace, **settings):
    config = SimulationConfig(trace=trace, slo="none", async_scheduling=False, **settings)
    (result,) = simulate(config).values()
    return result.rows.requests


def under_way(requests, at):
    return int(((requests["arrival_s"] <= at) & (requests["ended_s"] > at)).sum())


def test_a_limit_that_is_never_reached_changes_nothing():
    name = "vllm:request_rate=2,num_prompts=20,random_input_len=64,random_output_len=8"
    free, loose = rows_of(name), rows_of(f"{name},max_concurrency=20")
    assert free.equals(loose)


def test_a_staggered_loop_begins_one_by_one():
    requests = rows_of("closed:concurrency=4,requests=8,stagger=0.4,input=64,output=400")
    assert np.allclose(requests["arrival_s"].sort_values().iloc[:4], [0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("timeout", [None, 0.2])
def test_sessions_within_a_limit_are_all_accounted_for(timeout):
    trace = "agents:sessions=12,rate=50,turns=4,tool=0.05,system=64"
    config = SimulationConfig(trace=trace, slo="none", client_timeout=timeout)
    inputs = resolve(config)
    inputs = replace(inputs, workload=replace(inputs.workload, concurrency=2))
    rows = run_policy(inputs, inputs.policies[0]).rows
    assert len(rows.requests) + rows.never_sent == len(inputs.workload)
    most = max(under_way(rows.requests, at) for at in rows.requests["arrival_s"])
    assert most <= 2
    if timeout is None:
        assert rows.requests["finished"].all() and most == 2
    else:
        assert (rows.requests["outcome"] == "timed_out").any()


@pytest.mark.slow
def test_a_loop_of_clients_that_all_leave_at_once_ends():
    config = SimulationConfig(
        trace="closed:concurrency=2,requests=3000,input=64,output=4",
        slo="none",
        max_num_seqs=1,
        client_timeout=1e-6,
    )
    (result,) = simulate(config).values()
    assert len(result.rows.requests) == 3000


def test_the_fast_path_gives_the_same_loop():
    name = "closed:concurrency=3,requests=30,lengths=sharegpt"
    assert rows_of(name).equals(rows_of(name, exact=True))
