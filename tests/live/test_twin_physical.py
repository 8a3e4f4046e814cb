"""The bidirectional ledger's layout made real: KV lies in the ledger's own blocks and slots on a
pool of exactly its size. Answers are those of undisturbed requests, every slot holds what the
ledger says, and a single wrong move shows."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.live.test_physical_layout import SETTINGS, inputs_for
from tests.live.test_twin import Bench, other_answers, same_answers, told_as_alone
from tests.live.twin_workloads import BLOCK
from tests.parameters import mostly_nightly
from tests.policies.bidi_views import preemption_table
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import MODELS, VOCAB
from twinserve.policies.plan import DEVICE, HOST, StepPlan
from twinserve.policies.requests import RequestClass
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import LiveRun, live_settings
from twinserve.sim.twin.replay_physical import replay_physical

pytestmark = [pytest.mark.slow, pytest.mark.live]

TINY = MODELS["tiny"]
BLOCKS, SIZE = SETTINGS["num_blocks"], BLOCK


@pytest.fixture(scope="module")
def bench(model) -> Iterator[Bench]:
    inputs = inputs_for()
    settings = live_settings(
        inputs, inputs.policies[0], LiveSettings(model, None, 0, 0, 0, 0, physical=True)
    )
    with contextlib.closing(VllmEngine(replace(settings, max_step_tokens=2400))) as engine:
        assert (engine.num_blocks, settings.swap_blocks) == (BLOCKS, SETTINGS["host_blocks"])
        yield Bench(engine, {})


class Watch:
    """Looks at the worker's memory after every step of a run, and spoils every slot that nobody
    owns.

    counts  what happened, in slots where data moved and in steps else
    """

    def __init__(self, run: LiveRun) -> None:
        self.run, self.engine = run, run.live
        self.ledger, self.backend = run.engines[0].core.ledger, run.backend
        self.counts: Counter = Counter()
        # (row, times recomputed, token) -> its KV
        self.seen: dict[tuple[int, int, int], np.ndarray] = {}
        self.before: dict[int, tuple[int, int]] = {}
        self._execute, self.backend.execute = self.backend.execute, self.execute
        for layer in self.layers:
            layer.fill_(float("nan"))

    @property
    def layers(self) -> list:
        """[blocks, slots, KV heads, head size], one for keys and one for values of each layer."""
        from twinserve.backends.live.attention.cache import split_cache

        return [
            part for tensor in self.engine.kv_tensors for part in split_cache(tensor, TINY.head_dim)
        ]

    def memory(self) -> np.ndarray:
        """[slots, content] of the worker: a slot of the ledger is `SIZE` further here (vLLM's null
        block)."""
        import torch

        return (
            torch.cat([layer.flatten(2).flatten(0, 1) for layer in self.layers], 1).numpy().copy()
        )

    def spoil(self, slots) -> None:
        blocks, offsets = divmod(np.array(sorted(slots), np.int64), SIZE)
        for layer in self.layers:
            layer[blocks, offsets] = float("nan")

    def account(self) -> dict[int, tuple[int, int]]:
        """The ledger's: slot of the worker -> (row, token) whose KV is there. No slot is claimed
        twice."""
        state = self.ledger._state
        found: dict[int, tuple[int, int]] = {}
        for row in np.flatnonzero(state.held).tolist():
            missing = set(state.missing(row).tolist())
            places = (self.ledger.places_of(row) + SIZE).tolist()
            mine = {
                place: (row, token) for token, place in enumerate(places) if token not in missing
            }
            assert not mine.keys() & found.keys()
            found |= mine
        return found

    def execute(self, plan: StepPlan, *args):
        state = self.ledger._state
        self.spoil([slot for slot, (row, _) in self.before.items() if not state.tokens[row]])
        self.note(plan)
        executed = self._execute(plan, *args)
        now, memory = self.account(), self.memory()
        free = np.ones(len(memory), bool)
        free[[*now, *self.before]] = False
        assert np.isnan(memory[free]).all(), "something was written to a slot that nobody owns"
        times = self.backend.requests.recomputes
        for slot, (row, token) in now.items():
            assert np.isfinite(memory[slot]).all(), f"token {token} of row {row} was lost"
            first = self.seen.setdefault((row, int(times[row]), token), memory[slot])
            assert np.array_equal(first, memory[slot]), (
                f"slot {slot} holds something else than token {token} of row {row}"
            )
        self.spoil(set(range(len(memory))) - now.keys())
        self.before = now
        ended = executed.outcome.finished  # the ledger hears of them right after this
        assert self.copies() == {
            row: np.flatnonzero(m).tolist() for row, m in state.host.items() if row not in ended
        }
        if self.counts["steps"] % 16 == 0:
            self.ledger.check()
            self.engine.scheduler.connector.host.check()
        return executed

    def copies(self) -> dict[int, list[int]]:
        """Tokens that the engine's host memory holds, by row."""
        host, rows = self.engine.scheduler.connector.host, self.backend.requests.ids
        return {row: host.tokens_of(name) for row, name in enumerate(rows) if host.tokens_of(name)}

    def note(self, plan: StepPlan) -> None:
        ledger = self.ledger
        n, count = ledger.num_blocks, ledger._state.count
        victims = {row for row, _ in plan.preempted}
        for move in plan.moves:
            whole = victims if move.target == HOST else plan.swapped_in
            self.counts[move.target, "whole" if move.row in whole else "slots"] += move.tokens
        self.counts["steps"] += 1
        self.counts["shared"] += bool(((count[:n] > 0) & (count[n:] > 0)).any())
        self.counts["conflicts"] += bool(preemption_table(ledger))
        self.counts["relocated"] += sum(
            r.source_slots[1] - r.source_slots[0] for r in ledger.relocations()
        )
        counts = [ledger.counts_of(row) for row in plan.rows.tolist()]
        self.counts["left early"] += any((count[:-1] < SIZE).any() for count in counts)


def physical_run(
    bench: Bench, policy: str = "bros", predicted: bool = True, **changes
) -> tuple[LiveRun, Watch]:
    inputs = inputs_for(policy, **changes)
    bench.engine.scheduler.forget_counts()
    run = LiveRun(inputs, inputs.policies[0], bench.engine, wall=False, predicted=predicted)
    return run, Watch(run)


def test_the_layout_is_physical(bench):
    run, watch = physical_run(bench)
    run.run()
    same_answers(bench, run)
    counts = watch.counts
    happened = {name: counts[name] for name in ("shared", "conflicts", "left early", "relocated")}
    happened |= {
        (target, what): counts[target, what]
        for target in (HOST, DEVICE)
        for what in ("whole", "slots")
    }
    assert min(happened.values()) > 0, happened
    assert run.rows().requests["recomputes"].sum() > 0
    scheduler = bench.engine.scheduler
    assert bench.engine.num_blocks == BLOCKS and len(bench.engine.kv_tensors[0]) == BLOCKS + 1
    # vLLM's manager was never asked
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS
    assert scheduler.connector.free_tokens == SETTINGS["host_blocks"] * SIZE
    slot_bytes = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 4
    for target in (HOST, DEVICE):
        copied = sum(size for to, size, _ in run.backend.transfers if to == target)
        assert copied == slot_bytes * (counts[target, "whole"] + counts[target, "slots"])


@pytest.mark.parametrize(
    "policy",
    mostly_nightly(
        ["bros", "bros:chunk=48", "bros:chunk=fit", "vllm:kv=bidirectional"], "bros:chunk=fit"
    ),
)
def test_on_measured_time_and_other_policies(bench, policy):
    """Which requests share blocks then depends on the machine: the run on predicted times says."""
    run, _ = physical_run(bench, policy, predicted=False, requests=16)
    run.run()
    same_answers(bench, run)


def test_a_locked_replay_makes_the_run_again(bench):
    """Its decisions are those of the log, which were taken in runs of steps."""
    inputs = inputs_for(requests=12, exact=False)
    log = parse_log(run_policy(inputs, inputs.policies[0], decisions=True).decisions)
    bench.engine.scheduler.forget_counts()
    found = replay_physical(log, bench.engine, PromptTexts(VOCAB, SIZE), inputs=inputs)
    assert (len(found.steps), found.drift, found.free_blocks_differ) == (len(log.steps), 0, 0)
    assert found.steps["moved"].sum() > 10
    told_as_alone(bench, log.requests, found.tokens)


def broken(bench: Bench) -> None:
    """A run without anybody watching memory, whose answers are wrong."""
    inputs = inputs_for()
    bench.engine.scheduler.forget_counts()
    other_answers(
        bench, LiveRun(inputs, inputs.policies[0], bench.engine, wall=False, predicted=True)
    )


@pytest.mark.nightly
def test_one_restore_left_out_is_seen(bench, monkeypatch):
    from twinserve.backends.live.physical.host import SlotHost

    carry, left_out = SlotHost.carry, []

    def careless(self, stage):
        if not left_out and stage.back and 4 < len(stage.back[0][1]) < 2 * SIZE:
            left_out.append(stage.back.pop(0))
        carry(self, stage)

    monkeypatch.setattr(SlotHost, "carry", careless)
    broken(bench)
    assert len(left_out) == 1


@pytest.mark.nightly
def test_a_wrong_direction_is_seen(bench, monkeypatch):
    from twinserve.backends.live.attention.slots import BACKWARD
    from twinserve.backends.live.physical.layout import PhysicalMemory, Table

    table, steps = PhysicalMemory._table, Counter()

    def wrong(self, row):
        right = table(self, row)
        backward = self.ledger.table.service_class[row] == RequestClass.BEST_EFFORT
        steps[row] += 1
        return (
            Table(right.entries - BACKWARD, right.counts)
            if backward and steps[row] == 10
            else right
        )

    monkeypatch.setattr(PhysicalMemory, "_table", wrong)
    broken(bench)
