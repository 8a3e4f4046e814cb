"""docs/invariants.md as tests: what must hold in every run, for every policy that has a name.

Much of it is in `harness.Audit`, which looks at every plan and every outcome of these runs.
"""

import ast
import math
import re
from collections import deque
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim.harness import POLICIES, Small, build, hybrid, simulate
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import EngineLimits
from twinserve.policies.requests import RequestTable
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.source import RequestSource
from twinserve.sim.results.files import POOL_GROUP
from twinserve.traces.workload import Workload

ROOT = Path(__file__).parents[2]
TIGHT, HOST = 90, 60  # KV blocks: far too few, so that memory is fought for

# of the module: all tests of one policy come together and share its run
everybody = pytest.mark.parametrize(
    "policy", mostly_nightly(POLICIES, "bros", *SOME_POLICIES), scope="module"
)


@cache
def workload(seed: int = 0) -> Workload:
    return hybrid(seed, 40, pool=5)


@cache
def audited(policy: str, seed: int = 0) -> Small:
    """Tight memory, exact path: every decision passes the auditor."""
    return simulate(workload(seed), policy, blocks=TIGHT, host_blocks=HOST, fast=False)


def listed(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests.group != POOL_GROUP]


# -- requests --------------------------------------------------------------------------------------
@pytest.mark.slow
@everybody
def test_every_request_comes_once_and_ends_complete(policy):
    requests, given = audited(policy).requests, workload()
    rows = listed(requests).set_index("request_id")
    assert sorted(rows.index) == sorted(given.ids)
    assert requests.request_id.is_unique
    assert requests.finished.all()
    assert rows.output_tokens.loc[given.ids].tolist() == given.output_tokens.tolist()
    pool = requests[requests.group == POOL_GROUP]
    for k, batch in pool.groupby("stage"):
        assert len(batch) == given.pool.batch
        assert batch.output_tokens.tolist() == given.pool.draw(k)[1].tolist()


@pytest.mark.slow
@everybody
def test_a_requests_times_are_in_order(policy):
    rows = audited(policy).requests
    times = rows[["arrival_s", "first_scheduled_s", "first_token_s", "last_token_s"]].to_numpy()
    assert not np.isnan(times).any()
    assert (np.diff(times, axis=1) >= 0).all()
    many = rows.output_tokens > 1
    assert (rows.last_token_s[many] > rows.first_token_s[many]).all()
    assert (rows.first_token_s > rows.first_scheduled_s).all()


# -- memory ----------------------------------------------------------------------------------------
@pytest.mark.slow
@everybody
def test_memory_is_conserved_and_granted_before_it_is_used(policy):
    """The auditor recounted the ledger and the grants at every plan; here: the memory was really
    fought for, all of it is free at the end, and the rows never show more than there is."""
    sim = audited(policy)
    steps = sim.steps
    ledger = sim.engines[0].core.ledger
    assert steps.kv_used_blocks.max() > 0.8 * TIGHT
    assert (steps.kv_used_blocks + steps.kv_cached_blocks <= TIGHT).all()
    assert (steps.kv_used_blocks == steps.kv_rt_blocks + steps.kv_be_blocks).all()
    assert ledger.free_blocks == TIGHT and ledger.usage().host_tokens == 0
    ledger.check()


def test_the_auditor_sees_a_grant_without_memory():
    """A policy that forgets to ask for memory must be caught, or the test above says nothing."""
    sim = build(workload(), blocks=TIGHT)
    policy = sim.engines[0].core.policy
    honest = policy.plan

    def careless(view, ledger):
        real, ledger.grow_all = ledger.grow_all, lambda rows, tokens: True
        try:
            return honest(view, ledger)
        finally:
            ledger.grow_all = real

    policy.plan = careless
    with pytest.raises(AssertionError):
        sim.run()


@pytest.mark.parametrize("policy", ["vllm", "vllm:scheduling=priority"])
def test_a_step_keeps_to_the_token_budget(policy):
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=100)
    sim = simulate(workload(), policy, blocks=TIGHT, limits=limits, recount=False)
    granted = [sum(n for _, n in d.grants) for d in sim.audits[0].decisions]
    assert max(granted) == 100
    assert max(len(d.grants) for d in sim.audits[0].decisions) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    mostly_nightly(
        ["bros", "bros:kv=paged", "bros:chunk=64", "preemptive-wait"], "preemptive-wait"
    ),
)
def test_whole_prompts_exceed_the_token_budget_as_far_as_they_may(policy):
    """The auditor has looked at every step; here: the budget was short, and one prompt did exceed
    it."""
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=100)
    sim = simulate(workload(), policy, blocks=TIGHT, host_blocks=HOST, limits=limits, recount=False)
    granted = [[n for _, n in d.grants] for d in sim.audits[0].decisions if d.grants]
    assert sim.requests.finished.all()
    if "chunk" in policy:
        assert max(map(sum, granted)) <= 164
    else:
        assert max(map(sum, granted)) > 200
    assert any(sum(g) > 90 and len(g) > 1 for g in granted)


@pytest.mark.parametrize(
    ("policy", "careless"),
    [
        (
            "bros",
            lambda policy: setattr(
                policy.packer, "within_tokens", lambda batch, behind=None: len(batch)
            ),
        ),
        (
            "preemptive-wait",
            lambda policy: setattr(
                policy, "limits", replace(policy.limits, max_num_batched_tokens=10**6)
            ),
        ),
        (
            "vllm",
            lambda policy: setattr(
                policy, "limits", replace(policy.limits, max_num_batched_tokens=10**6)
            ),
        ),
    ],
)
def test_the_auditor_sees_a_step_beyond_the_token_budget(policy, careless):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=100)
    sim = build(hybrid(0, 60, rate=400), policy, blocks=900, limits=limits, recount=False)
    one = sim.engines[0].core.policy
    careless(one)
    with pytest.raises(AssertionError, match="beyond the token budget"):
        sim.run()


# -- tokens ----------------------------------------------------------------------------------------
@pytest.mark.slow
@everybody
def test_computed_tokens_add_up(policy):
    """Every token of a text but the last emitted one is computed once, plus what was dropped, minus
    what was cached."""
    sim = audited(policy)
    steps, requests, audit = sim.steps, sim.requests, sim.audits[0]
    in_steps = int((steps.prefill_tokens + steps.decode_requests).sum())
    needed = int((requests.prompt_tokens + requests.output_tokens - 1).sum())
    assert in_steps == audit.granted_tokens
    assert in_steps == needed + audit.dropped_tokens - audit.hit_tokens
    assert audit.hit_tokens == steps.hit_tokens.sum()
    assert int(steps.preempted_recompute.sum()) == int(requests.recomputes.sum())
    assert int(steps.preempted_swap.sum()) == int(requests.swaps.sum())


@pytest.mark.slow
@everybody
def test_emitted_tokens_and_gaps_add_up(policy):
    sim = audited(policy)
    requests, gaps = sim.requests, sim.rows.gaps
    for service_class, rows in requests.groupby("service_class"):
        some = gaps[gaps.service_class == service_class]
        assert some["count"].sum() == (rows.output_tokens - 1).sum()
        total = (rows.last_token_s - rows.first_token_s).sum()
        assert (some.gap_s * some["count"]).sum() == pytest.approx(total, rel=1e-9)


@pytest.mark.slow
@everybody
def test_moved_bytes_add_up(policy):
    sim = audited(policy)
    moved = int((sim.steps.to_host_bytes + sim.steps.to_device_bytes).sum())
    assert moved == int(sim.requests.swapped_tokens.sum()) * sim.audits[0].limits.kv_bytes_per_token
    link = sim.engines[0].backend.link
    ports = (link.to_host, link.to_device)
    assert moved == sum(port.queued_bytes for port in ports)
    for port in ports:
        port.settle(math.inf)
        assert (port.landed_bytes, port.lost_bytes) == (port.queued_bytes, 0)


# -- time ------------------------------------------------------------------------------------------
@pytest.mark.slow
@everybody
def test_steps_of_a_replica_follow_each_other(policy):
    sim = simulate(workload(), policy, blocks=TIGHT, host_blocks=HOST, replicas=2, recount=False)
    assert sim.steps.replica.nunique() == 2
    for _, steps in sim.steps.groupby("replica"):
        start, end = steps.start_s.to_numpy(), steps.end_s.to_numpy()
        assert (end > start).all()
        assert (start[1:] >= end[:-1]).all()


def test_the_clock_never_goes_back():
    sim = build(workload(), blocks=TIGHT, replicas=2)
    times, step = [], sim.clock.step
    sim.clock.step = lambda: (step(), times.append(sim.clock.now))
    sim.run()
    assert len(times) > 300 and (np.diff(times) >= 0).all()


@everybody
def test_an_engine_idles_only_when_nothing_is_there(policy):
    calm = simulate(
        hybrid(2, 60, rate=5, pool=0, sessions=2, applications=1), policy, blocks=TIGHT, audit=False
    )
    requests, steps = calm.requests, calm.steps
    start, end = steps.start_s.to_numpy(), steps.end_s.to_numpy()
    idle = np.flatnonzero(start[1:] > end[:-1])
    assert len(idle) > 2
    for i in idle:
        there = (requests.arrival_s < start[i + 1]) & (requests.last_token_s > end[i])
        assert not there.any()


@pytest.mark.parametrize("policy", ["vllm", "vllm:scheduling=priority"])
def test_vllm_leaves_nobody_waiting_who_could_run(policy):
    """After every plan that preempts nobody: no seat, no token or not enough memory is left for the
    head of the queue."""
    sim = build(workload(), policy, blocks=TIGHT)
    core, limits = sim.engines[0].core, sim.audits[0].limits
    reasons, plan = {"seats": 0, "tokens": 0, "memory": 0}, core.plan

    def spy(now):
        decided, queue = plan(now), core.policy.waiting
        if queue and not decided.preempted:
            head, ledger = queue.peek(), core.ledger
            fresh = int(core.requests.known_tokens(head)) - ledger.hit_tokens(head)
            if len(core.policy.running) == limits.max_num_seqs:
                reasons["seats"] += 1
            elif decided.tokens.sum() == limits.max_num_batched_tokens:
                reasons["tokens"] += 1
            else:
                # cached blocks of its own that nobody uses are free, but not for the rest of its
                # text
                assert -(-fresh // 16) + ledger.hit_tokens(head) // 16 > ledger.free_blocks
                reasons["memory"] += 1
        return decided

    core.plan = spy
    sim.run()
    assert reasons["memory"] > 20


# -- causality -------------------------------------------------------------------------------------
def cut(w: Workload, at: float, order: np.random.Generator) -> Workload:
    """The same trace up to `at` seconds, and another future: other
    lengths, classes and objectives, in other order and at other times."""
    later = np.flatnonzero(w.arrival_s > at)
    closed = np.isnan(w.arrival_s)
    assert len(later) > 10 and (~closed).sum() - len(later) > 10
    changed = {f.name: getattr(w, f.name) for f in fields(w)}
    shuffled = order.permutation(later)
    for name in (
        "prompt_tokens",
        "output_tokens",
        "service_class",
        "priority",
        "slo_ttft_s",
        "slo_tpot_s",
    ):
        column = changed[name].copy()
        column[later] = column[shuffled]
        changed[name] = column
    arrival = w.arrival_s.copy()
    arrival[later] = at + np.sort(order.uniform(0.0, 3.0, len(later)))
    changed["arrival_s"] = arrival
    changed["ids"] = [
        f"other-{i}" if i in set(later.tolist()) else name for i, name in enumerate(w.ids)
    ]
    return Workload(**changed)


@pytest.mark.slow
@everybody
@pytest.mark.parametrize("fast", mostly_nightly([True, False], False))
def test_the_future_of_the_trace_changes_nothing_before_it(policy, fast):
    at = 0.9
    one = hybrid(4, 60, prefix_block=None, pool=6, until_s=2.0, sessions=0, applications=0)
    settings = {"blocks": TIGHT, "host_blocks": HOST, "fast": fast, "recount": False}
    a, b = (simulate(w, policy, **settings) for w in (one, cut(one, at, np.random.default_rng(1))))
    before = [sim.steps[sim.steps.start_s <= at].reset_index(drop=True) for sim in (a, b)]
    assert len(before[0]) > 50
    # The end of a step is settled when it starts.
    pd.testing.assert_frame_equal(before[0], before[1], check_exact=True)
    decisions = [[d for d in sim.audits[0].decisions if d.now <= at] for sim in (a, b)]
    if not fast:  # a run of steps is one decision, and an arrival after `at` cuts it
        assert decisions[0] == decisions[1]
    assert a.steps.shape != b.steps.shape or not a.steps.equals(b.steps)  # the future did differ


@pytest.mark.slow
@everybody
def test_true_output_lengths_change_nothing_before_the_shorter_end(policy):
    """The same arrivals with longer answers: no decision can differ before the first answer that
    does has ended."""
    rng = np.random.default_rng(3)
    one = hybrid(4, 60, prefix_block=None, sessions=0, applications=0, rate=60)
    longer = replace(one, output_tokens=one.output_tokens + rng.integers(1, 40, len(one)))
    settings = {"blocks": TIGHT, "host_blocks": HOST, "fast": False, "recount": False}
    a, b = (simulate(w, policy, **settings) for w in (one, longer))
    first_end = min(a.requests.last_token_s.min(), b.requests.last_token_s.min())
    decisions = [[d for d in sim.audits[0].decisions if d.now < first_end] for sim in (a, b)]
    assert decisions[0] == decisions[1]
    assert len(decisions[0]) > 2


def reachable(start) -> list:
    """Every object that can be reached from `start` through attributes and containers."""
    found, queue = {}, [start]
    while queue:
        item = queue.pop()
        if (
            id(item) in found
            or isinstance(item, (str, bytes, int, float, type, np.ndarray))
            or callable(item)
        ):
            continue
        found[id(item)] = item
        if isinstance(item, dict):
            queue += [*item, *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            queue += list(item)
        else:
            queue += vars(item).values() if hasattr(item, "__dict__") else []
            queue += [
                getattr(item, name)
                for name in getattr(type(item), "__slots__", ())
                if hasattr(item, name)
            ]
    return list(found.values())


@everybody
def test_a_policy_cannot_reach_what_it_must_not_know(policy):
    """From all that it is given, no way leads to the workload, the source or the hardware, which
    know the future."""
    sim = build(workload(), policy, blocks=400, recount=False)
    core, seen = sim.engines[0].core, []
    plan = core.policy.plan

    def spy(view, ledger):
        if len(seen) < 5:
            seen.append([type(item) for item in reachable([view, ledger, vars(core.policy)])])
        return plan(view, ledger)

    core.policy.plan = spy
    sim.run(until=0.5)
    assert RequestTable in seen[0] and len(seen) == 5
    for types in seen:
        assert not {Workload, RequestSource, SimulatedBackend, Engine, EngineCore, Clock} & set(
            types
        )


def test_the_table_knows_no_true_output_length():
    """Its columns before the first token, with outputs of 7,777: the number is nowhere."""
    sim = build(Workload.build([0.0, 0.0], [8, 8], [7777, 7777])).run(until=1e-3)
    requests = sim.engines[0].core.requests
    assert len(requests) == 2
    for view in requests:
        assert 7777 not in [
            getattr(view, name)
            for name in RequestTable.__slots__
            if name[0] != "_" and name != "ids"
        ]


# -- this list itself ------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_test_named_in_the_list_of_invariants_exists():
    text = (ROOT / "docs" / "invariants.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, test in named:
        path = ROOT / file
        assert path.exists(), f"docs/invariants.md names {file}, which does not exist"
        if test:
            functions = {
                n.name
                for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.FunctionDef)
            }
            assert test in functions, (
                f"docs/invariants.md names {file}::{test}, which does not exist"
            )


def test_every_invariant_has_a_number_a_check_and_a_test():
    text = (ROOT / "docs" / "invariants.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    numbers = [int(match[1]) for s in sections if (match := re.match(r"(\d+)\. ", s))]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 15
    for section in sections:
        if re.match(r"\d+\. ", section):
            assert "**Check.**" in section and re.search(
                r"\*\*Tests?\.\*\*.*`tests/", section, re.DOTALL
            ), section
