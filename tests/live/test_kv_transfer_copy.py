"""Copies between KV tensors and host memory: every layout, every order in which lanes may run.

Needs torch, no engine."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytestmark = pytest.mark.live

if os.environ.get("TWINSERVE_REQUIRE_LIVE"):
    import torch
else:
    torch = pytest.importorskip("torch")

from twinserve.backends.live.transfer.copy import InlineLane, SlotCopier
from twinserve.backends.live.transfer.host import HostKv
from twinserve.backends.live.transfer.layout import Packed, SlotTable, Strided, slot_axes, table_of
from twinserve.policies.plan import DEVICE, HOST

BLOCKS, SLOTS = 12, 16


class FlashLike:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, 2, block_size, num_kv_heads, head_size


class OldFlashLike(FlashLike):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, *rest):
        return 2, num_blocks, block_size, *rest


# name -> (shape, order of the axes in memory, where blocks and slots are, backend)
LAYOUTS = {
    "flash": ((BLOCKS, 2, SLOTS, 3, 8), (0, 1, 2, 3, 4), (0, 2), FlashLike),
    "flash, heads first in memory": ((BLOCKS, 2, SLOTS, 3, 8), (0, 1, 3, 2, 4), (0, 2), FlashLike),
    "flash, as many heads as slots": (
        (BLOCKS, 2, SLOTS, SLOTS, 8),
        (0, 1, 2, 3, 4),
        (0, 2),
        FlashLike,
    ),
    "old flash": ((2, BLOCKS, SLOTS, 3, 8), (0, 1, 2, 3, 4), (1, 2), OldFlashLike),
    "old flash, 2 heads": ((2, BLOCKS, SLOTS, 2, 8), (0, 1, 2, 3, 4), (1, 2), None),
    "cpu": ((BLOCKS, 3, SLOTS, 16), (0, 1, 2, 3), (0, 2), object),
    "cpu, content as wide as a block": ((BLOCKS, 3, SLOTS, SLOTS), (0, 1, 2, 3), (0, 2), object),
    "cpu, as many heads as slots": ((BLOCKS, SLOTS, SLOTS, 8), (0, 1, 2, 3), (0, 2), object),
    "cpu, slots first in memory": ((BLOCKS, 3, SLOTS, 8), (0, 2, 1, 3), (0, 2), object),
    "latent": ((BLOCKS, SLOTS, 24), (0, 1, 2), (0, 1), None),
    "kernel blocks of 4": ((BLOCKS * 4, 2, SLOTS // 4, 3, 8), (0, 1, 2, 3, 4), (0, 2), FlashLike),
    "head dimension before slots": ((BLOCKS, 3, 8, SLOTS), (0, 1, 2, 3), (0, 3), None),
}


def make_cache(name: str, dtype=None, seed: int = 0):
    shape, memory, _, _ = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 120, [shape[axis] for axis in memory], generator=generator)
    return stored.to(dtype or torch.float32).permute(*np.argsort(memory))


def plain_slot(cache, axes: tuple[int, int], slot: int):
    """The contents of one slot, the slow and obvious way."""
    kernel_slots = cache.shape[axes[1]]
    index = [slice(None)] * cache.dim()
    index[axes[0]], index[axes[1]] = slot // kernel_slots, slot % kernel_slots
    return cache[tuple(index)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_axes_are_found(name):
    shape, _, axes, backend = LAYOUTS[name]
    assert slot_axes(shape, BLOCKS, SLOTS, backend) == axes


def test_axes_that_cannot_be_told_are_refused():
    with pytest.raises(ValueError, match="may be any of"):
        slot_axes((BLOCKS, 2, SLOTS, SLOTS, 8), BLOCKS, SLOTS)
    with pytest.raises(ValueError, match="no axes number them"):
        slot_axes((BLOCKS, 2, SLOTS, 3, 8), BLOCKS + 1, SLOTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_chosen_slots_and_only_those_move(name, dtype):
    _, _, axes, backend = LAYOUTS[name]
    dtype = getattr(torch, dtype)
    layers = {f"layer{i}": make_cache(name, dtype, i) for i in range(3)}
    layers["shared"] = layers["layer1"]  # two layers on one tensor: copied once
    table = table_of(layers, BLOCKS, SLOTS, dict.fromkeys(layers, backend))
    assert len(table.layers) == 3
    whole = sum(layers[f"layer{i}"].numel() for i in range(3)) * dtype.itemsize
    assert table.slot_bytes * BLOCKS * SLOTS == whole
    before = {key: cache.to(torch.float32) for key, cache in layers.items()}

    source, target = torch.tensor([5, 6, 7, 33, 64, 190]), torch.tensor([100, 101, 0, 15, 16, 191])
    staged = torch.zeros((len(source), table.width), dtype=table.word)
    table.gather(source, staged)
    table.scatter(target, staged)
    moved = dict(zip(target.tolist(), source.tolist(), strict=True))
    for key, cache in layers.items():
        now = cache.to(torch.float32)
        for slot in range(BLOCKS * SLOTS):
            was = plain_slot(before[key], axes, moved.get(slot, slot))
            assert torch.equal(plain_slot(now, axes, slot), was), (key, slot)


def test_layers_of_different_width_share_a_host_row():
    wide, narrow = make_cache("flash"), make_cache("latent")
    table = SlotTable([Strided(wide, 0, 2), Strided(narrow, 0, 1)])
    assert table.slot_bytes == 4 * (2 * 3 * 8 + 24)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interleaved_slots_move_too(dtype):
    """Keys as [dim, slots], values as [slots, dim], one after the other within a block and head."""
    dtype, dim, heads = getattr(torch, dtype), 4, 3
    keys = torch.arange(dim)[None, :] * SLOTS + torch.arange(SLOTS)[:, None]
    values = dim * SLOTS + torch.arange(SLOTS)[:, None] * dim + torch.arange(dim)[None, :]
    elements = torch.cat([keys, values], dim=1)
    cache = torch.zeros((BLOCKS, heads, SLOTS, 2 * dim)).to(dtype)
    table = SlotTable([Packed(cache, elements)])
    assert table.slot_bytes == heads * 2 * dim * dtype.itemsize

    content = torch.randn((BLOCKS * SLOTS, heads, 2, dim)).to(dtype)
    for slot in range(BLOCKS * SLOTS):
        block, place = cache[slot // SLOTS].view(heads, 2, -1), slot % SLOTS
        block[:, 0].view(heads, dim, SLOTS)[:, :, place] = content[slot, :, 0]
        block[:, 1].view(heads, SLOTS, dim)[:, place] = content[slot, :, 1]
    slots = torch.randperm(BLOCKS * SLOTS, generator=torch.Generator().manual_seed(1))
    staged = torch.zeros((len(slots), table.width), dtype=table.word)
    table.gather(slots, staged)
    assert torch.equal(staged.view(dtype).view(-1, heads, 2, dim), content[slots])
    cache.zero_()
    table.scatter(slots, staged)
    block = cache[3].view(heads, 2, -1)
    assert torch.equal(block[:, 0].view(heads, dim, SLOTS)[:, :, 5], content[3 * SLOTS + 5, :, 0])
    assert torch.equal(block[:, 1].view(heads, SLOTS, dim)[:, 5], content[3 * SLOTS + 5, :, 1])


# -- lanes in any order --------------------------------------------------------------------------
class Place:
    def __init__(self, strict: bool) -> None:
        self.passed, self.strict = False, strict

    def done(self) -> bool:
        return self.passed

    def seconds_since(self, earlier: Place) -> float:
        assert not self.strict or (self.passed and earlier.passed)  # CUDA raises, too
        return 0.0


class LazyLane:
    """Work waits in the lane until a draw lets it go on."""

    def __init__(self, heed: bool = True, strict: bool = True) -> None:
        self.queue: list = []
        self.heed, self.strict = heed, strict

    def run(self, work) -> None:
        self.queue.append(work)

    def mark(self) -> Place:
        place = Place(self.strict)
        self.queue.append(lambda: setattr(place, "passed", True))
        return place

    def wait(self, mark: Place) -> None:
        if self.heed:
            self.queue.append(mark)

    @property
    def ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], Place) or self.queue[0].passed)

    def advance(self) -> None:
        head = self.queue.pop(0)
        if not isinstance(head, Place):
            head()


def let_go(lanes, rng, until) -> None:
    """Advance lanes in drawn order, as far as waits allow, until `until()`."""
    while not until():
        ready = [lane for lane in lanes if lane.ready]
        assert ready, "the lanes wait for one another"
        ready[int(rng.integers(len(ready)))].advance()


def stress(seed: int, lanes, staging_slots: int) -> bool:
    """Thirty steps of swaps with blocks given away at once; whether every token came back as it
    left.

    The model's lane is lane 0: its work of a step is to write over all blocks that nobody holds.
    The caller runs ahead of the lanes, as a Python thread runs ahead of a GPU.
    """
    rng = np.random.default_rng(seed)
    caches = {"a": make_cache("flash", seed=seed), "b": make_cache("latent", seed=seed)}
    table = table_of(caches, BLOCKS, SLOTS, {"a": FlashLike})
    copier = SlotCopier(table, 80, 4 * staging_slots * table.slot_bytes, lanes)
    host = HostKv(80, SLOTS)
    free, away, here = list(range(BLOCKS)), {}, {}
    state = {"same": True}
    names = iter(range(1000))

    def write(blocks, step):
        for cache, axes in ((caches["a"], (0, 2)), (caches["b"], (0, 1))):
            for block in blocks:
                index = [slice(None)] * cache.dim()
                index[axes[0]] = block
                cache[tuple(index)] = 1000 * step + block

    def compare(blocks, expected):
        slots = torch.tensor([b * SLOTS + i for b in blocks for i in range(SLOTS)])
        found = torch.zeros((len(slots), table.width), dtype=table.word)
        table.gather(slots, found)
        state["same"] &= bool(torch.equal(found[: len(expected)], expected))

    def note(blocks, tokens, into):
        slots = torch.tensor([b * SLOTS + i for b in blocks for i in range(SLOTS)][:tokens])
        table.gather(slots, into)

    for step in range(1, 31):
        resuming = [name for name in away if rng.random() < 0.5]
        for name in sorted(here):
            if rng.random() < 0.5 and host.free_tokens >= here[name][1]:
                blocks, tokens, truth = here.pop(name)
                host.swap_out(name, blocks, tokens)
                free += blocks
                away[name] = tokens, truth
        checks = []
        for name in resuming:
            tokens, truth = away[name]
            need = -(-tokens // SLOTS)
            if len(free) >= need:
                blocks, free = free[-need:], free[:-need]
                host.swap_in(name)
                host.resumed(name, blocks, host.missing(name, 0, tokens + 1))
                del away[name]
                here[name] = blocks, tokens, truth
                checks.append((blocks, truth))
        written = list(free)
        fresh = None
        if len(free) >= 3:
            tokens = int(rng.integers(1, 3 * SLOTS))
            blocks, free = free[: -(-tokens // SLOTS)], free[-(-tokens // SLOTS) :]
            truth = torch.zeros((tokens, table.width), dtype=table.word)
            here[f"{next(names)}"] = blocks, tokens, truth
            fresh = blocks, tokens, truth
        copier.carry_out(host.take_orders())
        lanes[0].run(lambda w=written, s=step: write(w, s))
        for blocks, truth in checks:
            lanes[0].run(lambda b=blocks, t=truth: compare(b, t))
        if fresh:
            lanes[0].run(lambda f=fresh: note(*f))
        end = lanes[0].mark()
        # some steps wait for the model's lane (sampled tokens are read), some run ahead
        if not isinstance(lanes[0], InlineLane) and rng.random() < 0.5:
            let_go(lanes, rng, end.done)
        copier.reports()
    if not isinstance(lanes[0], InlineLane):
        let_go(lanes, rng, lambda: not any(lane.queue for lane in lanes))
    return state["same"]


def test_copies_at_once():
    lane = InlineLane()
    assert all(stress(seed, (lane, lane, lane), 200) for seed in range(5))


@pytest.mark.parametrize("staging_slots", [1, 5, 200])
def test_copies_in_any_order_that_the_waits_allow(staging_slots):
    seeds = range(4 if staging_slots == 1 else 15)
    for seed in seeds:
        assert stress(seed, (LazyLane(), LazyLane(), LazyLane()), staging_slots), seed


@pytest.mark.parametrize("deaf", [0, 1, 2])
def test_every_lane_has_waits_that_matter(deaf):
    broken = 0
    for seed in range(15):
        broken += not stress(seed, tuple(LazyLane(i != deaf, strict=False) for i in range(3)), 5)
    assert broken


def test_reports():
    caches = {"a": make_cache("flash")}
    table = table_of(caches, BLOCKS, SLOTS, {"a": FlashLike})
    copier, host = SlotCopier(table, 64, 3 * 4 * table.slot_bytes), HostKv(64, SLOTS)
    host.swap_out("a", [0, 1], 20)
    copier.carry_out(host.take_orders())
    host.swap_in("a")
    host.resumed("a", [3, 4], host.missing("a", SLOTS, 30))
    copier.carry_out(host.take_orders())
    out, back = copier.reports()
    assert (out.order, out.target, out.tokens) == (1, HOST, 20)
    assert (back.order, back.target, back.tokens) == (2, DEVICE, 4)
    assert (out.nbytes, back.nbytes) == (20 * 2 * 3 * 8 * 4, 4 * 2 * 3 * 8 * 4)
    assert min(out.seconds, out.held_s, back.seconds, back.held_s) > 0
    assert copier.reports() == []
