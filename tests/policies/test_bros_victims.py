"""Whom BROS drops: nobody without whom the asker could have had its memory just as well.
With `reserve`: a best-effort prompt begins only where there is room for the whole of it."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.parameters import mostly_nightly
from tests.policies.policy_runs import BE, Desk
from tests.policies.test_bros import Counter
from twinserve.policies.base import EngineLimits
from twinserve.policies.bros.memory import Search, enough
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import ledger_names, parse_policy
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation


class Watch:
    """Takes every search for victims twice: at first it is undone, and each victim spared once."""

    def __init__(self) -> None:
        self.victims = 0
        self._drop = Search.drop

    def __call__(self, search: Search):
        ledger = search._step.ledger
        mark = ledger.mark()
        dropped = self._drop(search) or []
        ledger.rollback(mark)
        rows = [row for row, _ in dropped]
        for spared in rows:
            mark = ledger.mark()
            for row in rows:
                if row != spared:
                    search._drop(row)
            assert not search._granted(), f"{spared} of {rows} was dropped for nothing"
            ledger.rollback(mark)
        self.victims += len(rows)
        found = self._drop(search)
        assert (found or []) == dropped
        return found


def watched(policy: str, kv: str, seed: int, **changes) -> int:
    """How many were dropped in a crowd that memory is too small for."""
    config = CROWDED.model_copy(update=changes)
    spec = replace(parse_policy(policy), kv=kv)
    watch = Watch()
    with patch.object(Search, "drop", lambda search: watch(search)):
        Simulation(Inputs(config, crowd(seed), resolve_hardware(config), (spec,), ()), spec).run()
    return watch.victims


@pytest.mark.nightly
@settings(max_examples=12)
@given(
    kv=st.sampled_from(ledger_names()),
    seed=st.integers(0, 99),
    blocks=st.sampled_from([40, 50, 60]),
    host=st.sampled_from([0, 4, 60]),
    options=st.sampled_from(["bros", "bros:swap=false", "bros:chunk=16", "bros:late_drops=true"]),
)
@example("bidirectional", 0, 40, 4, "bros")
def test_no_dropped_victim_was_unnecessary(kv, seed, blocks, host, options):
    watched(options, kv, seed, num_blocks=blocks, host_blocks=host)


@pytest.mark.slow
@pytest.mark.parametrize("kv", mostly_nightly(ledger_names(), "paged"))
def test_such_runs_drop_somebody(kv):
    assert sum(watched("bros:late_drops=true", kv, seed) for seed in range(3)) > 0


@given(gains=st.lists(st.integers(0, 6), min_size=1, max_size=12), share=st.floats(0.01, 1.0))
def test_enough_reaches_the_lack_and_nobody_of_it_can_be_spared(gains, share):
    gained = np.array(gains, np.int64)
    lack = max(1, int(share * gained.sum()))
    if gained.sum() < lack:
        return
    chosen = enough(gained, lack)
    total = gained[chosen].sum()
    assert total >= lack and (total - gained[chosen] < lack).all()
    assert (np.diff(chosen) > 0).all()
    assert enough(np.array([2, 2, 3]), 5).tolist() == [0, 2]  # of two alike the later is spared


def test_a_best_effort_owner_that_frees_nothing_keeps_its_kv():
    """a needs a block more than is free; x would free none that a may not enter already, b two."""
    desk = Counter(blocks=6, kind="bidirectional", host=16)
    desk.arrives("b", 15, ttft=1.0, tpot=50.0)
    desk.arrives("x", 8)
    assert desk.order(0.0) == "bx"
    desk.arrives("a", 12, ttft=0.02, at=0.1)  # three blocks: x's two, and one of those of b
    assert desk.order(0.1) == "a"
    assert desk.preempted() == [("b", "swap")]


@pytest.mark.parametrize(("replacement", "batch"), [("all", "axyz"), ("once", "abxy")])
def test_repeated_replacement_goes_on_until_one_fails(replacement, batch):
    """Beside a, b and c is time for x; y takes the place of c, and z that of b."""
    desk = Counter(f"replacement={replacement}")
    desk.arrives("a", 10, ttft=0.1)
    desk.arrives("b", 27, ttft=1.0)
    desk.arrives("c", 27, ttft=1.0)
    for name in "xyz":
        desk.arrives(name, 28)
    assert desk.order(0.0) == batch


def test_a_newcomer_waits_for_room_for_all_of_its_prompt():
    """x will need four of six blocks, so y's three are not there, though its first one is."""
    for options, begun in (("chunk=4", {"x": 4, "y": 4}), ("chunk=4,reserve=true", {"x": 4})):
        desk = Counter(options, blocks=6)
        desk.arrives("x", 16)
        desk.arrives("y", 12)
        assert desk.iteration(0.0) == begun
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 16)
    assert desk.iteration(0.0) == {"x": 4}
    desk.arrives("y", 12, at=0.1)  # five are free, of which x will take three
    assert desk.iteration(0.1) == {"x": 4}


def test_who_fits_beside_what_is_promised_begins():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 16)
    desk.arrives("y", 8)
    assert desk.iteration(0.0) == {"x": 4, "y": 4}


def test_the_first_one_begins_where_nobody_has_memory():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 24, output=1)
    assert [desk.iteration(i * 0.1) for i in range(6)] == [{"x": 4}] * 6


def test_real_time_requests_do_not_wait_for_promised_memory():
    desk = Counter("chunk=4,reserve=true", blocks=6)
    desk.arrives("x", 20)
    desk.iteration(0.0)
    desk.arrives("a", 12, ttft=1.0, at=0.1)
    assert "a" in desk.iteration(0.1)


def lost(policy: str, kind: str) -> int:
    """How often a best-effort request of a crowd lost its memory; all of them end."""
    desk = Desk(policy, 12, kind=kind, limits=EngineLimits(max_num_seqs=8, max_model_len=64))
    for i in range(20):
        desk.submit(f"r{i}", 16 + i % 3, 9, service_class=BE)
    for _ in range(2000):
        if desk.stepper.core.active:
            desk.step()
    assert not desk.stepper.core.active
    return int(desk.table.recomputes.sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "bidirectional"])
def test_fewer_lose_their_memory_in_a_crowd_and_all_end(kind):
    assert lost("bros:chunk=4,reserve=true", kind) < lost("bros:chunk=4", kind) / 2


def test_there_is_none_with_chunks_that_fit():
    with pytest.raises(RegistryError, match="reserve=.*chunk=fit has none"):
        parse_policy("bros:chunk=fit,reserve=true").given  # noqa: B018
