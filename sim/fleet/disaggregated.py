"""A fleet whose prompts are computed by replicas of their own: hand-over by a connector with vLLM's
semantics (docs/fleet.md#prefill-apart-from-decode).

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (delayed free, failed loads),
`distributed/kv_transfer/kv_connector/v1/nixl` (`pull_scheduler.py`, `push_scheduler.py`,
`push_worker.py`, `base_scheduler.py`, `base_worker.py`: leases and heartbeats).
"""

import math
from collections.abc import Sequence
from typing import Any

from twinserve.backends.ports import send
from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.fleet.connector import (
    FREED,
    Connector,
    Freed,
    Gone,
    Heartbeats,
    Kept,
    Lease,
    Load,
    Stage,
    path,
)
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Life, Replica, Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.prefixes import Prefixes
from twinserve.sim.fleet.view import FleetView


class Disaggregated(Fleet):
    """router, prefill_router  of decode and of prefill replicas; two objects
    loads  by (replica, row): what was fetched for it; kept: the same of what was kept
    came_for_kv  (replica, row) of requests that came to be decoded, with their KV elsewhere
    """

    has_roles = True

    def __init__(
        self,
        clock: Clock,
        router: Router,
        prefill_router: Router,
        connector: Connector,
        migrates: bool = False,
    ) -> None:
        self.connector = connector
        self.rule = connector.rule
        self.prefill_router = prefill_router
        self.loads: dict[tuple[int, int], Load] = {}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.came_for_kv: set[tuple[int, int]] = set()
        self._kept_at: dict[int, dict[int, Kept]] = {}  # replica -> row
        self._to_fetch: dict[int, Kept] = {}  # request -> what waits for it
        self._under_way: dict[Kept, Load] = {}
        self._reserved: dict[int, int] = {}  # request -> decode replica, which counts it
        self._counted: set[int] = set()  # requests whose decode replica does so already
        self._beats: dict[int, Heartbeats] = {}  # of decode replicas
        self._closed: set[int] = set()  # replicas that drained long enough
        self._cached = Prefixes(exact=False)  # of decode replicas, by what they were sent
        router.stage, prefill_router.stage = Role.DECODE, Role.PREFILL
        super().__init__(clock, (), router, migrates)
        self._prefill_view = self._view_of(prefill_router)

    def _side(self, replica: Replica) -> tuple[Router, FleetView]:
        if replica.prefills:
            return self.prefill_router, self._prefill_view
        return self.router, self._view

    def _views(self) -> tuple[FleetView, ...]:
        return self._prefill_view, self._view

    def described(self) -> dict[str, object]:
        prefill, rule, connector = self.prefill_router, self.rule, self.connector
        return super().described() | {
            "prefill_router": prefill.name,
            "prefill_router_options": prefill.options.model_dump(mode="json"),
            "local_prefill": rule.name,
            "local_prefill_options": rule.options.model_dump(mode="json"),
            "connector": connector.described(),
        }

    # -- replicas ----------------------------------------------------------------------------------
    def add(self, replica: Replica, warm_up_s: float = 0.0) -> None:
        self._check(replica)
        engine = replica.engine
        if replica.prefills:
            engine.core.hands_over = True
            self._kept_at[replica.index] = {}
        else:
            engine.fetch = lambda row: self._fetch(replica, row)
            self._beats[replica.index] = Heartbeats(self.connector.heartbeat_s)
        super().add(replica, warm_up_s)

    def _check(self, replica: Replica) -> None:
        """Raises PolicyError for what cannot take part in a hand-over."""
        core = replica.engine.core
        policy, ledger = core.policy, core.ledger
        if replica.role not in (Role.PREFILL, Role.DECODE):
            raise PolicyError(
                f"{replica.label} has the role {replica.role}; give each replica of this fleet the "
                "role prefill or decode"
            )
        if replica.network is None:
            raise PolicyError(f"{replica.label} has no network to hand KV over; give it one")
        if not ledger.hands_over:
            raise PolicyError(
                f"the {ledger.name} ledger hands no KV over to other replicas; use kv=paged on both"
            )
        if policy.traits.orders_applications:
            raise PolicyError(
                f"policy {policy.name!r} accounts for applications as a whole, and replicas of "
                "prefill or decode see parts of each; use another, or role aggregated"
            )
        if not policy.withdraws():
            raise PolicyError(
                f"policy {policy.name!r} has no on_withdraw, so a failed load cannot end its "
                "request; add the method, or use another policy"
            )
        for other in self.replicas[:1]:
            size = other.engine.core.ledger.block_tokens
            if size != ledger.block_tokens:
                raise PolicyError(
                    f"{replica.label} has blocks of {ledger.block_tokens} tokens, {other.label} of "
                    f"{size}; give all replicas blocks of one size"
                )

    def _up(self, replica: Replica) -> None:
        if not replica.prefills:
            self._cached.came(replica.index, self._view)
        super()._up(replica)

    def fail(self, index: int) -> None:
        replica = self._replica(index)
        if replica.life is Life.DOWN:
            return
        super().fail(index)
        if replica.network is not None:
            replica.network.lose(self.clock.now)
        if replica.prefills:
            self._lose_kept(index)
            return
        self._cached.gone(index)
        for kept in [kept for here in self._kept_at.values() for kept in here.values()]:
            load = self._under_way.get(kept)
            if kept.lease.renewed_by(self._beats[index]) or load and load.replica is replica:
                self._unwanted(kept, Gone.DIED)

    def _end_of_grace(self, replica: Replica, due: float):
        yield from super()._end_of_grace(replica, due)
        self._closed.add(replica.index)

    def _busy(self, replica: Replica) -> bool:
        return super()._busy(replica) or bool(self._kept_at.get(replica.index))

    # -- where a request goes ----------------------------------------------------------------------
    def _choose(self, request: Request) -> int | Verdict:
        self._prefill_view.now = self.clock.now
        if request.number in self._to_fetch:
            return self._choose_decode(request)
        decode, prefill = self._view, self._prefill_view
        if not decode.up:
            return Verdict.HOLD
        if self.router.sheds(request, decode):
            return Verdict.REJECT
        if not prefill.up:
            return self.router.place(request, Role.DECODE, decode)
        if self.prefill_router.sheds(request, prefill):
            return Verdict.REJECT
        chosen: int | Verdict = Verdict.HOLD
        both = self.router.chooses_both
        if self.rule.asks or both:
            chosen = self.router.place(request, Role.DECODE, decode)
            if isinstance(chosen, Verdict) or self.rule.asks and self._is_local(request, chosen):
                return chosen
        place = self.prefill_router.place(request, Role.PREFILL, prefill)
        if (self.rule.reserves or both) and not isinstance(place, Verdict):
            self._reserve(request, chosen)
        return place

    def _is_local(self, request: Request, decode: int) -> bool:
        size = self._view.block_tokens[decode]
        cached = self._cached.matched_at(request, decode, self._view) * size
        prefill = self._prefill_view
        least = min(prefill.in_flight[i] for i in prefill.up)
        return self.rule.local(request.prompt_tokens, cached, least)

    def _choose_decode(self, request: Request) -> int | Verdict:
        """Of a request whose prompt has been computed."""
        reserved = self._reserved.get(request.number)
        if reserved is not None:
            replica = self.replicas[reserved]
            if self._may_take(replica, request):
                del self._reserved[request.number]
                self._counted.add(request.number)
                return reserved
            self._unreserve(request)
        if not self._view.up:
            return Verdict.HOLD
        return self.router.place(request, Role.DECODE, self._view)

    def _reserve(self, request: Request, chosen: Any) -> None:
        self._reserved[request.number] = chosen
        super()._dispatched(request, self.replicas[chosen])

    def _unreserve(self, request: Request) -> None:
        """Where it has a decode replica, that one will not get it."""
        reserved = self._reserved.pop(request.number, None)
        if reserved is not None:
            self._view.in_flight[reserved] -= 1
            self.router.on_ended(request, reserved)
            self._down_if_empty(self.replicas[reserved])

    def _ended(self, ends: Sequence[tuple[Request, End, float]]) -> None:
        for request, _, _ in ends:
            self._unreserve(request)  # it may have ended while the fleet had it
        super()._ended(ends)

    def _may_take(self, replica: Replica, request: Request) -> bool:
        """One that drains finishes what was reserved there. A prompt is computed once while its KV
        is kept."""
        if replica.prefills and request.number in self._to_fetch:
            return False
        if replica.life is Life.UP:
            return True
        known = self._reserved.get(request.number) == replica.index
        known |= request.number in self._counted
        return known and replica.life is Life.DRAINING and replica.index not in self._closed

    def _submit_to(self, replica: Replica, request: Request) -> int:
        columns = request.columns(self.clock.now)
        known = request.prompt_tokens + request.emitted_tokens
        if replica.prefills:  # what its client has is part of the prompt
            for name in ("output_tokens", "first_token_s", "last_token_s", "late_tokens"):
                columns.pop(name, None)
            return self._submit_row(replica, request, 1, columns | {"prompt_tokens": known})
        kept = self._to_fetch.get(request.number)
        if kept is not None:
            columns["remote_tokens"] = known
            kept.lease.track(self._beats[replica.index], self.clock.now)
            self.came_for_kv.add((replica.index, len(replica.engine.core.requests)))
        return self._submit_row(replica, request, request.output_tokens, columns)

    def _dispatched(self, request: Request, replica: Replica) -> None:
        if not replica.prefills:
            self._cached.dispatched(request, replica.index, self._view)
        if request.number in self._counted:
            self._counted.remove(request.number)
        else:
            super()._dispatched(request, replica)

    # -- hand-over ---------------------------------------------------------------------------------
    def _rows_ended(
        self, replica: Replica, rows: list[int], never_came: Sequence[Request] = ()
    ) -> None:
        fresh = []
        for request in never_came:
            self._unreserve(request)
        for row in rows:
            if replica.prefills:
                fresh += self._prompt_ended(replica, row)
            else:
                self._left(replica, row)
        super()._rows_ended(replica, rows, never_came)
        for kept in fresh:
            if kept.there and not kept.lease.tracked:
                self.clock.process(self._watch(kept))

    def _prompt_ended(self, replica: Replica, row: int) -> list[Kept]:
        """What is kept of it, if anything."""
        core, request = replica.engine.core, replica.requests[row]
        handed_over = core.requests.end[row] == End.HANDED_OVER
        if not handed_over:
            self._unreserve(request)
        if row not in core.kept or replica.life is Life.DOWN:
            return []
        connector = self.connector
        lease = Lease(self.clock.now + connector.lease_s, connector.extension_s)
        kept = Kept(replica, row, lease, self.clock.now)
        self._kept_at[replica.index][row] = self.kept[replica.index, row] = kept
        if handed_over:  # else its client left as the prompt ended: the KV is not asked for
            self._to_fetch[request.number] = kept
        return [kept]

    def _left(self, replica: Replica, row: int) -> None:
        """A request ended on a decode replica, or leaves it. What it waited for on one that is dead
        not renewed since (`fail`)."""
        load = self.loads.get((replica.index, row))
        kept = self._to_fetch.pop(replica.requests[row].number, None) if load is None else load.kept
        if kept is not None and not replica.failed:
            self._unwanted(kept, Gone.LEFT)

    def _unwanted(self, kept: Kept, why: Gone) -> None:
        """Give its memory back as `FREED` has it."""
        kept.lease.let_go(self.clock.now)
        if not kept.there:
            return
        load, push = self._under_way.get(kept), self.connector.push is not None
        stage = Stage.AWAITED if load is None else load.stage
        freed = FREED[why, stage][push]
        if freed is Freed.AT_ONCE:
            self._release(kept)
            return
        if freed is Freed.LEASE:
            self._under_way.pop(kept, None)
        self.clock.process(self._watch(kept))

    def _watch(self, kept: Kept):
        """Of a lease that is not renewed, unless a heartbeat comes in time."""
        yield self.clock.at(max(kept.lease.expires_s, self.clock.now), BEFORE_STEPS)
        if kept.there and kept.lease.renew(self.clock.now) <= self.clock.now:
            kept.expired = True
            self._release(kept)

    def _release(self, kept: Kept) -> None:
        kept.released_s = self.clock.now
        del self._kept_at[kept.replica.index][kept.row]
        kept.replica.engine.release(kept.row)
        self._down_if_empty(kept.replica)

    def _lose_kept(self, index: int) -> None:
        """A prefill replica failed, and what it kept with it."""
        lost, self._kept_at[index] = list(self._kept_at[index].values()), {}
        for kept in lost:
            kept.lost = True
        for kept in lost:
            load = self._under_way.pop(kept, None)
            if load is None:
                continue
            if self.connector.push is None:
                self._failed(load)
            else:
                self._wait_in_vain(load)

    # -- loads -------------------------------------------------------------------------------------
    def _fetch(self, replica: Replica, row: int) -> float:
        """A decode replica has room for the KV of a row, and asks for it; when it lands (seconds),
        infinite while it is unknown. A read that finds nothing is known as soon as it has
        asked."""
        now, core = self.clock.now, replica.engine.core
        kept = self._to_fetch.pop(replica.requests[row].number)
        size, table = core.ledger.block_tokens, core.requests
        tokens = int(table.known_tokens(row) - table.computed_tokens[row])
        load = Load(kept, replica, row, now, -(-tokens // size) * size)
        self.loads[replica.index, row] = self._under_way[kept] = load
        heard_s = now + sum(port.latency_s for port in path(load))
        if self.connector.push is not None:
            self.clock.process(self._registered(load, heard_s))
            return math.inf
        lands_s = self._send(load) if kept.there else heard_s
        self.clock.process(self._land(load, lands_s))
        return lands_s

    def _send(self, load: Load) -> float:
        """Its bytes queue at both ports now; when they land (seconds)."""
        bytes_ = load.tokens * load.replica.engine.core.policy.limits.kv_bytes_per_token
        load.transfer = send(path(load), self.clock.now, bytes_)
        return load.transfer.lands_s

    def _registered(self, load: Load, heard_s: float):
        """Push: the prefill replica hears which blocks the KV goes to, sees it when it looks next,
        and writes. A decode replica that failed meanwhile takes no write."""
        push = self.connector.push
        assert push is not None
        yield self.clock.at(push.seen_s(load.kept.since_s, heard_s), BEFORE_STEPS)
        if load.kept not in self._under_way:
            return  # one of the two failed meanwhile
        if load.kept.there:
            yield from self._land(load, self._send(load))
        else:
            del self._under_way[load.kept]
            self._wait_in_vain(load)

    def _wait_in_vain(self, load: Load) -> None:
        """Push: no write comes, and no word of it."""
        push = self.connector.push
        assert push is not None
        self.clock.process(self._give_up(load, load.begin_s + push.timeout_s))

    def _give_up(self, load: Load, due: float):
        yield self.clock.at(max(due, self.clock.now), BEFORE_STEPS)
        self._failed(load)

    def _land(self, load: Load, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        if self._under_way.pop(load.kept, None) is None or load.replica.failed:
            return  # one of the two failed meanwhile
        if load.transfer is None:
            self._failed(load)
            return
        load.end_s, load.whole = self.clock.now, True
        load.kept.lease.let_go(load.end_s)
        if load.kept.there:  # else its lease ran out, and vLLM frees what is being read
            self._release(load.kept)
        load.replica.engine.landed(load.row, True)

    def _failed(self, load: Load) -> None:
        replica, row = load.replica, load.row
        if replica.failed:
            return  # whether its router knows or not: nothing is known there any more
        load.end_s = self.clock.now
        load.kept.lease.let_go(load.end_s)
        replica.engine.landed(row, False)
        goes_on = replica.engine.core.requests.end[row] != End.NONE  # elsewhere, or has ended
        if not goes_on and not self.connector.recompute:
            self.withdraw(replica.requests[row], End.FAILED)
