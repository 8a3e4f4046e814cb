"""`twinserve route` before servers on this machine: `twinserve study route`.

latency  what the front adds: servers that generate nothing stamp each token with the time at which
         they send it, and the same clients get their answers straight from them and through the
         front, by turns
twin     the same requests before servers and in the simulator (`twin.py`)

Servers, front and clients are a process each. docs/routers.md has the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from twinserve.backends.live.route.settings import require_libraries
from twinserve.experiments.benchmark.main import MACHINE
from twinserve.experiments.route.processes import FRONT, WORKER, Process, named
from twinserve.experiments.route.twin import beside, twin
from twinserve.experiments.study.grid import Grid, repeats
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.study.tables import Table
from twinserve.sim.setup.config import SettingsError

DIRECT = "direct"
# way of the answers -> the front's flags
WAYS = {"followed": (), "passed through": ("--no-migration",)}
ROUTER = ("--router", "least-requests")
TIMES = [f"{what}_p{percent}_ms" for what in ("first", "token") for percent in (50, 99)]


def latency(
    clients: int, way: str, seed: int, tokens: int, pace_s: float, time_s: float, servers: int = 2
) -> dict[str, float]:
    """What so many clients see, each with one request under way. tokens: of an answer, one every
    `pace_s`; time_s: of the measurement."""
    require_libraries()
    with ExitStack() as stack:

        def started(command: Sequence[str]) -> Process:
            process = Process(command)
            stack.callback(process.end)
            return process.wait()

        workers = [started([*WORKER, str(tokens), str(pace_s)]) for _ in range(servers)]
        front = None
        if way != DIRECT:
            front = started([*FRONT, *ROUTER, *WAYS[way], *named(workers)])
        urls = [one.url for one in (workers if front is None else [front])]
        return measured(urls, front, clients, tokens, pace_s, time_s)


def measured(
    urls: Sequence[str],
    process: Process | None,
    clients: int,
    tokens: int,
    pace_s: float,
    time_s: float,
) -> dict[str, float]:
    """Milliseconds, and what the process of the front computed meanwhile (share of a core)."""
    from twinserve.experiments.route.clients import load

    before = 0.0 if process is None else process.cpu_s()
    seen = asyncio.run(load(list(urls), clients, tokens, tokens * pace_s, time_s))
    if not seen.on_the_way_s:
        raise SettingsError(f"no answer ended within {time_s:g} s")
    found: dict[str, float] = {"requests": len(seen.first_s), "failed": seen.failed}
    for name, values in (("first", seen.first_s), ("token", seen.on_the_way_s)):
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
    if process is not None:
        took_s = time_s + tokens * pace_s * 2  # until the last one has ended
        found["front_cores"] = (process.cpu_s() - before) / took_s
    return found


def in_turns(scale: Scale) -> list[Point]:
    """All ways get the same moments of a busy machine."""
    grid = Grid(
        {"clients": (100, 500), "way": (DIRECT, *WAYS)},
        {"tokens": 50, "pace_s": 0.1, "time_s": 20.0},
        few={"clients": 1},
        quick={"clients": 8, "tokens": 5, "pace_s": 0.02, "time_s": 2.0},
    )
    return sorted(grid(scale), key=lambda point: (point.axes["seed"], point.axes["clients"]))


# means over repeats, and what each way has more than the direct one
ADDED = Table(
    ("clients", "way"),
    None,
    {f"+{name}": (name, "difference") for name in TIMES},
    {"way": DIRECT},
    ("clients",),
)


def twins(scale: Scale) -> list[Point]:
    few = {"requests": 24, "cap_length": 700, "kill_at_s": 3.5, "down_s": 0.5}
    return repeats(scale, **(few if scale.quick else {}))


STUDY = Study(
    "route",
    "",
    [
        MACHINE,
        Figure("latency", "What the front adds to latency", in_turns, latency, ADDED),
        Figure("twin", "Live before servers, and simulated", twins, twin, beside),
    ],
    seeds=3,
    workers=1,
    intro="Measured on this machine; its other load affects the numbers.",
)
