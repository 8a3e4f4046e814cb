"""Replicas and the requests on them: placing, withdrawing, moving, ending; replicas that come,
drain and fail while the clock runs (docs/fleet.md)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twinserve.policies.base import Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import Application, End, State
from twinserve.sim.engine.clock import BEFORE_STEPS, PLANS, Clock
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.fleet.news import KvNews, News, deliver
from twinserve.sim.fleet.order import FleetOrder
from twinserve.sim.fleet.pool import FamilyPool, offline
from twinserve.sim.fleet.replica import Life, Replica, Role
from twinserve.sim.fleet.request import Placement, Request
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.least_requests import LeastRequests
from twinserve.sim.fleet.view import FleetView

_Queue = OrderedDict[int, Request]


class Fleet:
    """replicas  that are up when the clock starts
    router    by default `least-requests`
    migrates  whether requests of a replica that fails, or that has drained long enough, go on
              elsewhere with the tokens that their clients have; otherwise they fail
    offline_window  best-effort requests wait in the fleet, and a replica that has fewer of them
              than this pulls whole families (`FamilyPool`); None: the router places them as others
    on_ended  called with the requests that ended at one instant, after all of them have
    on_leaving  called with a request that was withdrawn from a replica, before it has ended there
    application  group -> what policies are told of it (`Policy.on_application`); None: nothing
    """

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[Replica] = (),
        router: Router | None = None,
        migrates: bool = False,
        offline_window: int | None = None,
    ) -> None:
        self.clock = clock
        self.router = router or LeastRequests()
        self.migrates = migrates
        self.on_ended: Callable[[list[Request]], None] = lambda requests: None
        self.on_leaving: Callable[[Request], None] = lambda request: None
        self.application: Callable[[int], Application | None] = lambda group: None
        self.replicas: list[Replica] = []
        self.requests: list[Request] = []
        self._announced: set[tuple[int, int]] = set()  # replica, group; only asked
        # that wait here, by number in order of coming: real-time ones, best-effort ones
        self._held: tuple[_Queue, _Queue] = (OrderedDict(), OrderedDict())
        self._held_s: dict[int, float] = {}  # since when
        self._news: deque[News] = deque()  # of prefix caches, on the way to the router
        self._order: FleetOrder | None = None  # of applications, where the router stamps one
        self._ordered_by: Policy | None = None  # whose it is
        self._pool = None if offline_window is None else FamilyPool(offline_window)
        self._pulls = False  # at the end of this instant
        self.over = False  # no event is left: closed loops end
        self._alone_s = 0.0  # when the life of a replica changed last, and none was up
        self._asking = False
        self._view = self._view_of(self.router)
        clock.at_end.append(self._nothing_left)
        for replica in replicas:
            self.add(replica)

    def _view_of(self, router: Router) -> FleetView:
        view = FleetView(
            self.clock.now,
            [],
            [],
            [],
            router.signals,
            lambda i, at_s: self.replicas[i].engine.load(at_s),
        )
        router.view = view
        return view

    # -- what a fleet with roles has two of (`Disaggregated`) --------------------------------------
    def _side(self, replica: Replica) -> tuple[Router, FleetView]:
        """Who sends requests to it, and what that one sees."""
        return self.router, self._view

    def _views(self) -> tuple[FleetView, ...]:
        return (self._view,)

    # -- replicas ----------------------------------------------------------------------------------
    def add(self, replica: Replica, warm_up_s: float = 0.0) -> None:
        """A new replica, whose engine counts from the fleet's number of replicas; it takes requests
        when it has warmed up."""
        if replica.index != len(self.replicas):
            raise ValueError(f"{replica.label} would be number {len(self.replicas)}")
        if self.migrates or self._pool is not None:
            self._needs_withdrawal(replica)
        self._needs_order(replica.engine.core.policy)
        if self._pool is not None:
            self._pool.read_texts(replica.engine.core.ledger.block_tokens)
        self.replicas.append(replica)
        ledger = replica.engine.core.ledger
        for view in self._views():
            view.takes.append(False)
            view.in_flight.append(0)
            view.num_blocks.append(ledger.num_blocks)
            view.block_tokens.append(ledger.block_tokens)
            view.models.append(replica.model)
        replica.engine.on_ended = lambda rows: self._rows_ended(replica, rows)
        if type(self._side(replica)[0]).on_first_token is not Router.on_first_token:
            replica.engine.on_first_token = lambda rows: self._first_tokens(replica, rows)
        replica.becomes(Life.WARMING, self.clock.now)
        if warm_up_s > 0:
            self.clock.process(self._warm_up(replica, self.clock.now + warm_up_s))
        else:
            self._up(replica)

    def _warm_up(self, replica: Replica, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        if replica.life is Life.WARMING:
            self._up(replica)

    def _up(self, replica: Replica) -> None:
        self._becomes(replica, Life.UP)
        router, _ = self._side(replica)
        router.on_came(replica.index)
        ledger = replica.engine.core.ledger
        if ledger.publishes_events and router.hears_kv_events():
            ledger.subscribe(KvNews(replica, router, self.clock, self._news))
        self._ask_again()
        self._pull_soon()

    def drain(self, index: int, grace_s: float | None = None) -> None:
        """The replica takes no more requests. It is down when it has none; after `grace_s` seconds
        those that it still has move, or fail where the fleet does not migrate."""
        replica = self._replica(index)
        if replica.life in (Life.DRAINING, Life.DOWN):
            return
        if grace_s is not None:
            self._needs_withdrawal(replica)
        self._becomes(replica, Life.DRAINING)
        self._side(replica)[0].on_draining(index)
        if self._down_if_empty(replica):
            return
        if self._pool is not None:
            self._return_offline(replica)
        if grace_s is not None:
            self.clock.process(self._end_of_grace(replica, self.clock.now + grace_s))

    def _end_of_grace(self, replica: Replica, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        if replica.life is Life.DRAINING:
            table = replica.engine.core.requests
            for row in np.flatnonzero(table.end == End.NONE).tolist():  # what returns may do so
                if self.migrates:
                    replica.engine.withdraw(row, End.MOVED)
                else:
                    self.withdraw(replica.requests[row], End.FAILED)

    def fail(self, index: int) -> None:
        """The replica dies now (`Engine.fail`). Not to be called out of its own engine's events."""
        replica = self._replica(index)
        if replica.life is Life.DOWN:
            return
        if self.clock.active_process is replica.engine.process:
            raise ValueError(
                f"{replica.label} cannot fail inside an event of its own engine; fail it from a "
                "process of the clock"
            )
        replica.failed = True
        self._becomes(replica, Life.DOWN)
        self._side(replica)[0].on_failed(index)
        self._rows_ended(replica, replica.engine.fail(End.MOVED if self.migrates else End.FAILED))

    def _replica(self, index: int) -> Replica:
        if not 0 <= index < len(self.replicas):
            raise ValueError(f"no replica {index}: the fleet has had {len(self.replicas)}, from 0")
        return self.replicas[index]

    def _becomes(self, replica: Replica, life: Life) -> None:
        self._count_service()
        _, view = self._side(replica)
        view.now = self.clock.now
        replica.becomes(life, self.clock.now)
        view.takes[replica.index] = life is Life.UP
        view.up = [i for i, takes in enumerate(view.takes) if takes]
        if not view.up:
            self._alone_s = self.clock.now

    def _down_if_empty(self, replica: Replica) -> bool:
        if replica.life is not Life.DRAINING or self._busy(replica):
            return False
        self._becomes(replica, Life.DOWN)
        return True

    def _busy(self, replica: Replica) -> bool:
        return bool(self._side(replica)[1].in_flight[replica.index])

    def _needs_withdrawal(self, replica: Replica) -> None:
        policy: Policy = replica.engine.core.policy
        if not policy.withdraws():
            raise PolicyError(
                f"policy {policy.name!r} has no on_withdraw: its requests cannot leave a replica "
                "that drains or fails; add the method, or let requests fail with their replica"
            )

    # -- one order of applications -----------------------------------------------------------------
    def _needs_order(self, policy: Policy) -> None:
        """Raises PolicyError where the router would spread what the policy accounts for as a
        whole."""
        router = self.router
        if not policy.orders_applications:
            return
        order = policy.fleet_order() if router.stamps_order else None
        if order is None and router.spreads_applications:
            has_one = type(policy).fleet_order is not Policy.fleet_order
            raise PolicyError(
                f"router {router.name!r} spreads applications over replicas, and policy "
                f"{policy.name!r} accounts for each as a whole; use a router that keeps them on "
                f"one replica (least-requests){' or stamps a fleet-wide order (spread)' * has_one}"
            )
        if order is None:
            return
        first = self._ordered_by
        if first is None:
            self._ordered_by = policy
            self._order = FleetOrder(
                order, self.replicas, self._view, lambda group: self.application(group)
            )
        elif (type(first), first.options) != (type(policy), policy.options):
            raise PolicyError(
                f"replica {len(self.replicas)} orders applications by {policy.name!r} with other "
                f"options than the fleet, or by another policy ({first.name!r}); give all replicas "
                "that order applications one policy with the same options"
            )

    def _count_service(self) -> None:
        """Before replicas, or who has requests, change."""
        if self._order is not None:
            self._order.count(self.clock.now)

    def described(self) -> dict[str, object]:
        """For run.json; what each replica is made of is in replicas.parquet."""
        return {
            "router": self.router.name,
            "router_options": self.router.options.model_dump(mode="json"),
            "migrates": self.migrates,
            "offline_window": None if self._pool is None else self._pool.window,
        }

    # -- requests ----------------------------------------------------------------------------------
    @property
    def active(self) -> bool:
        """Whether any request has not ended."""
        under_way = any(any(view.in_flight) for view in self._views())
        return any(self._held) or bool(self._pool) or under_way

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        if self._order is not None:
            self._order.arrives(request, self.clock.now, self.active)
        request.number = len(self.requests)
        self.requests.append(request)
        self._place(request)

    def never_sent(self, request: Request) -> None:
        """It is not to come: what it waits for did not complete."""
        request.number = len(self.requests)
        self.requests.append(request)
        request.end = End.NEVER_SENT

    def withdraw(self, request: Request, end: End) -> bool:
        """Its client left or gave up, now. It is gone from its replica at the next step boundary.
        False where it had ended."""
        if request.end is not End.NONE:
            return False
        if self._queue(request).pop(request.number, None) is not None:
            del self._held_s[request.number]
            self._ended([(request, end, self.clock.now)])
            return True
        if self._pool is not None and self._pool.remove(request):
            self._ended([(request, end, self.clock.now)])
            return True
        replica, row, _ = request.placements[-1]
        if not replica.engine.withdraw(row, end):
            return False
        if self._order is not None:
            self._order.leaves(request, self.clock.now)
        self.on_leaving(request)
        return True

    def _place(self, request: Request) -> bool:
        """False where it is to wait."""
        view = self._view
        view.now = self.clock.now
        if self._pool is not None and offline(request):
            return self._place_offline(request, self._pool)
        if self._news:
            deliver(self._news, self.clock.now)
        choice = self._choose(request)
        if choice is Verdict.HOLD:
            self._queue(request)[request.number] = request
            self._held_s.setdefault(request.number, self.clock.now)
            return False
        self._held_s.pop(request.number, None)
        if choice is Verdict.REJECT:
            self._ended([(request, End.REJECTED, self.clock.now)])
        elif choice in range(len(self.replicas)):
            self._dispatch(request, self.replicas[choice])
        else:
            raise ValueError(
                f"router {self.router.name!r} sent a request to {choice!r}, which is no replica "
                "and no Verdict; give one of view.up"
            )
        return True

    def _choose(self, request: Request) -> int | Verdict:
        if not self._view.up:
            return Verdict.HOLD
        if self.router.sheds(request, self._view):
            return Verdict.REJECT
        return self.router.place(request, Role.SERVE, self._view)

    def _dispatch(self, request: Request, replica: Replica) -> None:
        router, view = self._side(replica)
        if not self._may_take(replica, request):
            role = "" if replica.role is Role.SERVE else f" for {replica.role}"
            raise ValueError(
                f"router {router.name!r} sent a request to {replica.label}, which is "
                f"{replica.life}{role}; give one of view.up"
            )
        view.now = self.clock.now
        engine, key = replica.engine, (replica.index, request.group)
        if request.group >= 0 and key not in self._announced:
            self._announced.add(key)
            application = self.application(request.group)
            if application is not None and self._order is not None:
                application = replace(application, order=self._order.of(request.group))
            if application is not None:
                engine.core.announce(application)
        self._count_service()
        before = request.emitted_tokens
        row = self._submit_to(replica, request)
        request.placements.append(Placement(replica, row, before))
        replica.requests.append(request)
        if self._pool is not None and offline(request):
            self._pool.came(replica.index)
        self._dispatched(request, replica)

    def _may_take(self, replica: Replica, request: Request) -> bool:
        return replica.life is Life.UP

    def _submit_to(self, replica: Replica, request: Request) -> int:
        columns = request.columns(self.clock.now)
        return self._submit_row(replica, request, request.output_tokens, columns)

    def _submit_row(
        self, replica: Replica, request: Request, tokens: int, columns: dict[str, Any]
    ) -> int:
        prefix = request.contents(replica.engine.core.ledger.block_tokens)
        return replica.engine.submit(request.id, tokens, prefix=prefix, **columns)

    def _dispatched(self, request: Request, replica: Replica) -> None:
        router, view = self._side(replica)
        view.in_flight[replica.index] += 1
        router.on_dispatched(request, replica.index)

    def _first_tokens(self, replica: Replica, rows: list[int]) -> None:
        router, view = self._side(replica)
        view.now = self.clock.now
        for row in rows:
            router.on_first_token(replica.requests[row], replica.index)

    def _rows_ended(self, replica: Replica, rows: list[int]) -> None:
        """All that ended on one replica at one boundary: first they are gone, then what follows."""
        self._count_service()
        router, view = self._side(replica)
        view.now = self.clock.now
        index, table = replica.index, replica.engine.core.requests
        view.in_flight[index] -= len(rows)
        moving: list[Request] = []
        ended: list[tuple[Request, End, float]] = []
        for row in rows:
            request, end = replica.requests[row], End(table.end[row])
            router.on_ended(request, index)
            if self._pool is not None and offline(request):
                self._pool.left(index)
            if end is End.MOVED or end is End.HANDED_OVER:
                moving.append(request)
            else:
                ended.append((request, end, float(table.ended_s[row])))
        self._down_if_empty(replica)
        self._again(sorted(moving, key=lambda request: request.number))
        self._ended(ended)
        self._pull_soon()

    def _again(self, moving: list[Request]) -> None:
        """Requests that no replica has any more. Each is the fleet's until its turn: where an
        earlier one is rejected, its application fails, and the rest of that does not go on."""
        for request in moving:
            self._queue(request)[request.number] = request
        self._held_s |= {request.number: self.clock.now for request in moving}
        for request in moving:
            if self._queue(request).pop(request.number, None):
                self._place(request)

    def _ended(self, ends: Sequence[tuple[Request, End, float]]) -> None:
        for request, end, ended_s in ends:
            if request.end is not End.NONE:
                raise AssertionError(f"request {request.id!r} ended twice")
            request.end, request.ended_s = end, ended_s
            if self._order is not None:
                self._order.ended(request, self.clock.now)
        if ends:
            self.on_ended([request for request, _, _ in ends])
            self._ask_again()

    # -- requests that wait in the fleet -----------------------------------------------------------
    def _ask_again(self) -> None:
        """Real-time requests, then best-effort ones: each in order of coming, up to the first that
        is to wait on."""
        if self._asking:  # a held request was rejected, and others ended with it
            return
        self._asking = True
        for queue in self._held:
            waits = False
            while queue and any(view.up for view in self._views()) and not waits:
                number, request = queue.popitem(last=False)
                waits = not self._place(request)
                if waits:
                    queue.move_to_end(number, last=False)
        self._asking = False

    def _queue(self, request: Request) -> _Queue:
        return self._held[offline(request)]

    def _place_offline(self, request: Request, pool: FamilyPool) -> bool:
        """To its family, or into the pool."""
        home = pool.home(request, self._view)
        if home is not None:
            self._dispatch(request, self.replicas[home])
            return True
        pool.add(request, self.clock.now)
        self._pull_soon()
        return request.number not in pool

    def _pull_soon(self) -> None:
        """Replicas with fewer offline requests than their window get some: when all that arrives at
        this instant has, so that families are whole, and before anybody plans. One replica that is
        up alone gets them at once, since there is nothing to choose."""
        if self._pool is None or self._pulls or self._pool.puller(self._view) is None:
            return
        if len(self._view.up) == 1:
            self._pull(self._pool)
        else:
            self._pulls = True
            self.clock.process(self._pull_at_the_end_of_the_instant(self._pool))

    def _pull_at_the_end_of_the_instant(self, pool: FamilyPool):
        yield self.clock.at(self.clock.now, PLANS - 1)
        self._pulls = False
        self._pull(pool)

    def _pull(self, pool: FamilyPool) -> None:
        while (pulled := pool.pull(self._view)) is not None:
            for request in pulled[1]:
                self._dispatch(request, self.replicas[pulled[0]])

    def _return_offline(self, replica: Replica) -> None:
        """Of a replica that drains: offline requests that it has not begun go back to the pool, at
        the next step boundary."""
        table = replica.engine.core.requests
        idle = (table.state == State.WAITING) & (table.end == End.NONE) & (table.output_tokens == 0)
        for row in np.flatnonzero(idle).tolist():
            if offline(replica.requests[row]):
                replica.engine.withdraw(row, End.MOVED)

    def _nothing_left(self) -> None:
        """No event is left. Without a replica that is up or will be, what is held has failed when
        the last was down: until then others of its application were served."""
        held = [request for queue in self._held for request in queue.values()]
        if held and all(view.up for view in self._views()):
            raise NoProgressError(
                f"router {self.router.name!r} holds {len(held)} requests and nothing more "
                f"happens; the first is {held[0].id!r}"
            )
        self.over = True
        while any(self._held) or self._pool:  # what ends may send something that is held again
            since = [(r, self._held_s[r.number]) for queue in self._held for r in queue.values()]
            since.sort(key=lambda entry: entry[0].number)
            self._held, self._held_s = (OrderedDict(), OrderedDict()), {}
            if self._pool is not None:
                since += self._pool.clear()
            self._ended([(r, End.FAILED, max(since_s, self._alone_s)) for r, since_s in since])
