"""The real engine (vLLM's CPU build) on blocks filled from either end: the same tokens as its own
attention gives, with real sharing of blocks, and each request reads its own slots only.

Directions are put into the scheduler's message to the worker, as on a GPU."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.identity.protocol import EngineSettings
from tests.live.engine import LiveEngine, Output, same_answer
from twinserve.backends.live.attention import slots
from twinserve.backends.live.engine import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.live]

BLOCK = 32
SETTINGS = EngineSettings(
    num_blocks=64,
    block_tokens=BLOCK,
    max_num_seqs=8,
    max_num_batched_tokens=96,  # less than the prompts together: chunks beside decodes
    max_model_len=320,
)
LENGTHS = {"a": (70, 40), "b": (33, 50), "c": (150, 20), "d": (5, 60), "e": (96, 33), "f": (41, 8)}
Entries = Callable[[str, list[int], bool], list[int]]


def prompt_of(name: str) -> list[int]:
    rng = np.random.default_rng(ord(name))
    return rng.integers(0, tiny_model.VOCAB, LENGTHS[name][0]).tolist()


class Session:
    """One engine, used for one set of requests after another."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self._schedule = engine.scheduler.schedule

    def send(self, entries: Entries | None) -> None:
        """From now on the worker is sent these entries instead of the scheduler's blocks."""

        def schedule(*args, **kwargs):
            output = self._schedule(*args, **kwargs)
            if entries is not None:
                rewrite_blocks(output, entries)
            return output

        self.engine.scheduler.schedule = schedule

    def run(self, entries: Entries | None = None, names=LENGTHS) -> dict[str, Output]:
        self.send(entries)
        for name in names:
            self.engine.submit(name, prompt_of(name), LENGTHS[name][1])
        while self.engine.unfinished:
            self.engine.step()
        return {name: self.engine.outputs.pop(name) for name in names}

    def caches(self):
        """(keys, values) of every layer, by block and slot."""
        from twinserve.backends.live.attention.cache import split_cache

        return [
            split_cache(tensor, tiny_model.MODELS["tiny"].head_dim)
            for tensor in self.engine.kv_tensors
        ]


def rewrite_blocks(output, entries: Entries) -> None:
    """Replace the block numbers in vLLM's SchedulerOutput `output`, in place, by entries with
    directions.

    entries(request_id, blocks, anew) gives the entries to send instead of `blocks`, the request's
    new ones, in order of its text; anew: they replace what the worker has of the request, else they
    go behind it.
    """
    cached = output.scheduled_cached_reqs
    for request in output.scheduled_new_reqs:
        (blocks,) = request.block_ids
        request.block_ids = ([int(e) for e in entries(request.req_id, blocks, True)],)
    for index, request_id in enumerate(cached.req_ids):
        if cached.new_block_ids[index] is not None:
            (blocks,) = cached.new_block_ids[index]
            anew = request_id in cached.resumed_req_ids
            cached.new_block_ids[index] = ([int(e) for e in entries(request_id, blocks, anew)],)


@contextlib.contextmanager
def session(model, **extra) -> Iterator[Session]:
    engine = LiveEngine(SETTINGS, model, **extra)
    try:
        yield Session(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def stock(model) -> dict[str, Output]:
    """What vLLM's own attention answers."""
    with session(model) as own:
        attention = own.engine.worker.model_runner
        assert "CPU_ATTN" in str([g.backend.get_name() for g in attention.attn_groups[0]])
        return own.run()


@pytest.fixture(scope="module")
def bidirectional(model, stock) -> Iterator[Session]:
    from twinserve.backends.live.attention.registration import (
        BACKEND_NAME,
        WORKER_EXTENSION,
        unregister,
    )

    # another engine of this process may have imported it, and unregistered the backend since
    sys.modules.pop(WORKER_EXTENSION.rpartition(".")[0], None)
    extra = {
        "attention_backend": BACKEND_NAME,
        "worker_extension_cls": WORKER_EXTENSION,  # this alone registers the backend
        "additional_config": {"twinserve_partial_blocks": True},
    }
    try:
        with session(model, **extra) as ours:
            runner = ours.engine.worker.model_runner
            assert [g.backend.get_name() for g in runner.attn_groups[0]] == ["CUSTOM"]
            yield ours
    finally:
        unregister()


def same(expected: dict[str, Output], found: dict[str, Output]) -> None:
    verdicts = {name: same_answer(expected[name], found[name]) for name in found}
    assert set(verdicts.values()) == {"same"}, verdicts


def test_forward_only(stock, bidirectional):
    same(stock, bidirectional.run())
    tokens = [tuple(output.tokens) for output in stock.values()]
    assert len(set(tokens)) == len(tokens) and min(len(set(t)) for t in tokens) > 4


def test_some_requests_backward(stock, bidirectional):
    def entries(name, blocks, anew):
        return slots.entries_of(blocks, name in "bde")

    same(stock, bidirectional.run(entries))


def test_directions_of_single_blocks(stock, bidirectional):
    def entries(name, blocks, anew):
        return slots.entries_of(blocks, np.asarray(blocks) % 3 == 0)

    same(stock, bidirectional.run(entries))


class Shared:
    """Two requests in one block: `b` is sent the last block of `a`, to fill from the right."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {"a": [], "b": []}

    def __call__(self, name, blocks, anew):
        if name == "b":
            where = len(self.blocks["b"])
            blocks = [
                self.blocks["a"][3] if where + i == 2 else block for i, block in enumerate(blocks)
            ]
        self.blocks[name] = ([] if anew else self.blocks[name]) + list(blocks)
        return slots.entries_of(blocks, name == "b")


def test_two_requests_in_one_block(stock, bidirectional):
    """109 and 82 tokens are stored: 13 in the fourth block of `a`, from the left, and 18 in the
    third of `b`, from the right, are in one block."""
    shared = Shared()
    caches = bidirectional.caches()
    for keys, values in caches:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    same({n: stock[n] for n in "ab"}, bidirectional.run(shared, "ab"))
    assert shared.blocks["a"][3] == shared.blocks["b"][2]
    for keys, values in caches:
        for cache in (keys, values):
            written = ~cache[shared.blocks["a"][3]].isnan().flatten(1).any(1)
            assert written.tolist() == [True] * 13 + [False] + [True] * 18
            cache.fill_(0.0)


def test_blocks_left_early(stock, bidirectional):
    """`b` lies in what `a` leaves free: 20 slots of one block, 7 of another, and so on; its worker
    is told the counts by a call, as one in another process would be."""
    held = [20, 7, 1, 30, 24]  # 82 tokens
    pool = list(range(40, 40 + len(held)))
    told = slots.entries_of(pool, True)
    engine = bidirectional.engine._engine
    engine.collective_rpc("twinserve_set_counts", args=(told[:-1].tolist(), held[:-1]))
    caches = bidirectional.caches()
    for keys, values in caches:
        keys[pool], values[pool] = float("nan"), float("nan")

    def entries(name, blocks, anew):
        return told if name == "b" and anew else [] if name == "b" else blocks

    try:
        same({n: stock[n] for n in "ab"}, bidirectional.run(entries, "ab"))
        for block, count in zip(pool, held, strict=True):
            for keys, _ in caches:
                written = ~keys[block].isnan().flatten(1).any(1)
                assert written.tolist() == [False] * (BLOCK - count) + [True] * count
    finally:
        engine.collective_rpc("twinserve_set_counts", args=(told.tolist(), [BLOCK] * len(held)))
