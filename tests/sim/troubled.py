"""Runs of a fleet in which clients leave, and replicas come, drain and fail at random; and what
must hold afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tests.sim.harness import ROW_TABLES
from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import End, State
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Life
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.options import Warmup
from twinserve.sim.setup.audit import CROWDED, Auditor, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation

TABLES = (*ROW_TABLES, "placements", "replicas")
OTHER = CROWDED.model_copy(update={"profile": "qwen2.5-14b@a100-40g:tp2", "num_blocks": 61})


class Audited(Simulation):
    """Tells who ended; audited step by step where the settings say `exact`."""

    def __init__(self, inputs: Inputs, spec: PolicySpec, **more) -> None:
        super().__init__(inputs, spec, **more)
        self.ended: list[Request] = []
        after = self.fleet.on_ended
        self.fleet.on_ended = lambda requests: (self.ended.extend(requests), after(requests))

    def add(self, description, warm_up_s=0.0):
        replica = super().add(description, warm_up_s)
        if self.inputs.config.exact:
            Auditor(replica.engine.core)
        return replica


class Troubled(Audited):
    """troubles: how many things happen. One replica in two has other hardware. more: of the
    Simulation."""

    def __init__(
        self, inputs: Inputs, spec: PolicySpec, seed: int, troubles: int, migrates: bool, **more
    ) -> None:
        mine, other = Description(inputs.hardware, spec), Description(_OTHER, spec)
        self.kinds = (mine, other)
        count = 1 + seed % 4
        super().__init__(
            inputs,
            spec,
            made_of=[self.kinds[i % 2] for i in range(count)],
            migrates=migrates,
            **more,
        )
        self.happened: list[str] = []
        rng = np.random.default_rng([seed, 11])
        self.clock.process(self._trouble(np.sort(rng.exponential(0.25, troubles)), rng))

    def _trouble(self, times, rng):
        for time in times.tolist():
            yield self.clock.at(time, BEFORE_STEPS)
            what = rng.choice(["leave", "leave", "leave", "add", "drain", "grace", "fail"])
            which, delay = rng.random(), rng.exponential(0.1)
            fleet = self.fleet
            if what == "add":
                self.add(self.kinds[len(fleet.replicas) % 2], delay * (which < 0.5))
            elif not trouble(fleet, what, which, delay):
                continue
            self.happened.append(str(what))


def trouble(fleet: Fleet, what: str, which: float, delay: float) -> bool:
    """A client leaves, or a replica fails or drains with `delay` seconds of grace. which: 0 to 1,
    of those that can. False where there is none."""
    if what == "leave":
        here = [r for r in fleet.requests if not r.leaving]
        if not here:
            return False
        assert fleet.withdraw(here[int(which * len(here))], End.DISCONNECTED)
        return True
    index = int(which * len(fleet.replicas))
    if fleet.replicas[index].life is Life.DOWN:
        return False
    if what == "fail":
        fleet.fail(index)
    else:
        fleet.drain(index, delay if what == "grace" else None)
    return True


_OTHER = resolve_hardware(OTHER)


def troubled(
    spec: PolicySpec,
    seed: int,
    troubles: int = 12,
    migrates: bool = False,
    *,
    router: type[Router] = LeastRequests,
    offline_window: int | None = None,
    warmup: Warmup | None = None,
    **settings,
) -> tuple[Troubled, RunRows]:
    """Of a crowd, as `conserving` makes it."""
    config = CROWDED.model_copy(update={"exact": True, **settings})
    inputs = Inputs(config, crowd(seed), resolve_hardware(config), (spec,), ())
    more = {"offline_window": offline_window, "warmup": warmup}

    def made(inputs: Inputs) -> Troubled:
        return Troubled(inputs, spec, seed, troubles, migrates, router=router(), **more)

    return conserving(made, inputs)


Run = TypeVar("Run", bound=Audited)


def conserving(
    make: Callable[[Inputs], Run], inputs: Inputs, tables: Sequence[str] = TABLES
) -> tuple[Run, RunRows]:
    """A run, audited step by step, that kept everything that a fleet promises; taken several steps
    at once it gave the same rows."""
    at_once = replace(inputs, config=inputs.config.model_copy(update={"exact": False}))
    run, fast = make(inputs), make(at_once)
    run.run()
    fast.run()
    rows = run.rows()
    conserved(run, rows)
    for table in tables:
        same = getattr(rows, table).equals(getattr(fast.rows(), table))
        assert same, f"{table}: steps taken at once gave other rows"
    return run, rows


def conserved(run: Audited, rows: RunRows) -> None:
    fleet, requests, stays = run.fleet, rows.requests, rows.placements
    # every request ends exactly once
    sent = [request for request in fleet.requests if request.end is not End.NEVER_SENT]
    assert len(run.ended) == len({request.number for request in run.ended}) == len(sent)
    assert all(request.end not in (End.NONE, End.MOVED) for request in fleet.requests)
    assert len(requests) == len(sent) and not fleet.active
    assert requests["outcome"].notna().all() and requests["ended_s"].notna().all()
    # with all its tokens if it completed
    for request in sent:
        assert 0 <= request.emitted_tokens <= request.output_tokens
        if request.end is End.COMPLETED:
            assert request.emitted_tokens == request.output_tokens
        ends = [End(p.replica.engine.core.requests.end[p.row]) for p in request.placements]
        goes_on = (End.MOVED, End.HANDED_OVER)
        assert all(end in goes_on for end in ends[:-1])
        if ends:  # one of these: it ended while the fleet held it
            assert ends[-1] in (request.end, *goes_on)
    # what its placements emitted is what it has or what was thrown away, each token after the first
    # of an attempt with one gap
    emitted = stays.groupby("request_id")["output_tokens"].sum()
    whole = {r.id: r.emitted_tokens + r.discarded_tokens for r in sent if r.placements}
    assert emitted.to_dict() == whole
    before = {(r.number, n): p.before_tokens for r in sent for n, p in enumerate(r.placements)}
    keys = zip(stays["request"], stays["placement"], strict=True)
    first = np.array([not before[key] for key in keys], bool) & (stays["output_tokens"] > 0)
    gaps, later = rows.gaps["count"].sum(), stays["output_tokens"].sum() - first.sum()
    # tokens that one step gives come together
    assert gaps == later if run.inputs.config.speculate is None else 0 < gaps <= later
    for replica in fleet.replicas:
        core, down = replica.engine.core, replica.since_s.get(Life.DOWN, np.inf)
        table = core.requests
        # nobody waits for a replica that is down, and nobody was sent to one
        assert (table.state == State.FINISHED).all() and not core.active and not core.holding
        assert (table.placed_s >= replica.since_s.get(Life.UP, np.inf)).all()
        assert (table.placed_s < down).all() or not len(table)
        assert (table.ended_s <= down).all()
        # what each port was charged with has landed, or was lost with the replica
        for port in (replica.engine.backend.link.to_host, replica.engine.backend.link.to_device):
            port.settle(np.inf)
            assert port.queued_bytes == port.landed_bytes + port.lost_bytes
            assert replica.failed or not port.lost_bytes
        assert not core.kept or replica.failed
        if not replica.failed:
            core.ledger.begin_step()  # a layer that moved out gives its room to the next plan
            core.ledger.check()
            usage = core.ledger.usage()
            assert usage.free == core.ledger.num_blocks and usage.host_tokens == 0
