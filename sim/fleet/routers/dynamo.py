"""Dynamo's KV router (ai-dynamo 1.4.2; docs "Routing Concepts"; lib/kv-router/src/scheduling).

    cost = scale x (active prefill + prompt - cached) / block + active blocks + new blocks
           + request weight x active requests

active prefill  uncached prompt tokens of requests there without a first token
cached          prompt tokens that the replica has, times `credit`; from active prefill they are
                taken off whole whatever the credit
active blocks   distinct prompt blocks of the requests there; new: those that this one adds

The lowest cost gets the request. With a temperature it is drawn: softmax of -cost / (max - min) /
temperature. KV events tell what is cached; with index=approximate dispatches do, for 120 s.

Differences. Of replicas with equal costs the one with the fewest blocks in the index is chosen, as
older versions do, then the first; in 1.4.2 any. Blocks of answers are not counted, as there by
default. There is one frontend. Costs are compared with the running original in
tests/identity/test_dynamo_identity.py.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Shedding, of_events
from twinserve.sim.fleet.routers.prefixes import OfPrefixes, Prefixes, blocks_of
from twinserve.sim.fleet.view import FleetView, Signals


class DynamoOptions(Shedding):
    """scale, credit, request_weight  see above
    temperature  0: the lowest cost
    index        exact or approximate; ttl: of the latter, seconds
    events_age, events_lost  of KV events: seconds until they come, share that does not
    """

    scale: float = Field(1.0, ge=0)
    credit: float = Field(1.0, ge=0, le=1)
    request_weight: float = Field(0.0, ge=0)
    temperature: float = Field(0.0, ge=0)
    index: Literal["exact", "approximate"] = "exact"
    ttl: float = Field(120.0, gt=0)
    events_age: float = Field(0.0, ge=0, le=3600)
    events_lost: float = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0)
    _are_heard = field_validator("events_age", "events_lost")(of_events)

    @field_validator("ttl")
    @classmethod
    def _of_dispatches(cls, ttl: float, others: ValidationInfo) -> float:
        if others.data.get("index") == "exact":
            raise ValueError(
                "index=exact removes blocks by KV events; give index=approximate, or drop it"
            )
        return ttl


@dataclass(slots=True)
class _Active:
    """What a replica has under way, by the router's own count.

    users     int32 by content: requests whose prompt has it
    blocks    distinct ones, those without a name too
    requests  request -> its named blocks, its blocks without a name
    prefill   request -> prompt tokens that it still computes
    gone      the replica is down, and ends what it had
    """

    users: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int32))
    blocks: int = 0
    prefill_tokens: int = 0
    requests: dict[Request, tuple[np.ndarray, int]] = field(default_factory=dict)
    prefill: dict[Request, int] = field(default_factory=dict)
    gone: bool = False

    def new(self, named: np.ndarray, others: int) -> int:
        """Blocks of a prompt that no request there has."""
        known = self.users.take(named, mode="clip") if len(named) else named
        return others + len(named) - int(np.count_nonzero(known))

    def add(self, request: Request, named: np.ndarray, others: int, prefill: int) -> None:
        if len(named) and (need := int(named.max()) + 2) > len(self.users):
            grown = np.zeros(max(need, 2 * len(self.users)), np.int32)
            grown[: len(self.users)] = self.users
            self.users = grown  # the last one has no user
        self.blocks += self.new(named, others)
        self.users[named] += 1
        self.requests[request] = named, others
        self.prefill[request] = prefill
        self.prefill_tokens += prefill

    def computed(self, request: Request) -> None:
        self.prefill_tokens -= self.prefill.pop(request, 0)

    def remove(self, request: Request) -> None:
        self.computed(request)
        named, others = self.requests.pop(request)
        self.users[named] -= 1
        self.blocks -= self.new(named, others)


class DynamoKv(OfPrefixes[DynamoOptions]):
    name = "dynamo-kv"
    Options = DynamoOptions

    def setup(self) -> None:
        options = self.options
        self.signals = Signals(
            events_age_s=options.events_age, events_lost=options.events_lost, seed=options.seed
        )
        self._prefixes = Prefixes(options.index == "exact", ttl_s=options.ttl)
        self._active: dict[int, _Active] = {}
        self._rng = np.random.default_rng(options.seed)

    def on_came(self, replica: int) -> None:
        super().on_came(replica)
        self._active[replica] = _Active()

    def on_dispatched(self, request: Request, replica: int) -> None:
        size = self.view.block_tokens[replica]
        cached = self._prefixes.matched_at(request, replica, self.view) * size
        prefill = max(request.prompt_tokens - cached, 0)
        self._active[replica].add(request, *_blocks(request, size), prefill)
        self._prefixes.dispatched(request, replica, self.view)

    def on_first_token(self, request: Request, replica: int) -> None:
        self._active[replica].computed(request)

    def on_ended(self, request: Request, replica: int) -> None:
        active = self._active[replica]
        active.remove(request)
        if active.gone and not active.requests:
            del self._active[replica]

    def on_failed(self, replica: int) -> None:
        super().on_failed(replica)
        active = self._active.get(replica)  # none: it never came
        if active is not None:
            active.gone = True
            if not active.requests:
                del self._active[replica]

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        costs = self.costs(request, view)
        if self.options.temperature:
            chances = softmax(costs, self.options.temperature)
            return view.up[int(self._rng.choice(len(costs), p=chances))]
        least = min(costs)
        tied = [i for i, cost in zip(view.up, costs, strict=True) if cost == least]
        return min(tied, key=self._prefixes.size)

    def costs(self, request: Request, view: FleetView) -> list[float]:
        """Of `view.up`, in blocks."""
        options, tokens = self.options, request.prompt_tokens
        matched = self._prefixes.matched(request, view)
        prompts: dict[int, tuple[np.ndarray, int]] = {}
        costs = []
        for replica in view.up:
            size, active = view.block_tokens[replica], self._active[replica]
            if size not in prompts:
                prompts[size] = _blocks(request, size)
            uncached = max(tokens - options.credit * matched[replica] * size, 0.0)
            prefill = (active.prefill_tokens + uncached) / size
            blocks = active.blocks + active.new(*prompts[size])
            requests = options.request_weight * len(active.requests)
            costs.append(options.scale * prefill + blocks + requests)
        return costs


def _blocks(request: Request, size: int) -> tuple[np.ndarray, int]:
    """Its prompt's full blocks with names, and how many have none."""
    named = blocks_of(request, size)
    return named, max(request.prompt_tokens // size - len(named), 0)


def softmax(costs: list[float], temperature: float) -> np.ndarray:
    """float64[n]: chances; costs count over their range."""
    values = np.array(costs)
    spread = values.max() - values.min()
    if not spread:
        return np.full(len(values), 1 / len(values))
    weights = np.exp(-(values - values.min()) / spread / temperature)
    return weights / weights.sum()
