"""The interface of a router: a small object that says which replica gets a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar, Generic, TypeVar

import numpy as np
from pydantic import Field, ValidationInfo, model_validator

from twinserve.policies.base import NoOptions, Options
from twinserve.policies.requests import RequestClass
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.view import FleetView, Signals

RouterOptions = TypeVar("RouterOptions", bound=Options)


class Verdict(Enum):
    """What a router answers instead of a replica."""

    # It waits in the fleet. When a request ends or a replica comes, the router is asked again, in
    # order of coming up to the first that it holds again.
    HOLD = auto()
    REJECT = auto()  # it ends


class Shedding(Options):
    """Options of routers that reject requests under load, by class. A request is rejected if each
    replica that is up has so many requests of both classes in flight.

    shed_rt, shed_be  for real-time and for best-effort requests; None: none is rejected
    """

    shed_rt: int | None = Field(None, ge=1)
    shed_be: int | None = Field(None, ge=1)


class Measured(Shedding):
    """Options of routers that decide by measurements of replicas; see `Signals`."""

    age: float = Field(0.0, ge=0, le=3600)
    interval: float = Field(0.0, ge=0, le=3600)
    lost: float = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _polls(self) -> Measured:
        if self.lost and not self.interval:
            raise ValueError(
                f"lost={self.lost:g}: replicas are not measured at intervals; give interval too"
            )
        return self

    @property
    def signals(self) -> Signals:
        return Signals(self.age, self.interval, self.lost, seed=self.seed)


def of_events(value: float, others: ValidationInfo) -> float:
    """Check an option of KV events. Raises ValueError if the router's `index` hears none."""
    if value and others.data.get("index") == "approximate":
        raise ValueError("index=approximate uses no KV events; drop one of the two")
    return value


class Router(ABC, Generic[RouterOptions]):
    """Decides which replica gets a request, and nothing else. The same state and view must give the
    same choice.

    A router hears what one in production would: its own dispatches, first tokens, ends, KV events,
    and replicas that come, drain and fail. It never sees inside a replica. `view` has exact counts
    of requests in flight, and snapshots of replicas as old as `signals` says.

    A router gets first tokens and KV events only if it overrides `on_first_token`, `on_stored` or
    `on_removed`. KV events of a replica come from `on_came` until the replica is down.
    """

    name: ClassVar[str]
    view: FleetView  # what `place` gets, for what it hears; set by the fleet
    Options: type[RouterOptions] = NoOptions  # type: ignore[assignment]  # as of a Policy
    # what the replicas do that it sees; set by a fleet with roles
    stage = Role.SERVE
    # True: where prefill is apart from decode it chooses both replicas of a request as that arrives
    chooses_both: ClassVar[bool] = False
    # True: it predicts times by a model of replicas' steps, and cannot do without (`view.models`)
    predicts_times: ClassVar[bool] = False
    signals = Signals()  # how old what it hears is; of its options, where these are `Measured`
    # True: requests of one application may go to several replicas, even while the first of these
    # is up. Refused with a policy that accounts for applications as a whole
    # (`Traits.orders_applications`), unless the fleet stamps an order of all replicas on requests:
    spreads_applications: ClassVar[bool] = False
    # True: it does, where the policy has such an order (`OrdersFleet`)
    stamps_order: ClassVar[bool] = False

    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options: RouterOptions = options or self.Options()
        if isinstance(self.options, Measured):
            self.signals = self.options.signals
        self.setup()

    def setup(self) -> None:
        """Create the state of a new router. Its options are already set."""

    @abstractmethod
    def place(self, request: Request, stage: Role, view: FleetView) -> int | Verdict:
        """Return the index of a replica in `view.up`, which is not empty, or a Verdict. Of
        `request` the router may use what a client sends (`values`, `contents`, `group`, `affinity`)
        and the number of its placements, but not `output_tokens`."""

    def sheds(self, request: Request, view: FleetView) -> bool:
        """Return whether the request is rejected before it is placed, because of the load on its
        class."""
        options = self.options
        if not isinstance(options, Shedding) or options.shed_rt is options.shed_be is None:
            return False
        real_time = request.values.get("service_class", 0) == RequestClass.REAL_TIME
        most = options.shed_rt if real_time else options.shed_be
        return most is not None and all(view.in_flight[i] >= most for i in view.up)

    def hears_kv_events(self) -> bool:
        """Return whether the router overrides `on_stored` or `on_removed`."""
        kind = type(self)
        return kind.on_stored is not Router.on_stored or kind.on_removed is not Router.on_removed

    # -- what it hears -----------------------------------------------------------------------------
    def on_dispatched(self, request: Request, replica: int) -> None: ...

    def on_first_token(self, request: Request, replica: int) -> None:
        """The request got its first token from this replica. A request that moved may have had
        tokens before."""

    def on_ended(self, request: Request, replica: int) -> None:
        """The request has left this replica, for whatever reason."""

    def on_stored(self, replica: int, contents: np.ndarray) -> None:
        """Requests on this replica can now find KV blocks of these content ids (int64[n]). A ledger
        without events (`KvLedger.publishes_events`) reports none."""

    def on_removed(self, replica: int, contents: np.ndarray) -> None: ...

    def on_forgotten(self, affinity: int) -> None:
        """For a live front only: no request with this affinity has come for long, so the router may
        forget it. A later one counts as the first."""

    def on_came(self, replica: int) -> None: ...

    def on_draining(self, replica: int) -> None: ...

    def on_failed(self, replica: int) -> None: ...


class PerRequest(Router[RouterOptions]):
    """A router that places each request by itself. Requests of one application spread, in one order
    of the fleet if the policy has one."""

    spreads_applications = True
    stamps_order = True


def chosen_without(
    router: Router, request: Request, view: FleetView, avoided: Sequence[int]
) -> int | Verdict:
    """Return the router's choice as if the given replicas were down."""
    if router.sheds(request, view):
        return Verdict.REJECT
    up = view.up
    try:
        view.up = [i for i in up if i not in avoided] if avoided else up
        for replica in avoided:
            view.takes[replica] = False
        return router.place(request, Role.SERVE, view)
    finally:
        view.up = up
        for replica in avoided:
            view.takes[replica] = True


def fewest(view: FleetView, among: Sequence[int] | None = None) -> int:
    """Return the replica with the fewest requests in flight, the first on a tie. Default: of all
    replicas that are up."""
    return min(view.up if among is None else among, key=view.in_flight.__getitem__)
