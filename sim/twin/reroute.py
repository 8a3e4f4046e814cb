"""A live routing decided again by the simulated fleet's router: the same views, the same picks?

The record of a live front (`twinserve.sim.results.routing`) is fed to two routers, each with a view
as the simulated fleet makes it. The first hears each poll when it came. It must see what the live
router saw, and say what that said. The second gets polls as simulated signals are: of multiples of
an interval, and of one age. Where its views or picks part, the age of what the live router knew
says why. Both hear of the live router's picks as their own, so that one pick is judged at a time.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict, chosen_without
from twinserve.sim.fleet.view import FleetView, Signals
from twinserve.sim.results.recorder import Load
from twinserve.sim.results.routing import Event, Routing, fields_of, load_of

AGES_S = (0.05, 0.1, 0.25, 0.5, 1.0)  # upper ends; what is older is of one more class
_Loads = dict[int, list[Load]]


@dataclass
class Differences:
    """Picks by the age of the oldest measurement that the live router saw then (seconds)."""

    picks: int = 0
    views: int = 0  # in which another load stood
    choices: int = 0  # of another replica, or verdict


@dataclass
class Rerouted:
    """asked       how often the live router was
    other_views, other_choices  of the router that hears what the live one did: 0 where all is well
    first_other   what differed first; empty: nothing
    modelled      by class of age (an index of `AGES_S`, or their number), of simulated signals
    signals       those
    picks         by replica, or verdict: live, again, with simulated signals
    ttft_s        live, from a request's arrival to its first token
    """

    asked: int = 0
    other_views: int = 0
    other_choices: int = 0
    first_other: str = ""
    signals: Signals = field(default_factory=Signals)
    modelled: dict[int, Differences] = field(default_factory=dict)
    picks: dict[str, Counter[str]] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)


class _AsHeard(FleetView):
    """What has been measured is as old as the last poll that came."""

    def measured_s(self, replica: int) -> float:
        return self.snapshot(replica, self.now).at_s


class _Side:
    """A router of the simulated fleet, and its inputs. loads: by replica, in order of polls."""

    def __init__(
        self, router: Router, view: FleetView, loads: _Loads, model: StepTimeModel | None
    ) -> None:
        self.router, self.view, self._model = router, view, model
        self.loads = loads
        router.view = view

    def hear(self, event: Event, requests: dict[int, Request]) -> None:
        view, router, told = self.view, self.router, event.fields
        if event.kind not in ("measured", "forgotten"):
            view.now = event.at_s
        if event.kind == "came":
            view.add(told["num_blocks"], told["block_tokens"], self._model)
            view.takes[told["replica"]] = True
            view.up.append(told["replica"])
            router.on_came(told["replica"])
        elif event.kind == "failed":
            view.takes[told["replica"]] = False
            view.up.remove(told["replica"])
            router.on_failed(told["replica"])
        elif event.kind == "heard":
            hear = router.on_stored if told["stored"] else router.on_removed
            if router.hears_kv_events():
                hear(told["replica"], np.array(told["contents"], np.int64))
        elif event.kind == "sent":
            view.in_flight[told["replica"]] += 1
            router.on_dispatched(requests[told["number"]], told["replica"])
        elif event.kind == "first token":
            router.on_first_token(requests[told["number"]], told["replica"])
        elif event.kind == "ended":
            view.in_flight[told["replica"]] -= 1
            router.on_ended(requests[told["number"]], told["replica"])
        elif event.kind == "forgotten":
            router.on_forgotten(told["affinity"])

    def choose(self, event: Event, request: Request) -> int | str:
        self.view.now = event.at_s
        choice = chosen_without(self.router, request, self.view, event.fields["avoided"])
        return choice.name if isinstance(choice, Verdict) else int(choice)

    def seen(self) -> list[tuple]:
        view = self.view
        return [(i, view.in_flight[i], fields_of(view.load(i))) for i in view.up]


def reroute(
    record: Routing,
    routers: tuple[Router, Router],
    model: StepTimeModel | None = None,
    age_s: float | None = None,
    interval_s: float | None = None,
) -> Rerouted:
    """routers: two new ones of one kind. model: what they know of step times. age_s, interval_s: of
    simulated signals; None: as old as polls were when they came, and as far apart, at the median.
    """
    all_loads = _loads_of(record.events)
    age, gap = _polled(record.events)
    signals = Signals(age if age_s is None else age_s, gap if interval_s is None else interval_s)
    heard: _Loads = {}
    again = _Side(routers[0], _AsHeard(0.0, [], [], [], Signals(), _last(heard)), heard, model)
    view = FleetView.empty(0.0, signals, _latest(all_loads))
    modelled = _Side(routers[1], view, all_loads, model)
    found = Rerouted(signals=signals)
    live: Counter[str] = Counter()
    found.picks = {"live": live, "again": Counter(), "simulated signals": Counter()}
    requests: dict[int, Request] = {}
    for event in record.events:
        told = event.fields
        if event.kind == "request":
            _take_request(event, requests)
        elif event.kind == "asked":
            _same_draws(again.router, modelled.router)
            sides = again, modelled
            _judge(found, event, requests[told["number"]], sides)
        else:
            if event.kind in ("came", "measured"):
                heard.setdefault(told["replica"], []).append(load_of(told["load"]))
            for side in (again, modelled):
                side.hear(event, requests)
            if event.kind == "first token":
                found.ttft_s.append(event.at_s - requests[told["number"]].arrival_s)
    return found


def _judge(found: Rerouted, event: Event, request: Request, sides: tuple[_Side, _Side]) -> None:
    again, modelled = sides
    told = event.fields
    live, view = told["choice"], told["view"]
    found.asked += 1
    first, second = again.choose(event, request), modelled.choose(event, request)
    for counts, choice in zip(found.picks.values(), (live, first, second), strict=True):
        counts[str(choice)] += 1
    if again.seen() != view:
        found.other_views += 1
        found.first_other = found.first_other or f"the view at {event.at_s:g} s"
    if first != live:
        found.other_choices += 1
        found.first_other = (
            found.first_other or f"the pick at {event.at_s:g} s: {first}, not {live}"
        )
    age_s = max(event.at_s - load[0] for _, _, load in view)
    differences = found.modelled.setdefault(bisect_right(AGES_S, age_s), Differences())
    differences.picks += 1
    differences.views += _without_times(modelled.seen()) != _without_times(view)
    differences.choices += second != live


def _without_times(view: Sequence[Sequence[Any]]) -> list:
    return [[replica, in_flight, load[1:]] for replica, in_flight, load in view]


def _take_request(event: Event, requests: dict[int, Request]) -> None:
    """A second line of one request has blocks of another size, too."""
    told = event.fields
    blocks = {int(size): np.array(names, np.int64) for size, names in told["contents"].items()}
    known = requests.get(told["number"])
    if known is not None:
        known.contents = blocks.get
        return
    nan = float("nan")
    values = {name: nan if value is None else value for name, value in told["values"].items()}
    requests[told["number"]] = Request(
        told["id"],
        0,
        event.at_s,
        values,
        blocks.get,
        told["group"],
        told["affinity"],
        number=told["number"],
    )


def _same_draws(one: Router, other: Router) -> None:
    """Draws are no difference: a router that draws among equals goes on with the other's."""
    theirs, ours = vars(one).get("_rng"), vars(other).get("_rng")
    if isinstance(theirs, np.random.Generator) and isinstance(ours, np.random.Generator):
        ours.bit_generator.state = theirs.bit_generator.state


def _loads_of(events: list[Event]) -> _Loads:
    found: _Loads = {}
    for event in events:
        if event.kind in ("came", "measured"):
            found.setdefault(event.fields["replica"], []).append(load_of(event.fields["load"]))
    return found


def _last(loads: _Loads):
    return lambda replica, at_s: loads[replica][-1]


def _latest(loads: _Loads):
    """As it was measured at that time, or before; a replica's first if nothing was."""

    def load(replica: int, at_s: float) -> Load:
        polls = loads[replica]
        return polls[max(bisect_right(polls, at_s, key=lambda one: one.at_s) - 1, 0)]

    return load


def _polled(events: list[Event]) -> tuple[float, float]:
    """How old polls were when they came, and how far apart: medians, seconds."""
    ages, gaps, before = [], [], {}
    for event in events:
        if event.kind == "measured":
            replica, at_s = event.fields["replica"], float(event.fields["load"][0])
            ages.append(event.at_s - at_s)
            if replica in before:
                gaps.append(at_s - before[replica])
            before[replica] = at_s
    return (median(ages) if ages else 0.0), (median(gaps) if gaps else 0.0)
