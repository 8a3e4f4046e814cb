"""ConServe: online requests take the memory of offline ones, and checkpoints make that cheap."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.moves import way
from tests.policies.policy_runs import BE, MODEL, RT, Desk, run_core
from tests.sim.stepper import Stepper
from twinserve.backends.links import PcieLink
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.paged.checkpointed import CheckpointedLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.sim.engine.core import EngineCore
from twinserve.traces.workload import Workload

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, kv_bytes_per_token=1
)
D2H = "d2h"


class Table(Desk):
    """A desk with a checkpointed ledger."""

    def __init__(
        self,
        policy: str,
        blocks: int,
        host: int,
        limits: EngineLimits = LIMITS,
        ledger=CheckpointedLedger,
    ) -> None:
        super().__init__(policy, blocks, host=host, limits=limits)
        self.ledger = ledger(self.table, blocks, 4, host, prefix_caching=False)
        self.stepper = Stepper(self.table, self.policy, self.ledger)


# -- the ledger ------------------------------------------------------------------------------------
def ledger_with(tokens: list[int], blocks: int = 20, host: int = 20) -> CheckpointedLedger:
    table = RequestTable()
    ledger = CheckpointedLedger(table, blocks, 4, host, prefix_caching=False)
    for row, count in enumerate(tokens):
        table.submit(f"r{row}", prompt_tokens=count, service_class=BE)
        assert ledger.admit(row, count)
        table.computed_tokens[row] = count
    ledger.begin_step()
    return ledger


def copied_blocks(ledger, rows):
    """First blocks of `rows` (int or index array), on the device, that have a copy on the host."""
    full = ledger.table.computed_tokens[rows] // ledger.block_tokens
    return full - ledger.pending_blocks(rows)


def moved(ledger) -> list[tuple[int, str, int]]:
    return [(m.row, way(m), m.tokens) for m in ledger.take_moves()]


def test_full_blocks_are_copied_once_and_not_moved_again():
    ledger = ledger_with([10])
    assert ledger.pending_blocks(np.array([0])).tolist() == [2]
    assert [ledger.checkpoint(0, 1), ledger.checkpoint(0, 5), ledger.checkpoint(0, 5)] == [1, 1, 0]
    assert moved(ledger) == [(0, D2H, 4), (0, D2H, 4)]
    assert ledger.usage().host_tokens == 8
    assert ledger.swap_out(0)
    assert moved(ledger) == [(0, D2H, 2)]  # the part of a block
    assert ledger.usage().host_tokens == 10 and ledger.free_blocks == 20
    ledger.check()
    assert ledger.swap_in(0)
    assert moved(ledger) == [(0, "h2d", 10)]
    assert copied_blocks(ledger, 0) == 2  # the copies stay
    assert ledger.swap_out(0) and moved(ledger) == [(0, D2H, 2)]
    ledger.free(0)
    assert ledger.usage().host_tokens == 0 and ledger.free_host_blocks == 20
    ledger.check()


def test_a_row_whose_blocks_are_all_copied_moves_nothing():
    ledger = ledger_with([8])
    assert ledger.checkpoint(0, 9) == 2
    ledger.take_moves()
    assert ledger.swap_out(0) and moved(ledger) == []
    ledger.check()


def test_copies_make_room_for_a_swap_those_of_the_first_to_arrive_first():
    ledger = ledger_with([8, 8, 12], host=5)
    assert [ledger.checkpoint(row, 9) for row in (0, 1, 2)] == [2, 2, 1]
    assert ledger.free_host_blocks == 0
    assert ledger.swap_out(2)
    assert copied_blocks(ledger, np.arange(3)).tolist() == [0, 2, 0]
    ledger.check()
    assert not ledger_with([8, 24], host=5).swap_out(1)


def test_the_auditor_sees_a_copy_of_what_is_not_computed():
    ledger = ledger_with([8])
    ledger.checkpoint(0, 2)
    ledger.table.computed_tokens[0] = 7
    with pytest.raises(LedgerError, match="copies of blocks that are not computed"):
        ledger.check()


# -- the policy ------------------------------------------------------------------------------------
def test_a_worked_example():
    """By hand: eight blocks of four, and two full blocks make a checkpoint. The offline request has
    computed 14 tokens: its three full blocks wait for a copy, two are copied, beside the step. With
    the next full block there are two again. The online prompt of 16 tokens finds four free blocks
    and needs them; when it grows, the offline request gives way with 18 tokens, of which 16 have a
    copy. It comes back when the online one has ended."""
    desk = Table("conserve:checkpoint_blocks=2,watermark=0", 8, 20)
    desk.submit("off", 14, 9, service_class=BE)
    assert desk.scheduled(1) == [{"off": 14}] and desk.moves() == []
    assert desk.scheduled(1) == [{"off": 1}] and desk.moves() == [("off", D2H, 8, "step")]
    assert desk.scheduled(2) == [{"off": 1}] * 2 and desk.moves() == [("off", D2H, 8, "step")]
    desk.submit("on", 12, 3, service_class=RT)
    assert desk.scheduled(1) == [{"on": 12, "off": 1}] and not desk.preempted()
    assert desk.scheduled(1) == [{"on": 1}]
    assert desk.preempted() == [("off", "swap")] and desk.moves() == [("off", D2H, 2, "before")]
    assert desk.scheduled(1) == [{"on": 1}]
    assert desk.scheduled(2) == [{}, {"off": 1}]  # back beside the engine's idling, then it runs
    assert desk.table.swapped_tokens.tolist() == [8 + 8 + 2 + 18, 0]
    assert desk.table.recomputes.sum() == 0


def test_prompts_are_split_where_the_budget_ends_online_ones_first():
    limits = EngineLimits(
        max_num_seqs=8, max_num_batched_tokens=10, max_model_len=64, kv_bytes_per_token=1
    )
    desk = Table("conserve", 20, 20, limits)
    desk.submit("off", 14, 2, service_class=BE)
    assert desk.scheduled(1) == [{"off": 10}]
    desk.submit("on", 13, 2, service_class=RT)
    assert desk.scheduled(3) == [{"on": 10}, {"on": 3, "off": 4}, {"on": 1, "off": 1}]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 25), st.integers(1, 24), st.integers(1, 24), st.booleans()),
    min_size=2,
    max_size=8,
)


def run(
    workload: Workload,
    text: str,
    blocks: int,
    host: int,
    fast: bool,
    ledger=CheckpointedLedger,
    spy=None,
):
    limits = EngineLimits(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, kv_bytes_per_token=100_000
    )
    table = RequestTable()
    memory = ledger(table, blocks, 4, host, prefix_caching=False)
    core = EngineCore(table, parse_policy(text).build(limits), memory)
    if spy is not None:
        spy(core)
    *frames, engine = run_core(workload, core, MODEL, PcieLink(1e9), limits, fast=fast)
    return frames, engine


def audit(core: EngineCore) -> None:
    """At every plan: a preempted row moves its tokens but those with a copy, and online ones never
    give way while an offline one holds memory that is not on its way."""
    plan, ledger, requests = core.plan, core.ledger, core.requests

    def checked(now: float):
        copies = {
            row: int(copied_blocks(ledger, row))
            for row in range(len(requests))
            if requests.state[row] == 1
        }
        computed = requests.computed_tokens.copy()
        decided = plan(now)
        ledger.check()
        out = {m.row: m for m in decided.moves if way(m) == D2H and m.hold.value == "before"}
        victims = [row for row, _ in decided.preempted]
        for row, kind in decided.preempted:
            rest = int(computed[row]) - copies[row] * ledger.block_tokens
            assert (out[row].tokens if row in out else 0) == (rest if kind.value == "swap" else 0)
        assert set(out) <= set(victims)
        if any(requests.service_class[row] == RT for row in victims):
            resident = np.flatnonzero((requests.state == 1) & (requests.service_class == BE))
            assert not {*resident.tolist()} - {*core.ready_s} - {row for row, _ in decided.admitted}
        return decided

    core.plan = checked


@examples(60, suppress_health_check=list(HealthCheck))
@given(REQUESTS, st.integers(13, 30), st.sampled_from([0, 8, 60]), st.integers(0, 6))
def test_every_token_is_computed_once_unless_dropped_and_runs_are_exact(
    requests, blocks, host, checkpoint
):
    at, prompts, outputs, offline = (
        np.array(column) for column in zip(*sorted(requests), strict=True)
    )
    workload = Workload.build(at / 200, prompts, outputs, service_class=offline.astype(np.int8))
    text = f"conserve:checkpoint_blocks={checkpoint}"
    fast, _ = run(workload, text, blocks, host, fast=True)
    exact, engine = run(workload, text, blocks, host, fast=False, spy=audit)
    for ours, theirs in zip(fast, exact, strict=True):
        assert ours.equals(theirs)
    steps, _, rows = exact
    assert rows.finished.all() and sorted(rows.output_tokens) == sorted(outputs.tolist())
    computed = int((steps.prefill_tokens + steps.decode_requests).sum())
    if not rows.recomputes.sum():
        assert computed == int((prompts + outputs - 1).sum())
    assert (
        int((steps.to_host_bytes + steps.to_device_bytes).sum())
        == int(rows.swapped_tokens.sum()) * 100_000
    )
    assert engine.core.ledger.usage().host_tokens == 0 and engine.core.ledger.free_blocks == blocks


def bursts(n: int = 12) -> Workload:
    """Three long offline requests, and bursts of online ones that need their memory."""
    at = [0.0] * 3 + [0.05 + 0.12 * (i // 3) for i in range(n)]
    prompts, outputs = [12] * 3 + [20] * n, [40] * 3 + [6] * n
    return Workload.build(
        at, prompts, outputs, service_class=np.array([BE] * 3 + [RT] * n, np.int8)
    )


def test_checkpoints_take_the_copy_out_of_the_online_requests_way():
    """The same bursts with and without: fewer bytes before a step, online requests have their first
    token sooner, and the offline ones lose nothing by it."""
    without, with_them = (
        run(bursts(), f"conserve:checkpoint_blocks={k},watermark=0", 30, 60, fast=True)[0]
        for k in (0, 1)
    )
    ttft = [
        (rows.first_token_s - rows.arrival_s)[
            rows.service_class == rows.service_class.iloc[-1]
        ].mean()
        for _, _, rows in (without, with_them)
    ]
    assert without[2].swaps.sum() > 0 and with_them[2].swaps.sum() > 0
    assert ttft[1] < 0.95 * ttft[0]


def test_on_another_ledger_it_preempts_without_checkpoints():
    desk = Table("conserve:checkpoint_blocks=1,watermark=0", 5, 20, ledger=PagedLedger)
    desk.submit("off", 14, 9, service_class=BE)
    desk.scheduled(2)
    assert desk.moves() == []
    desk.submit("on", 12, 3, service_class=RT)
    desk.step()
    assert desk.preempted() == [("off", "swap")] and desk.moves() == [("off", D2H, 15, "before")]
