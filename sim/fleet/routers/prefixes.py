"""How much of a prompt each replica has, as a router knows it: exactly, by KV events, or roughly,
by what it dispatched."""

import numpy as np

from twinserve.policies.kv.events import KvListener
from twinserve.sim.fleet.prefix_index import PrefixIndex, RecentPrefixes
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, RouterOptions
from twinserve.sim.fleet.view import FleetView

NOTHING = np.zeros(0, np.int64)


def blocks_of(request: Request, block_tokens: int) -> np.ndarray:
    """int64[n]: content ids of its prompt's full KV blocks; empty where its text has no names."""
    found = request.contents(block_tokens)
    return NOTHING if found is None else found


class Prefixes:
    """exact     KV events feed it (`stored`, `removed`); else dispatches do
    ttl_s     of dispatches: how long they count; None: while there is room
    tokens    of dispatches: how many a replica is thought to keep; None: as many as its KV memory
              holds
    """

    def __init__(self, exact: bool, ttl_s: float | None = None, tokens: int | None = None) -> None:
        self.exact = exact
        self._tokens = tokens
        self._index = PrefixIndex()
        self._caches: dict[int, KvListener] = {}
        self._recent = RecentPrefixes(ttl_s)

    def came(self, replica: int, view: FleetView) -> None:
        self._caches[replica] = self._index.add(replica)
        blocks = view.num_blocks[replica]
        if self._tokens is not None:
            blocks = max(self._tokens // view.block_tokens[replica], 1)
        self._recent.add(replica, blocks)

    def gone(self, replica: int) -> None:
        if self._caches.pop(replica, None) is not None:
            self._index.remove(replica)
            self._recent.remove(replica)

    def stored(self, replica: int, contents: np.ndarray) -> None:
        if replica in self._caches:
            self._caches[replica].stored(contents)

    def removed(self, replica: int, contents: np.ndarray) -> None:
        if replica in self._caches:
            self._caches[replica].removed(contents)

    def dispatched(self, request: Request, replica: int, view: FleetView) -> None:
        if not self.exact:
            blocks = blocks_of(request, view.block_tokens[replica])
            self._recent.sent(replica, blocks, view.now)

    def matched(self, request: Request, view: FleetView) -> dict[int, int]:
        """By replica that is up: leading blocks of its prompt that are there, in blocks of that
        replica."""
        prompts: dict[int, np.ndarray] = {}  # by tokens in a block
        found = {}
        for replica in view.up:
            size = view.block_tokens[replica]
            if size not in prompts:
                prompts[size] = blocks_of(request, size)
            found[replica] = self._longest(replica, prompts[size], view.now)
        return found

    def matched_at(self, request: Request, replica: int, view: FleetView) -> int:
        """The same of one replica, up or not."""
        if replica not in self._caches:
            return 0
        return self._longest(replica, blocks_of(request, view.block_tokens[replica]), view.now)

    def size(self, replica: int) -> int:
        """Blocks that are there."""
        return self._index.size(replica) if self.exact else self._recent.size(replica)

    def _longest(self, replica: int, blocks: np.ndarray, now: float) -> int:
        if not len(blocks):
            return 0
        if self.exact:
            return self._index.longest_prefix(replica, blocks)
        return self._recent.longest_prefix(replica, blocks, now)


class OfPrefixes(PerRequest[RouterOptions]):
    """A router that knows what is cached. It keeps `_prefixes`, which its `setup` makes, up to date
    with replicas and KV events; what dispatches say is its own affair."""

    _prefixes: Prefixes

    def hears_kv_events(self) -> bool:
        return self._prefixes.exact

    def on_came(self, replica: int) -> None:
        self._prefixes.came(replica, self.view)

    def on_failed(self, replica: int) -> None:
        self._prefixes.gone(replica)

    def on_stored(self, replica: int, contents: np.ndarray) -> None:
        self._prefixes.stored(replica, contents)

    def on_removed(self, replica: int, contents: np.ndarray) -> None:
        self._prefixes.removed(replica, contents)
