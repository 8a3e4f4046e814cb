"""What `twinserve route` adds to the latency of answers: `python -m twinserve.experiments.route`.

Servers that generate nothing stamp each token with the time at which they send it. The same clients
get their answers straight from them and through the front, by turns; the difference is the
front's. Servers, front and clients are a process each. docs/routers.md has the results.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import cyclopts
import numpy as np
import pandas as pd

from twinserve.backends.live.route.settings import require_libraries, router_of
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines
from twinserve.experiments.route.processes import FRONT, WORKER, Process, named
from twinserve.experiments.route.soak import soak
from twinserve.experiments.route.twin import twin
from twinserve.formats import whole_file
from twinserve.sim.cli.main import run_app
from twinserve.sim.setup.config import SettingsError

MODES: dict[str, tuple[str, ...]] = {"followed": (), "passed through": ("--no-migration",)}


def route(
    *,
    clients: tuple[int, ...] = (100, 500),
    tokens: int = 50,
    pace: float = 0.1,
    seconds: float = 20.0,
    repeats: int = 3,
    workers: int = 2,
    router: str = "least-requests",
    out: Path | None = None,
) -> None:
    """Latency that the front adds, at the median and the 99th percentile.

    Parameters
    ----------
    clients: tuple[int]
        Concurrent clients, each with one request under way.
    tokens: int
        Of an answer.
    pace: float
        Seconds between two tokens.
    seconds: float
        Length of a measurement.
    repeats: int
        Measurements of each kind, by turns.
    workers: int
        Servers.
    router: str
        As for twinserve route.
    out: Path
        CSV file for all measurements.
    """
    require_libraries()
    if min(tokens, repeats, workers, *clients) < 1 or not (
        0 < pace < math.inf and 0 < seconds < math.inf
    ):
        raise SettingsError("give numbers that are above 0")
    router_of(router)  # the front would say what is wrong to nobody
    rows = []
    with ExitStack() as stack:

        def started(command: Sequence[str]) -> Process:
            process = Process(command)
            stack.callback(process.end)
            return process.wait()

        servers = [started([*WORKER, str(tokens), str(pace)]) for _ in range(workers)]
        ways: dict[str, Process | None] = {"direct": None}
        for mode, flags in MODES.items():
            ways[mode] = started([*FRONT, "--router", router, *flags, *named(servers)])
        for repeat, count, (way, front) in product(range(repeats), clients, ways.items()):
            urls = [one.url for one in servers] if front is None else [front.url]
            found = measured(urls, front, count, tokens, pace, seconds)
            rows.append({"clients": count, "way": way, "repeat": repeat, **found})
    table = pd.DataFrame(rows)
    if out is not None:
        with whole_file(out) as partial:
            table.to_csv(partial, index=False)
    print("\n".join(machine_lines({**machine(), "core": None})))
    print(added(table).to_string(index=False, float_format="{:.3g}".format))


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
        raise SettingsError(f"no answer ended within {time_s:g} s; give more --seconds")
    found: dict[str, float] = {"requests": len(seen.first_s), "failed": seen.failed}
    for name, values in (("first", seen.first_s), ("token", seen.on_the_way_s)):
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
    if process is not None:
        took_s = time_s + tokens * pace_s * 2  # until the last one has ended
        found["front_cores"] = (process.cpu_s() - before) / took_s
    return found


def added(table: pd.DataFrame) -> pd.DataFrame:
    """Means over repeats, and what each way through the front has more than the direct one."""
    means = table.drop(columns="repeat").groupby(["clients", "way"], sort=False).mean()
    rows = []
    for (clients, way), row in means.iterrows():
        direct = means.loc[(clients, "direct")]
        shown = {"clients": clients, "way": way, **row.to_dict()}
        for name in [name for name in means.columns if name.endswith("_ms")]:
            shown[f"+{name}"] = row[name] - direct[name]
        rows.append(shown)
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    app = cyclopts.App(name="route", help=route.__doc__, version=None)
    app.default(route)
    app.command(soak)
    app.command(twin)
    run_app(app, arguments, "interrupted; nothing was written")


if __name__ == "__main__":
    main()
