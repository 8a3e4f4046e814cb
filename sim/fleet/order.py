"""One order of applications for a whole fleet: the steps of all replicas drive it, and requests are
stamped with it when they arrive."""

import math
from collections.abc import Callable, Sequence

from twinserve.policies.base import Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.order import ApplicationOrder, OrdersFleet
from twinserve.policies.requests import Application, End, RequestTable
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.view import FleetView


class FleetOrder:
    """Drive a policy's `ApplicationOrder` by the work of a fleet.

    Service: an iteration of the fleet counts as one iteration of all replicas that are up. Their
    number is the mean over the replicas that had requests, weighted by that service. Steps count
    from their begin, so steps inside a run count too, and service does not depend on how many steps
    an engine takes at once.

    application  group -> facts for policies; None: nothing
    """

    def __init__(
        self,
        order: ApplicationOrder,
        replicas: Sequence[Replica],
        view: FleetView,
        application: Callable[[int], Application | None],
    ) -> None:
        self.order = order
        self._replicas = replicas
        self._view = view
        self._application = application
        self._counted: dict[int, int] = {}  # replica -> its steps that are in `_service`
        self._service = 0.0  # not told yet
        self._stamps: dict[int, float] = {}  # group -> stamp; NaN: request by request
        self._kinds: dict[int, str | None] = {}  # of groups with a stamp
        self._busy_s = -math.inf  # until when the fleet had something to do

    # -- service -----------------------------------------------------------------------------------
    def count(self, now: float) -> None:
        """Count the service up to `now`. Called before the set of active replicas changes."""
        served = busy = together = 0
        for replica in self._replicas:
            if replica.life is not Life.UP:
                continue
            ledger, index = replica.engine.core.ledger, replica.index
            worth = self.order.capacity(ledger.num_blocks * ledger.block_tokens)
            together += worth
            if not self._view.in_flight[index]:
                continue
            steps = replica.engine.steps_begun(now)
            served += (steps - self._counted.get(index, 0)) * worth
            busy += worth
            self._counted[index] = steps
        if served:
            self._service += served * together / busy

    def _tell(self, now: float) -> None:
        self.count(now)
        self.order.serve(self._service)
        self._service = 0.0

    # -- requests ----------------------------------------------------------------------------------
    def arrives(self, request: Request, now: float, active: bool) -> None:
        """Stamp an application. active: whether the fleet had any request before it."""
        stamp = self._stamps.get(request.group, math.nan)
        if math.isnan(stamp):
            self._tell(now)
            if not active and now > self._busy_s:
                self.order.idles()
            stamp = self._stamp(request)
        request.order = stamp

    def _stamp(self, request: Request) -> float:
        group = request.group
        if group >= 0 and group not in self._stamps:
            application = self._application(group)
            stamp = None if application is None else self.order.application(application)
            self._stamps[group] = math.nan if stamp is None else stamp
            if application is not None and stamp is not None:
                self._kinds[group] = application.kind
                return stamp
        table = RequestTable(1)
        row = table.submit(request.id, **request.columns(request.arrival_s))
        return self.order.request(row, table)

    def of(self, group: int) -> float:
        """Return the stamp of an application, or NaN."""
        return self._stamps.get(group, math.nan)

    def leaves(self, request: Request, now: float) -> None:
        """A request will not complete, so its application will not either."""
        self._tell(now)
        self.order.leaves(request.order)

    def ended(self, request: Request, now: float) -> None:
        self._busy_s = now
        if request.end is End.COMPLETED:
            self.order.ended(request.output_tokens, self._kinds.get(request.group))
        else:
            self.leaves(request, now)


def order_of(policy: Policy, router: Router) -> ApplicationOrder | None:
    """Return the order that the fleet stamps on requests of this policy, or None. Raises
    PolicyError if the router would spread applications that the policy accounts for as a whole."""
    if not policy.traits.orders_applications:
        return None
    own = policy if isinstance(policy, OrdersFleet) else None
    order = own.fleet_order() if own is not None and router.stamps_order else None
    if order is None and router.spreads_applications:
        stamps = " or stamps a fleet-wide order (spread)" * (own is not None)
        raise PolicyError(
            f"router {router.name!r} spreads applications over replicas, and policy "
            f"{policy.name!r} accounts for each as a whole; use a router that keeps them on "
            f"one replica (least-requests){stamps}"
        )
    return order


def check_same_order(first: Policy, policy: Policy, number: int) -> None:
    """Raises PolicyError if replica `number` would order applications otherwise than the first
    replica with an order."""
    if (type(first), first.options) != (type(policy), policy.options):
        raise PolicyError(
            f"replica {number} orders applications by {policy.name!r}, the others by "
            f"{first.name!r} or with other options; give all replicas that order applications one "
            "policy with the same options"
        )
