"""Hours of load on `twinserve route`: does its memory stay flat, and does all get an answer?

Front, servers and clients are a process each. Good clients are mixed with slow ones, with such as
hang up, and with connections that their clients never close (`troubled.py`). Now and then a server
is killed, and is back a little later. docs/routers.md has the results.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.live.route.settings import require_libraries, router_of
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines
from twinserve.experiments.route.processes import FRONT, WORKER, Process, labelled, named, page
from twinserve.experiments.route.troubled import KINDS, STEADY, WHOLE, Clients
from twinserve.formats import whole_file
from twinserve.sim.setup.config import SettingsError

_MIB = 2**20
_KEPT_EVERY_S = 60.0
_GAUGES = ("in_flight", "waiting", "worker_up", "connections")
_COUNTERS = ("migrations", "retries")


def soak(
    *,
    clients: int = 500,
    troubled: int = 10,
    tokens: int = 20,
    pace: float = 2.0,
    minutes: float = 60.0,
    workers: int = 3,
    kill_every: float = 300.0,
    back_after: float = 10.0,
    sample: float = 10.0,
    router: str = "llm-d",
    out: Path = Path("route-soak"),
) -> None:
    """Memory, connections and answers of the front under load that lasts.

    Parameters
    ----------
    clients: int
        Concurrent clients that want whole answers.
    troubled: int
        Of each kind that is slow, hangs up, or never closes its connection.
    tokens: int
        Of an answer.
    pace: float
        Seconds between two tokens.
    minutes: float
        Length of the soak.
    workers: int
        Servers; two at least, where some are killed.
    kill_every: float
        Seconds between two kills of a server, by turns; 0: none.
    back_after: float
        Seconds after which a killed server is started again.
    sample: float
        Seconds between two looks at the front's process.
    router: str
        As for twinserve route.
    out: Path
        Folder for samples.csv and soak.json; both are written each minute.
    """
    require_libraries()
    if min(clients, tokens, workers, 1) < 1 or troubled < 0:
        raise SettingsError("give numbers that are above 0")
    if not all(0 < value < math.inf for value in (pace, minutes, sample, back_after)):
        raise SettingsError("give times that are above 0")
    if not 0 <= kill_every < math.inf or 0 < kill_every <= back_after:
        raise SettingsError("give a --kill-every that is longer than --back-after, or 0")
    if kill_every and workers < 2:
        raise SettingsError("with one server a kill leaves none; give --workers 2, or no kills")
    router_of(router)
    out.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in locals().items() if name != "out"}
    processes = [Process([*WORKER, str(tokens), str(pace)]) for _ in range(workers)]
    try:
        servers = [one.wait() for one in processes]
        # sessions are forgotten while it runs, else their number would grow for an hour
        flags = ["--router", router, "--session-expiry", "300", "--health-timeout", "10"]
        processes.append(Process([*FRONT, *flags, *named(servers)]))
        _Soak(given, out, processes[-1].wait(), servers).run()
    finally:
        for process in processes:
            process.end()


class _Soak:
    def __init__(self, given: dict, out: Path, front: Process, servers: list[Process]) -> None:
        self._given, self._out, self._front, self._servers = given, out, front, servers
        # twice the longest of the front's own limits
        self._clients = Clients(front.url, given["tokens"], patience_s=180.0)
        self._samples: list[dict[str, float]] = []
        self._kills = 0
        self._over = asyncio.Event()
        self._began_s = time.monotonic()
        self._kept_s = -math.inf

    def run(self) -> None:
        asyncio.run(self._all())
        found = {**self._summary(), "front_exit_status": self._front.end()}
        self._write(found)
        print("\n".join(machine_lines({**machine(), "core": None})))
        print("\n".join(f"{name}: {value}" for name, value in found.items() if name != "settings"))

    async def _all(self) -> None:
        given = self._given
        counts = {kind: given["clients" if kind == STEADY else "troubled"] for kind in KINDS}
        seconds = given["minutes"] * 60
        # such as begin together stay together
        spread_s = min(given["tokens"] * given["pace"], seconds / 4)
        await self._sample()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._samples_on())
            if given["kill_every"]:
                group.create_task(self._kills_on())
            await self._clients.run(counts, spread_s, seconds)
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
        while not await self._ends_within(self._given["sample"]):
            await self._sample()

    async def _kills_on(self) -> None:
        """By turns, in the middle of what it has."""
        end = self._began_s + self._given["minutes"] * 60
        while not await self._ends_within(self._given["kill_every"] - self._given["back_after"]):
            if time.monotonic() > end:  # only connections that wait to be cut off are left
                return
            server = self._servers[self._kills % len(self._servers)]
            server.kill()
            self._kills += 1
            await asyncio.sleep(self._given["back_after"])
            server.start()

    async def _sample(self) -> None:
        tally = self._clients.tally
        now_s = time.monotonic() - self._began_s
        text = await asyncio.to_thread(page, self._front.url)
        said = {name: sum(labelled(text, name).values()) for name in _GAUGES}
        counted = {name: sum(labelled(text, f"{name}_total").values()) for name in _COUNTERS}
        self._samples.append(
            {
                "time_s": round(now_s, 1),
                **_of_process(self._front),
                **said,
                "answers": sum(tally.well[kind] for kind in WHOLE),
                "lost": sum(n for (kind, _), n in tally.wrong.items() if kind in WHOLE),
                "clients_open": tally.open,
                **counted,
                "kills": self._kills,
            }
        )
        if now_s - self._kept_s >= _KEPT_EVERY_S:
            self._kept_s = now_s
            self._write(self._summary())

    def _summary(self) -> dict:
        tally, last = self._clients.tally, self._samples[-1]
        wrong: dict[str, dict[str, int]] = {}
        for (kind, how), count in sorted(tally.wrong.items()):
            wrong.setdefault(kind, {})[how] = count
        return {
            "settings": self._given,
            "seconds": last["time_s"],
            "began": dict(sorted(tally.began.items())),
            "ended_well": dict(sorted(tally.well.items())),
            "ended_otherwise": wrong,
            **{name: last[name] for name in ("kills", *_COUNTERS)},
            "front_cores": round(last["cpu_s"] / max(last["time_s"], 1e-9), 4),
            **flatness(pd.DataFrame(self._samples)),
            "at_the_end": {name: last[name] for name in ("in_flight", "waiting", "sockets")},
        }

    def _write(self, found: dict) -> None:
        with whole_file(self._out / "samples.csv") as partial:
            pd.DataFrame(self._samples).to_csv(partial, index=False)
        with whole_file(self._out / "soak.json") as partial:
            partial.write_text(json.dumps(found, indent=2) + "\n")


def flatness(samples: pd.DataFrame) -> dict[str, float]:
    """Memory of the front in MiB: medians of four quarters of the time, and how much it grows in an
    hour, by a line of least squares through the last two."""
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
