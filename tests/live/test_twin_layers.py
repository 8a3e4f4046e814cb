"""Layers that really move: pages of a pool of the ledger's size hold what the ledger says, layer
by layer; what is away lies on the host and is streamed. Answers are those of undisturbed requests,
and damage to a single layer on the host shows."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.live.layer_labels import BLOCK, LAYERS, deep_profile, inputs_for
from tests.live.test_twin import Bench, other_answers, same_answers, told_as_alone
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import MODELS, VOCAB, write_model
from twinserve.backends.live.physical.layers import NULL_PAGES
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.plan import DEVICE, HOST, StepPlan
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import LiveRun, live_settings
from twinserve.sim.twin.replay_physical import replay_physical

pytestmark = [pytest.mark.slow, pytest.mark.live]

DEEP = MODELS["deep"]
LARGEST = {"num_blocks": 24, "host_blocks": 60}  # of all runs below
FEW = {"requests": 9, "num_blocks": 8}
TOKEN_BYTES = 2 * DEEP.kv_heads * DEEP.head_dim * 4  # of one layer, float32


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    return deep_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def bench(vllm, profile, tmp_path_factory) -> Iterator[Bench]:
    inputs = inputs_for(profile, **LARGEST)
    model = write_model(tmp_path_factory.mktemp("deep"), "deep")
    blank = LiveSettings(model, None, 0, 0, 0, 0, physical=True)
    settings = live_settings(inputs, inputs.policies[0], blank)
    with contextlib.closing(
        VllmEngine(replace(settings, max_step_tokens=2400, max_model_len=240))
    ) as engine:
        yield Bench(engine, {})


def worker(bench: Bench):
    """The connector in the worker, and its copier."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


class Watch:
    """Looks at device and host after every step of a run, spoils every page that nobody holds, and
    the staging pages after every layer.

    deepest  blocks, of all layers, that requests had at once, wherever their layers were
    """

    def __init__(self, bench: Bench, run: LiveRun) -> None:
        import torch

        self.run, self.backend, self.connector = run, run.backend, worker(bench)
        self.copier, self.ledger = self.connector._copier, run.engines[0].core.ledger
        self.table, self.memory = self.copier.table, self.backend.memory
        pages = len(bench.engine.kv_tensors) * len(bench.engine.kv_tensors[0])
        self.slots = torch.arange(pages * BLOCK)
        self.staging = self.slots[self.memory._first_staging * BLOCK :]
        self.seen: dict[tuple[int, int], np.ndarray] = {}  # (row, times begun) -> its KV
        self.deepest = 0
        self._execute, self.backend.execute = self.backend.execute, self.execute
        self._save, self.connector.save_kv_layer = self.connector.save_kv_layer, self.save
        self.spoil(self.slots)

    def spoil(self, slots) -> None:
        """With numbers a hundred times those of keys and values. (Not with NaN: vLLM's kernel
        multiplies what it must not read by nought.)"""
        import torch

        filler = torch.full((len(slots), self.table.slot_bytes), 0x44, dtype=torch.uint8)
        self.table.scatter(slots, filler.view(self.table.word))

    def save(self, *args, **kwargs) -> None:
        self._save(*args, **kwargs)
        self.spoil(self.staging)

    def execute(self, plan: StepPlan, *args):
        import torch

        executed = self._execute(plan, *args)
        device = torch.empty((len(self.slots), self.table.width), dtype=self.table.word)
        self.table.gather(self.slots, device)
        device, host = device.numpy(), self.copier.host.numpy()
        free = np.ones(len(device) // BLOCK, bool)
        blocks = 0
        for row in self.memory.rows():
            pages, cells, written = self.memory.held(row)
            blocks += pages.shape[1]
            free[pages[pages >= 0]] = False
            self.check(row, pages, cells, written, device, host)
        self.deepest = max(self.deepest, blocks)
        self.spoil(self.slots.view(-1, BLOCK)[torch.from_numpy(free)].flatten())
        return executed

    def check(self, row: int, pages, cells, written: int, device, host) -> None:
        """What is there of each token is, bit for bit, what was first computed for it."""
        tokens = np.arange(written)
        places = pages[:, tokens // BLOCK] * BLOCK + tokens % BLOCK
        copies = cells[:, tokens // BLOCK] * BLOCK + tokens % BLOCK
        away = (pages[:, tokens // BLOCK] < 0)[..., None]
        found = np.where(away, host[copies], device[places])
        begun = int(self.backend.requests.recomputes[row])
        first = self.seen.get((row, begun), found[:, :0])
        assert np.array_equal(found[:, : first.shape[1]], first), f"KV of row {row} has changed"
        self.seen[row, begun] = found

    def close(self) -> None:
        del self.connector.save_kv_layer


def layer_run(bench: Bench, inputs: Inputs) -> LiveRun:
    bench.engine.scheduler.forget_counts()
    return LiveRun(inputs, inputs.policies[0], bench.engine, wall=False, predicted=True)


def copied_as_accounted(run: LiveRun) -> None:
    """Bytes, of the engine's own KV."""
    moved = run.backend.twin.moved
    scale = TOKEN_BYTES * LAYERS / run.inputs.hardware.limits.kv_bytes_per_token
    for target, way in ((HOST, "to_host_bytes"), (DEVICE, "to_device_bytes")):
        copied = sum(size for to, size, _ in run.backend.transfers if to == target)
        assert copied == scale * sum(counts[way] for counts in moved.values())


@pytest.mark.nightly
def test_the_tensors_have_the_bytes_of_the_ledger(bench, profile):
    inputs = inputs_for(profile, **LARGEST)
    ledger = layer_run(bench, inputs).engines[0].core.ledger
    page = BLOCK * TOKEN_BYTES
    allocations = {t.untyped_storage().data_ptr(): t for t in bench.engine.kv_tensors}
    (tensor,) = allocations.values()
    pages = tensor.untyped_storage().nbytes() // page
    beside = NULL_PAGES + bench.engine.settings.staging
    assert tensor.untyped_storage().nbytes() == pages * page
    # vLLM allocates whole blocks, of a page in each layer
    assert 0 <= pages - ledger.pool.num_cells - beside < LAYERS
    assert ledger.pool.num_cells * page == 24 * BLOCK * LAYERS * TOKEN_BYTES
    assert worker(bench)._copier.host.nbytes == 60 * BLOCK * LAYERS * TOKEN_BYTES


def test_a_model_of_other_layers_is_refused(bench):
    settings = replace(bench.engine.settings, layers=LAYERS - 1)
    with pytest.raises(LiveEngineError, match="the model has 8 layers, and the ledger moves 7"):
        VllmEngine(settings)


@pytest.mark.parametrize(
    "policy",
    mostly_nightly(
        [
            "layerkv:x=0",
            "layerkv:park=false",
            "layerkv:promote=false,interleaved=false",
            "vllm-v0:preemption_mode=swap,kv=layerwise",
            "bros:kv=layerwise",
        ],
        "layerkv:x=0",
    ),
)
def test_every_layer_is_where_the_ledger_says(bench, profile, policy):
    run = layer_run(bench, inputs_for(profile, policy, **FEW))
    with contextlib.closing(Watch(bench, run)) as watch:
        run.run()
    assert not run.parted()
    same_answers(bench, run)
    copied_as_accounted(run)
    moved, requests = run.backend.memory.moved, run.rows().requests
    assert min(moved.offloaded, moved.onloaded) > 0 or "promote=false" in policy
    assert run.described()["memory"] == "physical" and run.described()["not_made"] == {}
    if policy.startswith("layerkv"):
        assert min(moved.streamed_in, moved.streamed_out) > 0
        # a layer that is away leaves its pages to others
        assert watch.deepest > run.engines[0].core.ledger.num_blocks
    else:
        assert requests["swaps"].sum() > 0


def test_a_run_on_measured_time(bench, profile):
    inputs = inputs_for(profile, **FEW)
    bench.engine.scheduler.forget_counts()
    run = LiveRun(inputs, inputs.policies[0], bench.engine, wall=False)
    run.run()
    same_answers(bench, run)
    assert run.backend.memory.moved.streamed_in > 0


def test_a_locked_replay_moves_the_layers_of_its_log(bench, profile):
    """The log's own decisions were taken in runs of steps."""
    inputs = inputs_for(profile, **FEW)
    log = parse_log(run_policy(inputs, inputs.policies[0], decisions=True).decisions)
    assert log.moved["layers"]["moves"] > 10
    bench.engine.scheduler.forget_counts()
    found = replay_physical(log, bench.engine, PromptTexts(VOCAB, BLOCK), inputs=inputs)
    assert (len(found.steps), found.drift, found.free_blocks_differ) == (len(log.steps), 0, 0)
    assert found.steps["moved"].sum() > 10 and not found.parted
    told_as_alone(bench, log.requests, found.tokens)


# -- the pool of other engines ---------------------------------------------------------------------
@pytest.mark.parametrize("order", ["layers first", "blocks first"])
def test_a_pool_has_every_page_once(vllm, order):
    import torch

    from twinserve.backends.live.physical.layer_connector import pool_of

    shape = (3, 5) if order == "layers first" else (5, 3)  # three layers of five blocks
    whole = torch.arange(15 * 8.0).reshape(*shape, 2, 4)
    caches = list(whole) if order == "layers first" else [whole[:, i] for i in range(3)]
    pool = pool_of(caches)
    assert torch.equal(pool, whole.flatten(0, 1)) and pool.data_ptr() == whole.data_ptr()


def test_layers_in_tensors_of_their_own_are_refused(vllm):
    import torch

    from twinserve.backends.live.physical.layer_connector import pool_of

    with pytest.raises(ValueError, match="keeps KV layer by layer"):
        pool_of([torch.zeros(5, 2, 4) for _ in range(3)])


# -- damage ----------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_a_corrupted_host_layer_is_seen(bench, profile, monkeypatch):
    """Of all that is copied to the host in the run, one layer of one request is turned round."""
    from twinserve.backends.live.transfer.copy import SlotCopier

    write, damaged = SlotCopier._to_host, []

    def careless(self, rows, source):
        if not damaged and len(rows) > 16:
            damaged.append(len(rows))
            source = -source.flip(0)
        write(self, rows, source)

    monkeypatch.setattr(SlotCopier, "_to_host", careless)
    other_answers(bench, layer_run(bench, inputs_for(profile, **FEW)))
    assert len(damaged) == 1


@pytest.mark.nightly
def test_a_layer_that_is_not_brought_is_seen(bench, profile, monkeypatch):
    from twinserve.backends.live.physical.layer_connector import LayerConnector

    bring, left_out = LayerConnector.wait_for_layer_load, []

    def careless(self, name):
        streams = self._get_connector_metadata().streams
        if not left_out and 3 in streams and self._index[name] == 3 and streams[3].back.rows:
            left_out.append(name)
            streams[3].back.rows, streams[3].back.slots = [], []
        bring(self, name)

    monkeypatch.setattr(LayerConnector, "wait_for_layer_load", careless)
    other_answers(bench, layer_run(bench, inputs_for(profile, **FEW)))
    assert len(left_out) == 1
