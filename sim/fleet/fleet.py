"""Replicas and their requests: placing, withdrawing, moving, ending. Replicas come, drain and fail
while the clock runs (docs/fleet.md)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twinserve.policies.base import Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import Application, End
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.fleet.order import FleetOrder, check_same_order, order_of
from twinserve.sim.fleet.pool import Held, PulledPool, offline, return_offline
from twinserve.sim.fleet.prefix_index import KvNews, News, deliver
from twinserve.sim.fleet.recovery import Action, Loss, Recovery, needs_withdrawal
from twinserve.sim.fleet.replica import Life, Replica, Role
from twinserve.sim.fleet.request import Placement, Request, Requests
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.fleet.view import FleetView


class Fleet:
    """replicas  those up when the clock starts
    router    by default `least-requests`
    migrates  requests of a replica that fails, or has drained long enough, continue on another one
              with the tokens that their clients have; otherwise they fail
    offline_window  best-effort requests wait in the fleet, and a replica that has fewer of them
              than this pulls whole families (`FamilyPool`); None: the router places them as others
    on_ended  called with all requests that ended at one instant
    on_leaving  called with a request withdrawn from a replica, before its end there
    application  group -> facts for policies (`Policy.on_application`); None: nothing"""

    has_roles = False

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
        self.recovery = Recovery(Action.MIGRATE if migrates else Action.ERROR)
        self.losses: dict[int, Loss] = {}  # by replica that failed, in order of time
        self._unseen: dict[int, Loss] = {}  # replica -> of those that routers believe to be up
        self.on_ended: Callable[[list[Request]], None] = lambda requests: None
        self.on_leaving: Callable[[Request], None] = lambda request: None
        self.application: Callable[[int], Application | None] = lambda group: None
        self.replicas: list[Replica] = []
        self.requests = Requests(self.replicas)
        self.settles = False  # requests that completed are not held (`Requests`)
        self._announced: set[tuple[int, int]] = set()  # replica, group; only asked
        self._held = Held()
        self._news: deque[News] = deque()  # of prefix caches, on the way to the router
        self._caches: dict[int, KvNews] = {}  # by replica, of those that tell a router
        self._order: FleetOrder | None = None  # of applications, where the router stamps one
        self._ordered_by: Policy | None = None  # whose it is
        self.over = False  # no event is left: closed loops end
        self._alone_s = 0.0  # when the life of a replica changed last, and none was up
        self._asking = False
        self._view = self._view_of(self.router)
        self._pool: PulledPool | None = None
        if offline_window is not None:
            self._pool = PulledPool(
                offline_window, clock, self._view, lambda r, i: self._dispatch(r, self.replicas[i])
            )
        clock.at_end.append(self._nothing_left)
        for replica in replicas:
            self.add(replica)

    def _view_of(self, router: Router) -> FleetView:
        view = FleetView.empty(
            self.clock.now, router.signals, lambda i, at_s: self.replicas[i].engine.load(at_s)
        )
        router.view = view
        return view

    # -- what a fleet with roles has two of (`Disaggregated`) --------------------------------------
    def _side(self, replica: Replica) -> tuple[Router, FleetView]:
        """The sender of its requests, and what the sender sees."""
        return self.router, self._view

    def _views(self) -> tuple[FleetView, ...]:
        return (self._view,)

    # -- replicas ----------------------------------------------------------------------------------
    def add(self, replica: Replica, warm_up_s: float = 0.0) -> None:
        """Add a replica. Its number is the number of replicas so far. It takes requests once it has
        warmed up."""
        if replica.index != len(self.replicas):
            raise ValueError(f"{replica.label} would be number {len(self.replicas)}")
        if self.recovery.goes_on or self._pool is not None:
            needs_withdrawal(replica)
        self._needs_order(replica.engine.core.policy)
        if self._pool is not None:
            self._pool.read_texts(replica.engine.core.ledger.block_tokens)
        self.replicas.append(replica)
        ledger = replica.engine.core.ledger
        for view in self._views():
            view.add(ledger.num_blocks, ledger.block_tokens, replica.model)
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
            news = self._caches[replica.index] = KvNews(replica, router, self.clock, self._news)
            ledger.subscribe(news)
        self._ask_again()
        self._pull_soon()

    def drain(self, index: int, grace_s: float | None = None) -> None:
        """Give the replica no further requests. It goes down when it has none left. After `grace_s`
        seconds its requests move, or fail if the fleet does not migrate."""
        replica = self._replica(index)
        if replica.life in (Life.DRAINING, Life.DOWN):
            return
        if grace_s is not None:
            needs_withdrawal(replica)
        self._becomes(replica, Life.DRAINING)
        self._side(replica)[0].on_draining(index)
        if self._down_if_empty(replica):
            return
        if self._pool is not None:
            return_offline(replica)
        if grace_s is not None:
            self.clock.process(self._end_of_grace(replica, self.clock.now + grace_s))

    def _end_of_grace(self, replica: Replica, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        if replica.life is Life.DRAINING:
            table = replica.engine.core.requests
            for row in np.flatnonzero(table.end == End.NONE).tolist():  # what returns may do so
                if self.recovery.goes_on:
                    replica.engine.withdraw(row, End.MOVED)
                else:
                    self.withdraw(replica.requests[row], End.FAILED)

    def fail(self, index: int) -> None:
        """The replica dies now (`Engine.fail`), and its router learns of this after `detection_s`.
        Not to be called from events of its own engine."""
        replica = self._replica(index)
        if replica.life is Life.DOWN:
            return
        if self.clock.active_process is replica.engine.process:
            raise ValueError(
                f"{replica.label} cannot fail inside an event of its own engine; fail it from a "
                "process of the clock"
            )
        self._catch_up(index)
        replica.failed = True
        self._count_service()
        seen = replica.life is not Life.UP
        replica.becomes(Life.DOWN, self.clock.now)
        loss = self.losses[index] = Loss(replica, self.clock.now)
        late = not seen and self.recovery.detection_s > 0
        end = End.MOVED if late else self.recovery.end
        lost, left = loss.fails(end)
        if not late:
            self._missed(loss, sorted([*lost, *left]))
            return
        self._unseen[index] = loss
        self._side(replica)[1].silent_s.setdefault(index, self.clock.now)
        loss.wait(lost)
        self.clock.process(self._miss(loss, self.clock.now + self.recovery.detection_s))
        if left:
            self._rows_ended(replica, left)

    def _miss(self, loss: Loss, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        del self._unseen[loss.replica.index]
        self._missed(loss, [row for _, row in loss.unseen.values() if row is not None])

    def _missed(self, loss: Loss, rows: list[int]) -> None:
        """The router learns that a replica is down. rows: what it had."""
        replica, loss.seen_s = loss.replica, self.clock.now
        self._show(replica)
        self._side(replica)[0].on_failed(replica.index)
        never_came = [request for request, row in loss.unseen.values() if row is None]
        self._rows_ended(replica, rows, never_came)

    def _gone(self, request: Request, index: int, router: Router) -> None:
        router.on_ended(request, index)
        if self._pool is not None and offline(request):
            self._pool.left(index)

    def hear(self, index: int, heard: bool) -> None:
        """Set whether measurements and KV events of a replica reach its router."""
        silent_s = self._side(self._replica(index))[1].silent_s
        self._catch_up(index)
        if heard:
            silent_s.pop(index, None)
        else:
            silent_s.setdefault(index, self.clock.now)

    def _catch_up(self, index: int) -> None:
        if index in self._caches:
            self._caches[index].catch_up()

    def _replica(self, index: int) -> Replica:
        if not 0 <= index < len(self.replicas):
            raise ValueError(f"no replica {index}: the fleet has had {len(self.replicas)}, from 0")
        return self.replicas[index]

    def _becomes(self, replica: Replica, life: Life) -> None:
        self._count_service()
        replica.becomes(life, self.clock.now)
        self._show(replica)

    def _show(self, replica: Replica) -> None:
        """Its router sees what has become of it."""
        _, view = self._side(replica)
        view.now = self.clock.now
        view.takes[replica.index] = replica.life is Life.UP
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

    # -- one order of applications -----------------------------------------------------------------
    def _needs_order(self, policy: Policy) -> None:
        """Raise PolicyError if the router would spread an application that the policy accounts for
        as a whole."""
        order = order_of(policy, self.router)
        if order is None:
            return
        if self._ordered_by is None:
            self._ordered_by = policy
            self._order = FleetOrder(
                order, self.replicas, self._view, lambda group: self.application(group)
            )
        else:
            check_same_order(self._ordered_by, policy, len(self.replicas))

    def _count_service(self) -> None:
        """To be called before replicas, or the requests of one, change."""
        if self._order is not None:
            self._order.count(self.clock.now)

    def described(self) -> dict[str, object]:
        """Return the content for run.json. What each replica is made of is in replicas.parquet."""
        return {
            "router": self.router.name,
            "router_options": self.router.options.model_dump(mode="json"),
            "migrates": self.recovery.action is Action.MIGRATE,
            "offline_window": None if self._pool is None else self._pool.window,
        }

    # -- requests ----------------------------------------------------------------------------------
    @property
    def active(self) -> bool:
        """Return whether any request is unfinished."""
        under_way = any(any(view.in_flight) for view in self._views())
        return bool(self._held) or bool(self._pool) or under_way

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        if self._order is not None:
            self._order.arrives(request, self.clock.now, self.active)
        self.requests.append(request)
        self._place(request)

    def never_sent(self, request: Request) -> None:
        """Record a request that will not be sent, because an earlier one did not complete."""
        self.requests.append(request)
        request.end = End.NEVER_SENT

    def withdraw(self, request: Request, end: End) -> bool:
        """The client left or gave up now. The request leaves its replica at the next step boundary.
        Returns False if it had already ended."""
        if request.end is not End.NONE:
            return False
        if self._held.take(request):
            self._held.placed(request)
            self._ended([(request, end, self.clock.now)])
            return True
        if self._pool is not None and self._pool.remove(request):
            self._ended([(request, end, self.clock.now)])
            return True
        for index, loss in self._unseen.items():
            if loss.unseen.pop(request.number, None):
                router, view = self._side(loss.replica)
                view.in_flight[index] -= 1
                loss.left += 1
                self._gone(request, index, router)
                self._ended([(request, end, self.clock.now)])
                return True
        if not request.placements:  # it was sent to a dead replica alone, and ends at this instant
            return False
        replica, row, _ = request.placements[-1]
        if not replica.engine.withdraw(row, end):
            return False
        if self._order is not None:
            self._order.leaves(request, self.clock.now)
        self.on_leaving(request)
        return True

    def _place(self, request: Request) -> bool:
        """Return False if the request must wait."""
        view = self._view
        view.now = self.clock.now
        if self._pool is not None and offline(request):
            return self._pool.place(request)
        for cache in self._caches.values():
            cache.catch_up()
        if self._news:
            deliver(self._news, self.clock.now)
        choice = self._choose(request)
        if choice is Verdict.HOLD:
            self._held.hold(request, self.clock.now)
            return False
        self._held.placed(request)
        if choice is Verdict.REJECT:
            self._ended([(request, End.REJECTED, self.clock.now)])
        elif choice in range(len(self.replicas)):
            self._dispatch(request, self.replicas[choice])
        else:
            raise PolicyError(
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
        if replica.index in self._unseen:
            self._unseen[replica.index].sent(request)
            if self._pool is not None and offline(request):
                self._pool.came(replica.index)
            self._dispatched(request, replica)
            return
        if not self._may_take(replica, request):
            role = "" if replica.role is Role.SERVE else f" for {replica.role}"
            raise PolicyError(
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
        replica.requests[row] = request
        if self._pool is not None and offline(request):
            self._pool.came(replica.index)
        self._dispatched(request, replica)

    def close(self, group: int) -> None:
        """No further request of an application will be sent."""
        for replica in self.replicas:
            if (replica.index, group) in self._announced:
                self._announced.discard((replica.index, group))
                replica.engine.core.close(group)

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

    def _rows_ended(
        self, replica: Replica, rows: list[int], never_came: Sequence[Request] = ()
    ) -> None:
        """All that ended on one replica at one boundary: first they are gone, then what follows.
        never_came: that were sent there when it was dead already."""
        self._count_service()
        router, view = self._side(replica)
        view.now = self.clock.now
        index, table = replica.index, replica.engine.core.requests
        view.in_flight[index] -= len(rows) + len(never_came)
        moving: list[Request] = []
        ended: list[tuple[Request, End, float]] = []
        for row in rows:
            request, end = replica.requests[row], End(table.end[row])
            self._gone(request, index, router)
            if end is End.HANDED_OVER or end is End.MOVED and self._goes_on(request, replica, row):
                moving.append(request)
            elif end is End.MOVED:
                ended.append((request, End.FAILED, self.clock.now))
            else:
                ended.append((request, end, float(table.ended_s[row])))
        for request in never_came:
            self._gone(request, index, router)
            if self.recovery.again(request, self.losses[index]):
                moving.append(request)
            else:
                ended.append((request, End.FAILED, self.clock.now))
        self._down_if_empty(replica)
        self._again(sorted(moving, key=lambda request: request.number))
        self._ended(ended)
        self._pull_soon()

    def _goes_on(self, request: Request, replica: Replica, row: int) -> bool:
        loss = self.losses.get(replica.index)
        return self.recovery.again(request, loss if loss is not None and row in loss.rows else None)

    def _again(self, moving: list[Request]) -> None:
        """Place requests that no replica has any more. Each stays with the fleet until its turn: if
        an earlier one is rejected, its application fails, and the application's other requests
        end."""
        for request in moving:
            self._held.hold(request, self.clock.now)
        for request in moving:
            if self._held.take(request):
                self._place(request)

    def _ended(self, ends: Sequence[tuple[Request, End, float]]) -> None:
        for request, end, ended_s in ends:
            if request.end is not End.NONE:
                raise AssertionError(f"request {request.id!r} ended twice")
            request.end, request.ended_s = end, ended_s
            if self._order is not None:
                self._order.ended(request, self.clock.now)
            if self.settles and end is End.COMPLETED:
                self.requests.settle(request)
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
        for queue in self._held.queues:
            waits = False
            while queue and any(view.up for view in self._views()) and not waits:
                number, request = queue.popitem(last=False)
                waits = not self._place(request)
                if waits:
                    queue.move_to_end(number, last=False)
        self._asking = False

    def _pull_soon(self) -> None:
        if self._pool is not None:
            self._pool.pull_soon()

    def _nothing_left(self) -> None:
        """No event is left. Without a replica that is up or will be, what is held has failed when
        the last was down: until then others of its application were served."""
        held = [request for queue in self._held.queues for request in queue.values()]
        if held and all(view.up for view in self._views()):
            raise NoProgressError(
                f"router {self.router.name!r} holds {len(held)} requests and nothing more "
                f"happens; the first is {held[0].id!r}"
            )
        self.over = True
        while self._held or self._pool:  # what ends may send something that is held again
            since = self._held.clear()
            if self._pool is not None:
                since += self._pool.clear()
            self._ended([(r, End.FAILED, max(since_s, self._alone_s)) for r, since_s in since])
        for request in self.requests.unsettled():
            stays = request.placements
            if request.end is End.NONE and (not stays or stays[-1].replica.failed):
                raise AssertionError(f"request {request.id!r} waits for a replica that is dead")
