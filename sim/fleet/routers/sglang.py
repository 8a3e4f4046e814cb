"""SGLang's cache-aware router (sgl-router/src/policies/cache_aware.rs, sglang-router 0.3.2).

Where the most loaded replica has more than 64 requests more than the least loaded one, and more
than 1.5 times as many: the least loaded one. Else, where some replica was sent more than 0.3 of the
prompt before: the one that was sent most of it. Else the least loaded one. What was sent is kept in
the router's own tree; no replica is asked.

Differences. The tree there is one of characters, and shortened every two minutes to `max_tree_size`
of them a worker; here it is one of KV blocks, and never has more than `tree_tokens`. Of replicas
that were sent equally much the first one is chosen, there any. Picks are compared with the running
original in tests/identity/test_sglang_identity.py.
"""

from pydantic import Field

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Shedding
from twinserve.sim.fleet.routers.prefixes import OfPrefixes, Prefixes
from twinserve.sim.fleet.view import FleetView


class SglangOptions(Shedding):
    """cache_threshold  share of a prompt that must have been sent to a replica
    balance_abs, balance_rel  beyond these, load alone decides: requests, and a factor
    tree_tokens      that the router remembers of each replica: 2^26 characters, at four a token
    """

    cache_threshold: float = Field(0.3, ge=0, le=1)
    balance_abs: int = Field(64, ge=0)
    balance_rel: float = Field(1.5, ge=1)
    tree_tokens: int = Field(2**24, ge=1)


class SglangCacheAware(OfPrefixes[SglangOptions]):
    name = "sglang"
    Options = SglangOptions

    def setup(self) -> None:
        self._prefixes = Prefixes(exact=False, tokens=self.options.tree_tokens)

    def on_draining(self, replica: int) -> None:
        self._prefixes.gone(replica)

    def on_dispatched(self, request: Request, replica: int) -> None:
        self._prefixes.dispatched(request, replica, self.view)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return self.candidates(request, view)[0]

    def candidates(self, request: Request, view: FleetView) -> list[int]:
        """Those of `view.up` that are equally good for a request, and better than the others."""
        loads = [view.in_flight[i] for i in view.up]
        most, least = max(loads), min(loads)
        fewest = [i for i in view.up if view.in_flight[i] == least]
        options = self.options
        if most - least > options.balance_abs and most > options.balance_rel * least:
            return fewest
        matched = self._prefixes.matched(request, view)
        sent = {i: blocks * view.block_tokens[i] for i, blocks in matched.items()}
        longest = max(sent.values())
        if longest > options.cache_threshold * request.prompt_tokens:
            return [i for i in view.up if sent[i] == longest]
        return fewest
