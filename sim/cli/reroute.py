"""`twinserve reroute`: the picks of a live router, decided again by the simulated one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Json

if TYPE_CHECKING:
    from twinserve.sim.twin.reroute import Rerouted


def reroute(
    record: Path,
    *,
    router: Annotated[str | None, Parameter(name=["--router", "-r"])] = None,
    age: float | None = None,
    interval: float | None = None,
    as_json: Json = False,
) -> None:
    """Repeat a live router's decisions with the views and the router of a simulated fleet.

    The record must give the same views and the same picks, or the command fails. The command also
    counts picks that differ if the router gets measurements as the simulator models them, by the
    age of the live router's measurements.

    For example:

    $ twinserve route --worker http://127.0.0.1:8000 --record routing.jsonl.gz
    $ twinserve reroute routing.jsonl.gz

    Args:
        record: File that `twinserve route --record` wrote.
        router: A router other than the recorded one; then picks may differ.
        age: Seconds from a simulated measurement to its arrival; by default the median of the
            polls.
        interval: Seconds between simulated measurements; by default the median of the polls.
        as_json: Print the result as JSON and nothing else.
    """
    from twinserve.backends.live.route.settings import model_of
    from twinserve.sim.fleet.routers.registry import parse_router
    from twinserve.sim.results.routing import read_routing
    from twinserve.sim.setup.config import SettingsError
    from twinserve.sim.twin.reroute import reroute as again

    for name, value in (("age", age), ("interval", interval)):
        if value is not None and not 0 <= value <= 3600:
            raise SettingsError(f"--{name} {value:g}: write seconds from 0 to 3600")
    routing = read_routing(record)
    spec = parse_router(router or routing.router)
    routers = spec.build(), spec.build()
    deaf = all(event.kind != "heard" for event in routing.events)
    if router is not None and deaf and routers[0].hears_kv_events():
        raise SettingsError(
            f"{record}: has no KV events, and router {spec.name!r} decides by them; record with a "
            "router that uses KV events, or name another router"
        )
    found = again(routing, routers, model_of(routing.profile), age, interval)
    if as_json:
        print(json.dumps(_document(found, routing.workers), indent=2))
    else:
        print(_text(found))
    if router is None and (found.other_views or found.other_choices):
        print(f"error: {record}: {found.first_other} differs", file=sys.stderr)
        sys.exit(1)


def _document(found: Rerouted, workers: list[str]) -> dict:
    from twinserve.sim.twin.reroute import AGES_S

    ends = [*AGES_S, None]
    by_age = [
        {"up_to_s": ends[i], "asked": one.picks, "other_views": one.views}
        | {"other_picks": one.choices}
        for i, one in sorted(found.modelled.items())
    ]
    return {
        "workers": workers,
        "asked": found.asked,
        "other_views": found.other_views,
        "other_picks": found.other_choices,
        "simulated_signals": {
            "age_s": found.signals.age_s,
            "interval_s": found.signals.interval_s,
            "by_age": by_age,
        },
        "picks": {side: dict(sorted(counts.items())) for side, counts in found.picks.items()},
    }


def _text(found: Rerouted) -> str:
    from twinserve.sim.twin.reroute import AGES_S

    lines = [
        f"asked {found.asked:,} times; as heard: {found.other_views:,} other views, "
        f"{found.other_choices:,} other picks",
        f"as simulated signals (age {found.signals.age_s:.3g} s, interval "
        f"{found.signals.interval_s:.3g} s):",
        f"{'age of signal':>15} {'asked':>8} {'other views':>12} {'other picks':>12}",
    ]
    ends = [f"to {end:g} s" for end in AGES_S] + [f"over {AGES_S[-1]:g} s"]
    for i, d in sorted(found.modelled.items()):
        lines.append(f"{ends[i]:>15} {d.picks:>8,} {d.views:>12,} {d.choices:>12,}")
    places = sorted({place for counts in found.picks.values() for place in counts})
    lines.append(f"{'replica':>15} " + " ".join(f"{side:>18}" for side in found.picks))
    for place in places:
        row = " ".join(f"{counts[place]:>18,}" for counts in found.picks.values())
        lines.append(f"{place:>15} {row}")
    return "\n".join(lines)
