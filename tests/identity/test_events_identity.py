"""KV events: what a router can know of policy `vllm` on our paged ledger is what vLLM publishes.

vLLM's own publisher is listened to (BlockStored, BlockRemoved), step for step. vLLM tells of every
block, copies too, so its events are counted: a text can be found while more of its blocks were
stored than removed. Here a text is told of once.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.identity import scenarios
from tests.identity.compare import compare
from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings, Observed, RequestSpec
from tests.identity.real_scheduler import RealScheduler
from tests.parameters import mostly_nightly
from twinserve.sim.fleet.prefix_index import PrefixIndex

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]

# generator of scenarios, seeds with prefix caching, asynchronous scheduling
CLASSES = [
    ("preemption", (1,), False),
    ("partial_chunks", (5,), False),
    ("mixed", (3,), False),
    ("preemption", (3,), True),
    ("mixed", (3,), True),
]


class Publishing(RealScheduler):
    """vLLM with KV events on. `blocks` counts, by hash, blocks stored and not removed."""

    last: Publishing | None = None  # the one made last

    def __init__(self, settings: EngineSettings, hashing: str = "content") -> None:
        super().__init__(settings, hashing)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool.enable_kv_cache_events = True
        self.scheduler.kv_event_publisher = self
        self.blocks: Counter = Counter()
        self.told = Counter()  # of events, by kind
        self.copies = 0  # removed while another one stayed
        Publishing.last = self

    def publish(self, batch) -> None:
        self.take(batch.events)

    def take(self, events) -> None:
        for event in events:
            kind = type(event).__name__
            self.told[kind] += len(event.block_hashes)
            for name in event.block_hashes:
                self.blocks[name] += {"BlockStored": 1, "BlockRemoved": -1}[kind]
                self.copies += kind == "BlockRemoved" and self.blocks[name] > 0

    def findable(self) -> set:
        """Hashes by the events up to now, those of a step under way included."""
        self.take(self.pool.take_events())
        return {name for name, blocks in self.blocks.items() if blocks}


class Listening(OurScheduler):
    """Our side, with an index that hears its events; each step compares it with vLLM's."""

    def __init__(self, settings: EngineSettings, requests: list[RequestSpec]) -> None:
        assert settings.enable_prefix_caching
        super().__init__(settings)
        size = settings.block_tokens
        full = [spec.prefix[: spec.prompt_tokens // size] for spec in requests]
        names = np.unique(np.concatenate(full))
        self._dense = {name: i for i, name in enumerate(names.tolist())}
        self.ledger.pool.new_contents(len(names))
        self.ledger.shared_contents = len(names)  # they are known beforehand, as in a simulation
        # as vLLM makes a number of a hash; another name is another number
        self._theirs = [int.from_bytes(n.tobytes(), "big") for n in names.astype("<i8")]
        self.index = PrefixIndex()
        self.ledger.subscribe(self.index.add(0))

    def step(self) -> Observed:
        seen = super().step()
        ours = {self._theirs[content] for content in self.index.contents(0).tolist()}
        theirs = Publishing.last.findable() & set(self._theirs)
        assert ours == theirs, (
            f"vLLM has {len(theirs - ours)} more texts, ours {len(ours - theirs)}"
        )
        return seen


@pytest.mark.parametrize(
    ("generate", "seeds", "asynchronous"), mostly_nightly(CLASSES, CLASSES[0], CLASSES[4])
)
def test_the_index_knows_what_vllms_events_say(generate, seeds, asynchronous):
    told, copies = Counter(), 0
    for seed in seeds:
        requests = getattr(scenarios, generate)(seed).requests
        make = lambda s, r=requests: Listening(s, r)  # noqa: E731
        report = compare(generate, seed, 1, 0.02, asynchronous, make, make_real=Publishing)
        assert report.mismatches == 0, report.first_mismatch
        told += Publishing.last.told
        copies += Publishing.last.copies
    assert min(told["BlockStored"], told["BlockRemoved"]) > 1000
    assert copies > 0  # where vLLM says that a text is gone while another block holds it
