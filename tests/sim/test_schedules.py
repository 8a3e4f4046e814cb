"""Tiny fleets in trouble, worked by hand: one or two requests, one failure at a known time, and
every time stamp. Steps take one second, a block of KV takes one second on the network."""

import math
from dataclasses import replace

import pytest

from tests.sim.apart import hand_over
from tests.sim.test_engine import STEP
from twinserve.backends.links import PcieLink
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.connector import Push
from twinserve.sim.fleet.faults import Fault, Kind, Schedule
from twinserve.sim.fleet.replica import Role
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.audit import CROWDED
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import Workload

VLLM = parse_policy("vllm")
BLOCK = 131_072 * 8  # bytes
NEVER = None
P, D = Role.PREFILL, Role.DECODE


def run_of(
    requests, faults=(), roles=(Role.SERVE, Role.SERVE), connector=None, leaves=(), **settings
) -> RunRows:
    """requests: (arrival in seconds, prompt tokens, output tokens). leaves: (seconds, whose client
    leaves). Run step by step and several steps at once, with the same rows."""
    workload = Workload.build(*map(list, zip(*requests, strict=True)))
    found = []
    for exact in (True, False):
        config = CROWDED.model_copy(update={"exact": exact, "async_scheduling": False, **settings})
        hardware = resolve_hardware(config)
        inputs = Inputs(config, workload, hardware, (VLLM,), (), hand_over=connector)
        inputs = replace(inputs, failures=Schedule(tuple(faults)))
        network = (BLOCK, 0.0) if connector else None

        def backend(inputs, spec, policy, ledger):
            limits, fast = inputs.hardware.limits, not inputs.config.exact
            return SimulatedBackend(ledger.table, STEP, PcieLink(1e9), limits, fast=fast)

        made_of = [Description(hardware, VLLM, role, network=network) for role in roles]
        run = Simulation(inputs, VLLM, made_of=made_of, backend=backend)

        def leave(run=run):
            for at_s, number in leaves:
                yield run.clock.at(at_s, BEFORE_STEPS)
                run.fleet.withdraw(run.fleet.requests[number], End.DISCONNECTED)

        run.clock.process(leave())
        run.run()
        found.append(run.rows())
    for table in ("requests", "placements", "steps"):
        assert getattr(found[0], table).equals(getattr(found[1], table)), table
    return found[0]


def stamps(frame, *names):
    """Rows, NaN as NEVER."""
    return [
        tuple(NEVER if isinstance(v, float) and math.isnan(v) else v for v in row)
        for row in frame[list(names)].itertuples(index=False)
    ]


def of(rows, *names):
    return stamps(rows.placements.sort_values(["request", "placement"]), *names)


def stays(rows):
    names = "replica", "placed_s", "first_scheduled_s", "ended_s", "output_tokens", "outcome"
    return of(rows, *names)


def tokens(rows):
    return stamps(rows.requests, "first_token_s", "last_token_s")


def transfers(rows):
    return of(rows, "replica", "ended_s", "load_begin_s", "load_end_s", "released_s")


def crash(replica, at_s, until_s=math.inf):
    return Fault(Kind.CRASH, replica, at_s, until_s)


# -- replicas that serve ---------------------------------------------------------------------------
def test_a_crash_ends_a_request_between_two_tokens():
    rows = run_of([(0.5, 8, 10)], [crash(0, 4.0)], on_failure="error")
    assert stays(rows) == [(0, 0.5, 0.5, 4.0, 3, "failed")] and tokens(rows) == [(1.5, 3.5)]
    rows = run_of([(0.5, 8, 10)], [crash(0, 4.0)], on_failure="error", detection=0.5)
    assert stays(rows) == [(0, 0.5, 0.5, 4.0, 3, "moved")] and tokens(rows) == [(1.5, 3.5)]
    assert stamps(rows.requests, "outcome", "ended_s") == [("failed", 4.5)]
    assert stamps(rows.failures, "requests", "failed", "seen_s") == [(1, 1, 4.5)]


def test_a_retry_begins_anew_when_the_router_knows():
    """Three tokens are thrown away. The prompt is computed in 6 to 7 s."""
    rows = run_of([(0.5, 8, 5)], [crash(0, 4.0)], on_failure="retry", detection=2.0)
    assert stays(rows) == [(0, 0.5, 0.5, 4.0, 3, "moved"), (1, 6.0, 6.0, 11.0, 5, "completed")]
    assert tokens(rows) == [(7.0, 11.0)] and rows.requests["discarded_tokens"].tolist() == [3]


def test_a_migration_goes_on_with_the_tokens_that_the_client_has():
    """Prompt and three tokens are computed in one step, which gives the fourth."""
    rows = run_of([(0.5, 8, 5)], [crash(0, 4.0)], on_failure="migrate", detection=2.0)
    assert stays(rows) == [(0, 0.5, 0.5, 4.0, 3, "moved"), (1, 6.0, 6.0, 8.0, 2, "completed")]
    assert tokens(rows) == [(1.5, 8.0)] and rows.failures["lost_kv_tokens"].tolist() == [10]


def test_clients_give_up_before_and_after_the_router_knows():
    """The second request is sent to the dead replica. No other one comes when that is known, at
    6.5 s."""
    settings = {"on_failure": "migrate", "detection": 4.0, "client_timeout": 6.0}
    requests = [(0.0, 8, 9), (3.5, 8, 1)]
    rows = run_of(requests, [crash(0, 2.5)], [Role.SERVE], **settings)
    ends = stamps(rows.requests, "outcome", "ended_s")
    assert ends == [("timed_out", 6.0), ("timed_out", 9.5)]
    assert stays(rows) == [(0, 0.0, 0.0, 2.5, 2, "moved")]


def test_a_drain_moves_at_a_boundary_what_its_grace_does_not_suffice_for():
    """The step under way when the grace ends, from 3.5 to 4.5 s, is booked."""
    drain = Fault(Kind.DRAIN, 0, 2.0, grace_s=2.0)
    rows = run_of([(0.5, 8, 6)], [drain], on_failure="migrate")
    assert stays(rows) == [(0, 0.5, 0.5, 4.0, 4, "moved"), (1, 4.5, 4.5, 6.5, 2, "completed")]
    assert tokens(rows) == [(1.5, 6.5)]


def test_a_slow_replica_is_slow_from_its_next_step_on():
    """Steps that begin in 2 to 5 s take three seconds: from 2.5 to 5.5 s."""
    rows = run_of([(0.5, 8, 4)], [Fault(Kind.SLOW, 0, 2.0, 5.0, 3.0)], [Role.SERVE])
    assert stays(rows) == [(0, 0.5, 0.5, 6.5, 4, "completed")] and tokens(rows) == [(1.5, 6.5)]


# -- prefill apart from decode: replica 0 computes prompts, replica 1 decodes ----------------------
# Prompts of two blocks: computed in one second, on their way for two. Of the lease of 6 s a
# heartbeat a second makes one of 4 s.
APART = {"roles": (P, D), "connector": hand_over(lease_s=6.0)}
PUSH = {"roles": (P, D), "connector": hand_over(lease_s=6.0, push=Push(0.0, 5.0))}
# Two prompts of four blocks, and seven blocks: the second prompt is computed in 5 to 6 s, when the
# first one has been fetched, and finds no room on the decode replica while that one runs.
CROWD = {"requests": [(0.0, 32, 20), (0.0, 32, 5)], "num_blocks": 7}


@pytest.mark.parametrize(("way", "released_s"), [(APART, 9.0), (PUSH, 12.0)], ids=["pull", "push"])
def test_a_client_that_leaves_while_it_waits_for_room(way, released_s):
    """With a pull the prefill replica hears of it at the next boundary of the decode replica, 9 s.
    With a push the lease, of 6 s, runs out, and a heartbeat of 8 s makes it no longer."""
    rows = run_of(**CROWD, **way, leaves=[(8.5, 1)])
    assert transfers(rows) == [
        (0, 1.0, NEVER, NEVER, 5.0),
        (1, 25.0, 1.0, 5.0, NEVER),
        (0, 6.0, NEVER, NEVER, released_s),
        (1, 8.5, NEVER, NEVER, NEVER),
    ]


@pytest.mark.parametrize("way", [APART, PUSH], ids=["pull", "push"])
def test_a_client_that_leaves_while_its_kv_comes(way):
    """Both sides are free when it has come."""
    rows = run_of([(0.0, 16, 5)], **way, leaves=[(2.5, 0)])
    assert transfers(rows) == [(0, 1.0, NEVER, NEVER, 3.0), (1, 2.5, 1.0, 3.0, NEVER)]


@pytest.mark.parametrize("detection", [0.0, 9.0])
@pytest.mark.parametrize("leaves", [(), [(10.5, 1)]], ids=["stays", "leaves"])
@pytest.mark.parametrize("way", [APART, PUSH], ids=["pull", "push"])
def test_a_decode_replica_that_dies_with_a_request_that_waits_for_room(way, leaves, detection):
    """Its last heartbeat is of 9 s, whatever its router knows, and whether the client gives up
    before that is known."""
    settings = {"on_failure": "error", "detection": detection}
    rows = run_of(**CROWD, **way, faults=[crash(1, 9.5)], leaves=leaves, **settings)
    assert transfers(rows) == [
        (0, 1.0, NEVER, NEVER, 5.0),
        (1, 9.5, 1.0, 5.0, NEVER),
        (0, 6.0, NEVER, NEVER, 13.0),
        (1, 9.5, NEVER, NEVER, NEVER),
    ]


@pytest.mark.parametrize("way", [APART, PUSH], ids=["pull", "push"])
def test_a_decode_replica_that_dies_while_the_kv_comes(way):
    """Nobody says that it has come, and the lease of 1 s runs out."""
    rows = run_of([(0.0, 16, 5)], [crash(1, 2.5)], on_failure="error", **way)
    assert transfers(rows) == [(0, 1.0, NEVER, NEVER, 7.0), (1, 2.5, 1.0, NEVER, NEVER)]


@pytest.mark.parametrize(("way", "known_s"), [(APART, 2.5), (PUSH, 6.0)], ids=["pull", "push"])
def test_a_prefill_replica_that_dies_while_its_kv_is_fetched(way, known_s):
    """A read fails at once; a write is waited for, for 5 s. Then the request fails."""
    rows = run_of([(0.0, 16, 5)], [crash(0, 2.5)], **way)
    assert transfers(rows) == [(0, 1.0, NEVER, NEVER, NEVER), (1, known_s, 1.0, known_s, NEVER)]


def test_a_lease_that_runs_out_before_another_decode_replica_comes():
    """It asks at 9 s, when the KV is gone since 7 s, and computes the prompt."""
    connector = hand_over(lease_s=6.0, recompute=True)
    faults = [crash(1, 0.5, 9.0)]
    rows = run_of([(0.0, 16, 2)], faults, roles=(P, D), connector=connector)
    assert transfers(rows) == [(0, 1.0, NEVER, NEVER, 7.0), (2, 11.0, 9.0, 9.0, NEVER)]
