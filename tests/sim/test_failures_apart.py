"""Failures where prefill is apart from decode: prompts that are kept, leases and loads survive
them, or end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.sim.apart import Apart, hand_over, handed_over_once, inputs_of, parts_add_up
from tests.sim.test_failures import ACTIONS
from tests.sim.troubled import TABLES, conserved, conserving
from twinserve.sim.fleet.faults import Fault, Kind, Schedule
from twinserve.sim.setup.audit import crowd
from twinserve.traces.workload import Workload

CASES = [(seed, action) for seed in range(8) for action in ACTIONS]


def schedule(seed: int) -> Schedule:
    """Of two prefill and two decode replicas: each crashes once or not at all."""
    rng = np.random.default_rng([seed, 18])
    faults = [
        Fault(Kind.CRASH, i, at_s, at_s + float(rng.exponential(0.1)) + 1e-3)
        for i, at_s in enumerate(rng.exponential(0.15, 4).tolist())
        if rng.random() < 0.8
    ]
    return Schedule(tuple(faults), start_up_s=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "action"), mostly_nightly(CASES, (0, "retry")))
def test_a_failing_fleet_with_prefill_apart(seed, action):
    connector = hand_over("llm-d:threshold=40" if seed % 2 else "none", 0.2, bool(seed % 2))
    settings = {
        "exact": True,
        "async_scheduling": seed % 3 == 0,
        "on_failure": action,
        "detection": 0.03 * (seed % 2),
    }
    inputs = replace(inputs_of(crowd(seed), connector, **settings), failures=schedule(seed))
    two = partial(Apart, prefill=2, decode=2)
    run, rows = conserving(two, inputs, (*TABLES, "failures"))
    handed_over_once(run, rows)
    parts_add_up(rows)
    assert len(rows.failures) == (rows.replicas["failed"]).sum()


@pytest.mark.parametrize("seed", [10, 133])
def test_a_lease_may_run_out_while_its_kv_is_fetched(seed):
    """Those that were sent to dead decode replicas come late to others, whose next heartbeat may
    come later still."""
    rng = np.random.default_rng([seed, 6])
    group, arrival_s = rng.integers(-1, 4, 24), np.sort(rng.exponential(0.3, 24))
    prompts, outputs = rng.integers(5, 80, 24), rng.integers(1, 50, 24)
    columns = {"group": group, "group_names": list("abcd"), "delay_s": np.zeros(24)}
    workload = Workload.build(arrival_s, prompts, outputs, **columns)
    connector = hand_over("llm-d:threshold=40", 0.2, True)
    settings = {"on_failure": "retry", "detection": float(rng.exponential(0.2))}
    settings |= {"async_scheduling": False, "retries": int(rng.integers(0, 3))}
    inputs = inputs_of(workload, connector, **settings)
    run = Apart(replace(inputs, failures=schedule(seed)), prefill=2, decode=2)
    run.run()
    conserved(run, run.rows())
    handed_over_once(run, run.rows())
    assert any(load.whole and load.kept.expired for load in run.fleet.loads.values())
