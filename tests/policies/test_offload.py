"""A host tier of KV blocks: places on the host are conserved, nothing that is read or written
leaves, and every byte that is queued lands."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.stepper import Stepper
from twinserve.policies.base import EngineLimits
from twinserve.policies.baselines.vllm import VllmOptions
from twinserve.policies.baselines.vllm_offloading import VllmOffloading
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.offload.ledger import TieredLedger
from twinserve.policies.kv.offload.store import EVICTION, Access, Found, HostStore
from twinserve.policies.requests import RequestTable

KINDS = st.sampled_from(sorted(EVICTION))


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(1, 12), st.integers(0, 2), st.data())
def test_what_is_read_or_written_stays_and_places_are_conserved(kind, capacity, threshold, data):
    store, access = HostStore(capacity, kind, threshold), Access()
    writing: list[list[int]] = []
    reading: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(("store", "written", "lost", "pin", "unpin", "end")))
        if act == "store":
            offered = data.draw(st.lists(st.integers(0, 20), max_size=6, unique=True))
            busy = {key for keys in writing + reading for key in keys}
            slots = store.reserve(offered, access)
            assert all(store.lookup(key) is not Found.MISS for key in busy)
            if slots:
                writing.append(list(slots))
                assert all(store.lookup(key) is Found.PENDING for key in slots)
        elif act in ("written", "lost") and writing:
            keys = writing.pop()
            getattr(store, act)(keys)
            found = Found.HIT if act == "written" else Found.MISS
            assert all(store.lookup(key) is found for key in keys)
        elif act == "pin":
            ready = [key for key in range(21) if store.lookup(key) is Found.HIT]
            if ready:
                keys = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
                assert len(set(store.pin(keys, access))) == len(keys)
                reading.append(keys)
        elif act == "unpin" and reading:
            store.unpin(reading.pop())
        elif act == "end":
            store.ended(access, list(range(21)))
            access = Access()
        store.check()
        assert store.busy == bool(writing or reading)


def test_a_full_tier_that_is_read_takes_nothing_and_says_so():
    store, access = HostStore(2), Access()
    store.reserve([1, 2], access)
    store.written([1, 2])
    store.pin([1], access)
    assert store.reserve([3, 4], access) is None
    assert store.counts["full"] == 1
    assert store.reserve([3], access) is not None  # in the place of 2
    assert [store.lookup(key) for key in (1, 2, 3)] == [Found.HIT, Found.MISS, Found.PENDING]
    with pytest.raises(LedgerError, match="not on the host"):
        store.pin([3], access)


def test_a_chunk_is_admitted_when_it_is_offered_again():
    store = HostStore(4, threshold=2)
    assert store.reserve([1], Access()) == {}
    assert store.reserve([1, 2], Access()) == {1: 0}
    assert store.counts["not yet admitted"] == 2


def test_a_load_has_no_less_than_a_chunk():
    """Chunks of two blocks: of 28 tokens the host has the first 16."""
    stepper = _stepper(20, store := HostStore(8), 2, False, False)
    ledger = stepper.core.ledger
    row = stepper.requests.submit("a", np.arange(7), prompt_tokens=28)
    store.reserve([1, 3], Access())  # a chunk has the name of its last block
    store.written([1, 3])
    assert [ledger.offload.lookup(row, hit) for hit in (0, 4, 8, 12)] == [16, 12, 8, 0]


def test_use_counts_when_all_that_end_together_have_stored(monkeypatch):
    """The last block of a text is known when its request has ended."""
    stepper, calls = _stepper(20, store := HostStore(40), 1, False, True), []
    for name in ("reserve", "ended"):
        call = getattr(store, name)

        def noted(*given, name=name, call=call):
            calls.append(name)
            return call(*given)

        monkeypatch.setattr(store, name, noted)
    ledger = stepper.core.ledger
    for name in "ab":
        stepper.submit(name, 6, 3)
    for _ in range(5):
        plan = stepper.core.plan(0.0)
        stepper._execute(plan)
        ledger.offload.begin(plan)
    assert calls[-4:] == ["reserve", "reserve", "ended", "ended"]


def _stepper(blocks: int, store: HostStore, per_chunk: int, prompts: bool, ahead: bool) -> Stepper:
    table = RequestTable()
    ledger = TieredLedger(table, blocks, 4, prefix_caching=True, shared_contents=400)
    ledger.put_behind(store, per_chunk, prompts)
    limits = EngineLimits(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=blocks * 4)
    return Stepper(table, VllmOffloading(limits, VllmOptions()), ledger, ahead)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    KINDS,
    st.integers(12, 30),
    st.integers(2, 40),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_every_request_ends_and_blocks_are_conserved(
    kind, blocks, chunks, per_chunk, prompts, ahead, seed
):
    """Random requests over few texts, transfers of random lengths: the ledger's own auditor is
    asked after each step, no block that a transfer of a live row touches is free, all requests end,
    and at the end nobody reads, writes or holds anything."""
    rng = np.random.default_rng(seed)
    stepper = _stepper(blocks, store := HostStore(chunks, kind), per_chunk, prompts, ahead)
    core, ledger = stepper.core, stepper.core.ledger
    offload, due, open_ = ledger.offload, {}, set()
    for step in itertools.count():
        if step < 30 and rng.random() < 0.5:
            text, size = int(rng.integers(4)), int(rng.integers(1, blocks * 3))
            prefix = text * 100 + np.arange(size // 4)
            row = stepper.submit(f"r{step}", size, int(rng.integers(1, 12)), prefix=prefix)
            open_.add(row)
        made = []
        plan = core.plan

        def noted(now, plan=plan, made=made):
            made.append(plan(now))
            return made[0]

        core.plan = noted
        seen = stepper.step()
        core.plan = plan
        jobs = made[0].offload
        for job in (*jobs.loads, *jobs.stores):
            due[job.number] = step + int(rng.integers(0, 5)), job
            if not job.store:
                core.ready_s[job.row] = np.inf
                core.transferring({job.row: np.inf})
        for number in jobs.flush & due.keys():
            due[number] = step, due[number][1]
        for number in [n for n, (at, _) in due.items() if at <= step]:
            job = due.pop(number)[1]
            offload.complete(job)
            if not job.store:
                del core.ready_s[job.row]
                core.loaded(job.row, job.upto)
        for _, job in due.values():
            if not job.store and job.row in open_:  # what is written into is nobody else's
                assert ledger.pool.refs[job.blocks].all()
        ledger.check()
        open_ -= {core.requests.ids.index(name) for name in seen.finished}
        if step >= 30 and not open_ and not due and not core.policy.unsettled:
            break
        assert step < 3_000, "requests do not end"
    assert not store.busy and not offload.jobs and not offload._requests and not ledger._left
    assert ledger.free_blocks == blocks
