"""A fleet whose prompts are computed by replicas of their own: hand-over by a pull connector with
vLLM's semantics (docs/fleet.md#prefill-apart-from-decode).

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (delayed free, failed loads),
`distributed/kv_transfer/kv_connector/v1/nixl` (`pull_scheduler.py`, `base_scheduler.py`,
`base_worker.py`: leases and heartbeats).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinserve.backends.ports import Transfer, send
from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.leases import Heartbeats, Lease
from twinserve.sim.fleet.local_prefill import LocalPrefill, NoneLocal
from twinserve.sim.fleet.replica import Life, Network, Replica, Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.prefixes import Prefixes
from twinserve.sim.fleet.view import FleetView


@dataclass(frozen=True)
class Connector:
    """lease_s    how long a prefill replica keeps what nobody fetches (`kv_lease_duration`)
    recompute  a request whose KV cannot be fetched computes it, and does not fail
               (`kv_load_failure_policy`)
    rule       which prompts are computed where they are decoded
    """

    lease_s: float = 30.0
    recompute: bool = False
    rule: LocalPrefill = field(default_factory=NoneLocal)

    @property
    def heartbeat_s(self) -> float:
        """How often a decode replica asks to keep what it will fetch."""
        return self.lease_s / 6

    @property
    def extension_s(self) -> float:
        """How long that is kept from then on, at least."""
        return self.lease_s * 2 / 3


@dataclass(slots=True, eq=False)
class Kept:
    """The KV of a prompt, on the replica that computed it.

    lease       while it is not fetched
    released_s  when its memory was given back; NaN: it has not been, or was lost
    expired     by the lease
    """

    replica: Replica
    row: int
    lease: Lease
    released_s: float = math.nan
    expired: bool = False
    lost: bool = False  # its replica failed

    @property
    def there(self) -> bool:
        return math.isnan(self.released_s) and not self.lost


@dataclass(slots=True, eq=False)
class Load:
    """A decode replica's fetch of a prompt's KV. tokens: of whole blocks. end_s: when it had come,
    or was known to have failed; NaN: neither."""

    kept: Kept
    replica: Replica
    row: int
    begin_s: float
    tokens: int
    end_s: float = math.nan
    whole: bool = False
    transfer: Transfer | None = None


class Disaggregated(Fleet):
    """router, prefill_router  of decode and of prefill replicas; two objects
    loads  by (replica, row): what was fetched for it; kept: the same of what was kept
    came_for_kv  (replica, row) of requests that came to be decoded, with their KV elsewhere
    """

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
            "connector": {
                "transfer": "pull",
                "lease_s": connector.lease_s,
                "load_failures": "recompute" if connector.recompute else "fail",
            },
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
                f"{replica.label} has the role {replica.role}; in a fleet with prefill apart from "
                "decode each has one of these two"
            )
        if replica.network is None:
            raise PolicyError(f"{replica.label} has no network to hand KV over; give it one")
        if not ledger.hands_over:
            raise PolicyError(
                f"the {ledger.name} ledger hands no KV over to other replicas; use kv=paged on both"
            )
        if policy.orders_applications:
            raise PolicyError(
                f"policy {policy.name!r} accounts for applications as a whole, and would see parts "
                "of each where prefill is apart from decode; use another, or role aggregated"
            )
        if not policy.withdraws():
            raise PolicyError(
                f"policy {policy.name!r} has no on_withdraw: a load that fails could not end its "
                "request; add the method, or use another policy"
            )
        for other in self.replicas[:1]:
            size = other.engine.core.ledger.block_tokens
            if size != ledger.block_tokens:
                raise PolicyError(
                    f"{replica.label} has blocks of {ledger.block_tokens} tokens, {other.label} of "
                    f"{size}; KV is handed over between blocks of one size"
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
        else:
            self._cached.gone(index)

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
            self.came_for_kv.add((replica.index, len(replica.requests)))
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
                self._stop_tracking(replica, row)
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
        kept = Kept(replica, row, lease)
        self._kept_at[replica.index][row] = self.kept[replica.index, row] = kept
        if handed_over:  # else its client left as the prompt ended: nobody asks for the KV
            self._to_fetch[request.number] = kept
        return [kept]

    def _stop_tracking(self, replica: Replica, row: int) -> None:
        """A request ended on a decode replica, or leaves it."""
        load = self.loads.get((replica.index, row))
        kept = self._to_fetch.pop(replica.requests[row].number, None) if load is None else load.kept
        if kept is None:
            return
        down = replica.life is Life.DOWN
        if down or load is None:  # else when the load has ended
            kept.lease.let_go(replica.since_s[Life.DOWN] if down else self.clock.now)
        if not kept.there:
            return
        if down:
            self._under_way.pop(kept, None)
            self.clock.process(self._watch(kept))  # it renews the lease no more
        elif load is None:
            self._release(kept)  # the connector says that nobody will fetch it

    def _watch(self, kept: Kept):
        """Of a lease that nobody renews, unless a heartbeat comes in time."""
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
            if load is not None:
                self._failed(load)

    # -- loads -------------------------------------------------------------------------------------
    def _fetch(self, replica: Replica, row: int) -> float:
        """A decode replica begins to fetch the KV of a row; when it lands (seconds). One that finds
        nothing knows it as soon as it has asked."""
        now, core = self.clock.now, replica.engine.core
        kept = self._to_fetch.pop(replica.requests[row].number)
        size, table = core.ledger.block_tokens, core.requests
        tokens = int(table.known_tokens(row) - table.computed_tokens[row])
        load = Load(kept, replica, row, now, -(-tokens // size) * size)
        self.loads[replica.index, row] = load
        ports = _path(kept.replica.network, replica.network)
        if kept.there:
            bytes_ = load.tokens * core.policy.limits.kv_bytes_per_token
            load.transfer = send(ports, now, bytes_)
            self._under_way[kept] = load
            lands_s = load.transfer.lands_s
        else:
            lands_s = now + sum(port.latency_s for port in ports)
        self.clock.process(self._land(load, lands_s))
        return lands_s

    def _land(self, load: Load, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        load.kept.lease.let_go(self.clock.now)
        if load.transfer is None:
            self._failed(load)
        elif self._under_way.pop(load.kept, None) is load:
            load.end_s, load.whole = self.clock.now, True
            if load.kept.there:  # else its lease ran out, and vLLM frees what is being read
                self._release(load.kept)
            load.replica.engine.landed(load.row, True)

    def _failed(self, load: Load) -> None:
        load.end_s = self.clock.now
        load.kept.lease.let_go(self.clock.now)
        load.replica.engine.landed(load.row, False)
        request = load.replica.requests[load.row]
        here = request.placements[-1][:2] == (load.replica, load.row)
        if here and not self.connector.recompute:
            self.withdraw(request, End.FAILED)


def _path(source: Network | None, target: Network | None):
    assert source is not None and target is not None  # `_check`
    return source.out, target.into
