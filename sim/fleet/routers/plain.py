"""Routers that know no prefix caches: by turn, by chance, by load, by session, by class."""

from hashlib import blake2b

import numpy as np
from pydantic import Field

from twinserve.policies.requests import RequestClass
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, Router, Shedding, fewest
from twinserve.sim.fleet.view import FleetView


class RoundRobin(PerRequest[Shedding]):
    """The next replica that is up, by index, after the one that was chosen last."""

    name = "round-robin"
    Options = Shedding

    def setup(self) -> None:
        self._last = -1

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        later = (i for i in view.up if i > self._last)
        self._last = next(later, view.up[0])
        return self._last


class RandomOptions(Shedding):
    seed: int = Field(0, ge=0)


class Random(PerRequest[RandomOptions]):
    """Each replica that is up with equal chance."""

    name = "random"
    Options = RandomOptions

    def setup(self) -> None:
        self._rng = np.random.default_rng(self.options.seed)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return view.up[int(self._rng.integers(len(view.up)))]


class Spread(PerRequest[Shedding]):
    """The fewest unfinished requests, for each request by itself; the first on a tie.

    So the requests of an application run on all replicas, where `least-requests` keeps them on one
    for shared prefixes. A policy that accounts for applications as a whole needs one order of the
    fleet for that: `justitia` has one (virtual finish times), others are refused.
    """

    name = "spread"
    Options = Shedding

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return fewest(view)


class LeastTokens(PerRequest[Shedding]):
    """The fewest prompt tokens in flight, then the fewest requests, then the first.

    A request counts with its whole prompt from its dispatch to its end, as in llm-d's
    `token-load-scorer`: the answer's length and cached tokens are unknown.
    """

    name = "least-tokens"
    Options = Shedding

    def setup(self) -> None:
        self._tokens: dict[int, int] = {}  # replica -> prompt tokens in flight

    def on_came(self, replica: int) -> None:
        self._tokens[replica] = 0

    def on_dispatched(self, request: Request, replica: int) -> None:
        self._tokens[replica] += request.prompt_tokens

    def on_ended(self, request: Request, replica: int) -> None:
        self._tokens[replica] -= request.prompt_tokens

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return min(view.up, key=lambda i: (self._tokens[i], view.in_flight[i]))


class _Homes(Router[Shedding]):
    """Knows the replica where requests that share an affinity stay."""

    def setup(self) -> None:
        self._home: dict[int, int] = {}  # affinity -> replica

    def on_forgotten(self, affinity: int) -> None:
        self._home.pop(affinity, None)


class LeastRequests(_Homes):
    """The fewest unfinished requests, the first on a tie. Requests with a shared prefix follow the
    first of them."""

    name = "least-requests"
    Options = Shedding

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        home = self._home.get(request.affinity)
        if home is not None and view.takes[home]:
            return home
        replica = fewest(view)
        if request.affinity >= 0:
            self._home[request.affinity] = replica
        return replica


class Session(_Homes):
    """Sessions, and applications, stay on a replica that their name gives while it is up, whatever
    its load; requests without a session go to the least loaded.

    As the session routing of vLLM's production-stack: a consistent hash of the session's id, of
    highest random weights (Thaler, Ravishankar, IEEE/ACM Trans. Networking 1998). Where a replica
    comes or goes, no session changes its place but those that must.
    """

    name = "session"
    Options = Shedding

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        session = request.affinity
        if session < 0:
            return fewest(view)
        home = self._home.get(session)
        if home is None or not view.takes[home]:
            home = max(view.up, key=lambda i: weight(session, i))
            self._home[session] = home
        return home


def weight(session: int, replica: int) -> bytes:
    """A random number for the pair; the session goes to the highest."""
    return blake2b(f"{session}/{replica}".encode(), digest_size=8).digest()


class ClassAwareOptions(Shedding):
    """best_effort  share of the replicas that are up which best-effort requests have, the last ones
                 by index: rounded, but at least one for each class
    overflow     a real-time request goes to one of these too, where every replica of its own has so
                 many requests in flight and that one has fewer; None: never
    """

    best_effort: float = Field(0.5, gt=0, lt=1)
    overflow: int | None = Field(None, ge=1)


class ClassAware(PerRequest[ClassAwareOptions]):
    """To the replica with the fewest requests among those of its class; a replica that is up alone
    serves both classes."""

    name = "class-aware"
    Options = ClassAwareOptions

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        up = view.up
        count = min(max(round(self.options.best_effort * len(up)), 1), len(up) - 1)
        real_time, best_effort = up[: len(up) - count], up[len(up) - count :]
        if len(up) == 1:
            return up[0]
        if request.values.get("service_class", 0) == RequestClass.BEST_EFFORT:
            return fewest(view, best_effort)
        own = fewest(view, real_time)
        most = self.options.overflow
        if most is not None and view.in_flight[own] >= most:
            return fewest(view, [own, *best_effort])
        return own
