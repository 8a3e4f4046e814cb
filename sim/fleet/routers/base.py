"""The interface of a router: a small object that says which replica gets a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import ClassVar, Generic, TypeVar

import numpy as np

from twinserve.policies.base import NoOptions, Options
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.view import FleetView

RouterOptions = TypeVar("RouterOptions", bound=Options)


class Verdict(Enum):
    """Instead of a replica."""

    # It waits in the fleet. When a request ends or a replica comes, the router is asked again, in
    # order of coming up to the first that it holds again.
    HOLD = auto()
    REJECT = auto()  # it ends


class Router(ABC, Generic[RouterOptions]):
    """Decisions only, like a policy: same state, same view, same choice.

    It hears what a router in production would: what it dispatched, first tokens, ends, KV events,
    replicas that come, drain and fail. It never sees a replica's inside: `view` has its own exact
    counts of requests in flight, and snapshots of replicas that are `snapshot_age_s` old.

    A router that overrides `on_first_token`, or `on_stored` or `on_removed`, gets these events;
    otherwise nobody makes them. KV events of a replica come from `on_came` until it is down.
    """

    name: ClassVar[str]
    Options: type[RouterOptions] = NoOptions  # type: ignore[assignment]  # as of a Policy
    snapshot_age_s: float = 0.0
    # True: requests of one application may go to several replicas, even while the first of these
    # is up. Refused with a policy that accounts for applications as a whole
    # (`Policy.orders_applications`), unless the fleet stamps an order of all replicas on requests:
    spreads_applications: ClassVar[bool] = False
    # True: it does, where the policy has such an order (`Policy.fleet_order`)
    stamps_order: ClassVar[bool] = False

    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options: RouterOptions = options or self.Options()
        self.setup()

    def setup(self) -> None:
        """The state of a new router; its options are set."""

    @abstractmethod
    def place(self, request: Request, stage: Role, view: FleetView) -> int | Verdict:
        """The index of one of `view.up`, or why not. `view.up` is not empty. Of `request` it may
        use what a client sends (`values`, `contents`, `group`, `affinity`) and how often it was
        placed, not `output_tokens`."""

    @classmethod
    def hears_kv_events(cls) -> bool:
        """Whether it wants them: it overrides `on_stored` or `on_removed`."""
        return cls.on_stored is not Router.on_stored or cls.on_removed is not Router.on_removed

    # -- what it hears -----------------------------------------------------------------------------
    def on_dispatched(self, request: Request, replica: int) -> None: ...

    def on_first_token(self, request: Request, replica: int) -> None: ...

    def on_ended(self, request: Request, replica: int) -> None:
        """It is not there any more, however that came."""

    def on_stored(self, replica: int, contents: np.ndarray) -> None:
        """int64[n]: content ids of KV blocks that requests there can now find. A replica whose
        ledger publishes no events (`KvLedger.publishes_events`) tells nothing."""

    def on_removed(self, replica: int, contents: np.ndarray) -> None: ...

    def on_came(self, replica: int) -> None: ...

    def on_draining(self, replica: int) -> None: ...

    def on_failed(self, replica: int) -> None: ...
