"""Hours of load on `twinserve route`: does its memory stay flat, and does all get an answer?

Front, servers and clients are a process each. Good clients are mixed with slow ones, with such as
hang up, and with connections that their clients never close (`troubled.py`). Now and then a server
is killed, and is back a little later. docs/routers.md has the results.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.backends.live.route.settings import require_libraries
from twinserve.experiments.route.processes import FRONT, WORKER, Process, labelled, named, page
from twinserve.experiments.study.points import keep_so_far

_MIB = 2**20
KILLS = 300.0  # seconds between two
_GAUGES = ("in_flight", "waiting", "worker_up", "connections")
_COUNTERS = ("migrations", "retries")


def soak(
    seed: int,
    kill_every_s: float,
    clients: int,
    troubled: int,
    tokens: int,
    pace_s: float,
    minutes: float,
    servers: int = 3,
) -> list[dict[str, Any]]:
    """A row for each look at the front's process: memory, connections and answers under load that
    lasts.

    clients       concurrent ones that want whole answers
    troubled      of each kind that is slow, hangs up, or never closes its connection
    tokens        of an answer, one every `pace_s`
    kill_every_s  between two kills of a server, by turns; it is back a little later
    """
    require_libraries()
    from twinserve.experiments.route.troubled import KINDS, STEADY  # aiohttp comes along

    processes = [Process([*WORKER, str(tokens), str(pace_s)]) for _ in range(servers)]
    try:
        workers = [one.wait() for one in processes]
        # sessions are forgotten while it runs, else their number would grow for an hour
        flags = ["--router", "llm-d", "--session-expiry", "300", "--health-timeout", "10"]
        processes.append(Process([*FRONT, *flags, *named(workers)]))
        counts = {kind: clients if kind == STEADY else troubled for kind in KINDS}
        run = _Soak(counts, tokens, pace_s, 60 * minutes, kill_every_s, processes[-1].wait())
        asyncio.run(run.all(workers))
        run.samples[-1]["front_exit_status"] = processes[-1].end()
        return run.samples
    finally:
        for process in processes:
            process.end()


class _Soak:
    def __init__(
        self,
        counts: dict[str, int],
        tokens: int,
        pace_s: float,
        time_s: float,
        kill_every_s: float,
        front: Process,
    ) -> None:
        self._counts, self._time_s, self._front = counts, time_s, front
        # such as begin together stay together
        self._spread_s = min(tokens * pace_s, time_s / 4)
        self._kill_every_s = kill_every_s
        self._sample_s = max(time_s / 360, 1.0)
        self._back_s = max(kill_every_s / 30, 1.0)  # a server that was killed
        from twinserve.experiments.route.troubled import Clients

        # twice the longest of the front's own limits
        self._clients = Clients(front.url, tokens, patience_s=180.0)
        self.samples: list[dict[str, Any]] = []
        self._kills = 0
        self._over = asyncio.Event()
        self._began_s = time.monotonic()

    async def all(self, servers: list[Process]) -> None:
        await self._sample()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._samples_on())
            group.create_task(self._kills_on(servers))
            await self._clients.run(self._counts, self._spread_s, self._time_s)
            self._over.set()
        await asyncio.sleep(5.0)  # connections to servers are kept for 3 s
        await self._sample()

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._over.wait()
        except TimeoutError:
            return False

    async def _samples_on(self) -> None:
        while not await self._ends_within(self._sample_s):
            await self._sample()

    async def _kills_on(self, servers: list[Process]) -> None:
        """By turns, in the middle of what it has."""
        while not await self._ends_within(self._kill_every_s - self._back_s):
            if time.monotonic() > self._began_s + self._time_s:
                return  # only connections that wait to be cut off are left
            server = servers[self._kills % len(servers)]
            server.kill()
            self._kills += 1
            await asyncio.sleep(self._back_s)
            server.start()

    async def _sample(self) -> None:
        tally = self._clients.tally
        text = await asyncio.to_thread(page, self._front.url)
        said = {name: sum(labelled(text, name).values()) for name in _GAUGES}
        counted = {name: sum(labelled(text, f"{name}_total").values()) for name in _COUNTERS}
        wrong = [f"{kind} {how}: {n}" for (kind, how), n in sorted(tally.wrong.items())]
        self.samples.append(
            {
                "time_s": round(time.monotonic() - self._began_s, 1),
                **_of_process(self._front),
                **said,
                "began": tally.began.total(),
                "ended_well": tally.well.total(),
                "steady_whole": tally.well["steady"],
                "ended_otherwise": "; ".join(wrong),
                **counted,
                "kills": self._kills,
            }
        )
        keep_so_far(self.samples)


def summed(samples: pd.DataFrame) -> pd.DataFrame:
    """One row: counts at the end, and `flatness`."""
    last = samples.iloc[-1]
    names = ["time_s", "began", "ended_well", "steady_whole", "ended_otherwise", *_COUNTERS]
    names += ["kills", "front_exit_status", "in_flight", "waiting"]
    cores = last.cpu_s / max(last.time_s, 1e-9)
    return pd.DataFrame([{**last[names], "front_cores": cores, **flatness(samples)}])


def flatness(samples: pd.DataFrame) -> dict[str, float]:
    """Memory of the front in MiB: medians of four quarters of the time; its growth in an hour, by a
    line of least squares through the last two."""
    mib, hours = samples["rss_bytes"] / _MIB, samples["time_s"] / 3600
    quarter = (hours / max(hours.iloc[-1], 1e-9) * 4).clip(upper=3.999).astype(int)
    medians = mib.groupby(quarter).median().items()
    found = {f"rss_mib_quarter_{q + 1}": round(float(m), 2) for q, m in medians}
    late = quarter >= 2
    if late.sum() >= 3:
        found["rss_mib_an_hour"] = round(float(np.polyfit(hours[late], mib[late], 1)[0]), 3)
    found["rss_mib_most"] = round(float(mib.max()), 2)
    found["sockets_most"] = int(samples["sockets"].max())
    return found


def _of_process(process: Process) -> dict[str, float]:
    """Of /proc: bytes of memory, open sockets, seconds computed."""
    folder = Path(f"/proc/{process.pid}")
    rss = re.search(r"^VmRSS:\s*(\d+) kB", (folder / "status").read_text(), re.MULTILINE)
    sockets = 0
    for name in os.listdir(folder / "fd"):
        with suppress(OSError):  # closed meanwhile
            sockets += os.readlink(folder / "fd" / name).startswith("socket:")
    memory = int(rss[1]) * 1024 if rss else math.nan
    return {"rss_bytes": memory, "sockets": sockets, "cpu_s": process.cpu_s()}
