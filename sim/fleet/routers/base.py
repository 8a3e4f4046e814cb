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
    """Instead of a replica."""

    # It waits in the fleet. When a request ends or a replica comes, the router is asked again, in
    # order of coming up to the first that it holds again.
    HOLD = auto()
    REJECT = auto()  # it ends


class Shedding(Options):
    """Options of routers that reject requests under load, by class: one comes while every replica
    that is up has so many requests in flight, of both classes.

    shed_rt, shed_be  real-time requests; best-effort ones. None: none is rejected
    """

    shed_rt: int | None = Field(None, ge=1)
    shed_be: int | None = Field(None, ge=1)


class Measured(Shedding):
    """Options of routers that decide by what replicas measure; see `Signals`."""

    age: float = Field(0.0, ge=0, le=3600)
    interval: float = Field(0.0, ge=0, le=3600)
    lost: float = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _polls(self) -> Measured:
        if self.lost and not self.interval:
            raise ValueError(f"lost={self.lost:g}: which measurements? give an interval, too")
        return self

    @property
    def signals(self) -> Signals:
        return Signals(self.age, self.interval, self.lost, seed=self.seed)


def of_events(value: float, others: ValidationInfo) -> float:
    """An option of KV events, where another one, `index`, says whether these are heard."""
    if value and others.data.get("index") == "approximate":
        raise ValueError("index=approximate hears no KV events; drop one of the two")
    return value


class Router(ABC, Generic[RouterOptions]):
    """Decisions only, like a policy: same state, same view, same choice.

    It hears what a router in production would: what it dispatched, first tokens, ends, KV events,
    replicas that come, drain and fail. It never sees a replica's inside: `view` has its own exact
    counts of requests in flight, and snapshots of replicas as `signals` has it.

    A router that overrides `on_first_token`, or `on_stored` or `on_removed`, gets these events;
    otherwise they are not made. KV events of a replica come from `on_came` until it is down.
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
        """The state of a new router; its options are set."""

    @abstractmethod
    def place(self, request: Request, stage: Role, view: FleetView) -> int | Verdict:
        """The index of one of `view.up`, or why not. `view.up` is not empty. Of `request` it may
        use what a client sends (`values`, `contents`, `group`, `affinity`) and how often it was
        placed, not `output_tokens`."""

    def sheds(self, request: Request, view: FleetView) -> bool:
        """Whether the request is rejected before it is placed: by class, under load."""
        options = self.options
        if not isinstance(options, Shedding) or options.shed_rt is options.shed_be is None:
            return False
        real_time = request.values.get("service_class", 0) == RequestClass.REAL_TIME
        most = options.shed_rt if real_time else options.shed_be
        return most is not None and all(view.in_flight[i] >= most for i in view.up)

    def hears_kv_events(self) -> bool:
        """Whether it wants them: it overrides `on_stored` or `on_removed`."""
        kind = type(self)
        return kind.on_stored is not Router.on_stored or kind.on_removed is not Router.on_removed

    # -- what it hears -----------------------------------------------------------------------------
    def on_dispatched(self, request: Request, replica: int) -> None: ...

    def on_first_token(self, request: Request, replica: int) -> None:
        """The first token that this replica gave it; the first of all, unless it moved there."""

    def on_ended(self, request: Request, replica: int) -> None:
        """It is not there any more, however that came."""

    def on_stored(self, replica: int, contents: np.ndarray) -> None:
        """int64[n]: content ids of KV blocks that requests there can now find. A replica whose
        ledger publishes no events (`KvLedger.publishes_events`) tells nothing."""

    def on_removed(self, replica: int, contents: np.ndarray) -> None: ...

    def on_forgotten(self, affinity: int) -> None:
        """Of a live front alone: requests with this number have not come for long, and what is
        known of them may go. Should one come, it is as the first."""

    def on_came(self, replica: int) -> None: ...

    def on_draining(self, replica: int) -> None: ...

    def on_failed(self, replica: int) -> None: ...


class PerRequest(Router[RouterOptions]):
    """A router that looks at each request by itself: those of one application are spread, in one
    order of the fleet where the policy has one."""

    spreads_applications = True
    stamps_order = True


def chosen_without(
    router: Router, request: Request, view: FleetView, avoided: Sequence[int]
) -> int | Verdict:
    """What a router says where replicas that are up are not to be chosen: as far as it sees, they
    are not up."""
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
    """Of these replicas (default: all that are up), the one with the fewest requests in flight; the
    first of them on a tie."""
    return min(view.up if among is None else among, key=view.in_flight.__getitem__)
