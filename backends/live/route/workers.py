"""The workers as the front sees them over HTTP: whether they are there, and what they measure."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp

from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.measured import KvMemory, read_load, read_memory
from twinserve.backends.live.route.settings import RouteSettings
from twinserve.sim.results.recorder import Load

if TYPE_CHECKING:  # its library is needed for it alone
    from twinserve.backends.live.route.kv_events import KvEvents

_log = logging.getLogger("twinserve.route")
_PAGE_BYTES = 16 * 2**20  # of /metrics: what is longer is not read
_POLL_S = 0.5
_SLICES = 10  # of the time for a check
_STEADY_S = 60.0  # a worker that was up for so long does not come and go
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)


class Worker:
    def __init__(self, index: int, url: str) -> None:
        self.index, self.url = index, url
        self.misses = 0
        self.came_s = -math.inf  # when it was up, by the loop's clock
        self.falls = 0  # how often it went down, soon after it was up each time
        self.out_until_s = -math.inf
        self.memory = KvMemory()
        self.heard_s = -math.inf  # when a part of an answer of it came last, by the loop's clock
        self._attempts: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def attempt(self, scope: asyncio.Timeout) -> Iterator[None]:
        """What runs within ends with TimeoutError if the worker is found to be down."""
        self._attempts.add(scope)
        try:
            yield
        finally:
            self._attempts.discard(scope)

    def heard(self) -> None:
        """A part of one of its answers has come."""
        self.heard_s = asyncio.get_running_loop().time()

    def fell(self, now: float, least_s: float, most_s: float) -> float:
        """The worker is down. Returns the least seconds for which it stays out: none the first
        time, then twice as long each time."""
        self.falls = self.falls + 1 if now - self.came_s < _STEADY_S else 1
        doubled = least_s * 2.0 ** min(self.falls - 1, 30)
        pause_s = min(doubled, most_s) if self.falls > 1 else 0.0
        self.out_until_s = now + pause_s
        return pause_s

    def lose_attempts(self) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._attempts:
            if not scope.expired():
                scope.reschedule(now)


class Workers:
    """on_change  called when a worker came, is down, or was measured"""

    def __init__(
        self,
        settings: RouteSettings,
        session: aiohttp.ClientSession,
        fleet: RoutedFleet,
        on_change: Callable[[], None],
    ) -> None:
        self._settings, self._session, self._fleet = settings, session, fleet
        self._on_change = on_change
        self._poll_s = settings.poll_s or fleet.router.signals.interval_s or _POLL_S
        self.all = [Worker(i, url) for i, url in enumerate(settings.workers)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self.events: KvEvents | None = None  # None: they publish none

    def start(self) -> None:
        checks = (self._check, self._settings.health_s), (self._poll, self._poll_s)
        for worker in self.all:
            for once, every_s in checks:
                self._tasks.append(asyncio.create_task(self._always(worker, once, every_s)))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _always(
        self, worker: Worker, once: Callable[[Worker], Awaitable[None]], every_s: float
    ) -> None:
        """Whatever goes wrong with one of them, the next one comes: nothing else would find out
        that the worker is well again."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await once(worker)
            except Exception:
                _log.exception("%s: its answer could not be processed", worker.url)
            if self._stopped:  # a timeout due at the same moment may replace the cancellation
                return
            await asyncio.sleep(max(began + every_s - clock(), 0.0))

    async def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def suspect(self, worker: Worker) -> bool:
        """A request was lost at the worker. Returns whether it is down, after asking it."""
        if not self._fleet.is_up(worker.index):
            return True
        if await self._healthy(worker):
            return False
        self._down(worker, "it lost a request, and does not answer")
        return True

    async def _check(self, worker: Worker) -> None:
        if await self._healthy(worker):
            worker.misses = 0
            out = self._now() < worker.out_until_s
            if not self._fleet.is_up(worker.index) and not out:
                await self._up(worker)
        else:
            worker.misses += 1
            if worker.misses >= self._settings.misses:
                self._down(worker, f"{worker.misses} health checks failed")

    async def _healthy(self, worker: Worker) -> bool:
        """A stalled front, as on an overloaded host, finds its timers due before it reads the
        answers that have come. So time counts in slices, whatever their length. An overloaded
        worker may be as late. While parts of answers come from it, it does not count as dead: its
        requests would be lost, and moved to workers with as much load."""
        began_s = self._now()
        asking = asyncio.create_task(self._status(worker))
        try:
            for _ in range(_SLICES):
                slice_s = self._settings.health_timeout_s / _SLICES
                if (await asyncio.wait({asking}, timeout=slice_s))[0]:
                    return asking.result() == HTTPStatus.OK
            return worker.heard_s > began_s
        finally:
            asking.cancel()

    async def _status(self, worker: Worker) -> int | None:
        """Of its /health; None: no answer."""
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{worker.url}/health"
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                return answer.status
        except FAULTS:
            return None

    async def _up(self, worker: Worker) -> None:
        page = await self._page(worker)
        load: Load | None = None
        if page is not None:
            text, at_s = page
            worker.memory = read_memory(text)
            load = read_load(text, at_s, worker.memory)
        self._fleet.came(worker.index, worker.memory, load)
        worker.came_s = self._now()
        if self.events is not None:
            self.events.came(worker.index, worker.memory)
        _log.info(
            "%s is up: %d KV blocks of %d tokens%s",
            worker.url,
            *worker.memory,
            "" if load else "; its /metrics have no load",
        )
        self._on_change()

    def _down(self, worker: Worker, why: str) -> None:
        if not self._fleet.is_up(worker.index):
            return
        settings = self._settings
        pause_s = worker.fell(self._now(), settings.health_s, settings.back_off_s)
        if pause_s:
            why += f"; it fails repeatedly, and gets no requests for at least {pause_s:g} s"
        _log.warning("%s is down: %s", worker.url, why)
        self._fleet.failed(worker.index)
        if self.events is not None:
            self.events.failed(worker.index)
        worker.lose_attempts()
        self._on_change()

    async def _poll(self, worker: Worker) -> None:
        if self._fleet.is_up(worker.index) and (page := await self._page(worker)):
            text, at_s = page
            memory = read_memory(text)
            if memory not in (worker.memory, KvMemory()):  # where it does not tell, it is as before
                self._other(worker, memory, read_load(text, at_s, memory))
                return
            load = read_load(text, at_s, worker.memory)
            if load is not None:
                self._fleet.measured(worker.index, load)
                self._on_change()  # a router may have held requests for what it measured before

    def _other(self, worker: Worker, memory: KvMemory, load: Load | None) -> None:
        """Its KV memory is not what was taken for it: its first page did not tell, or it was
        started anew between two checks. Blocks of another size have other names, so it is a new
        replica. Requests that it has go on, and the router does not count them any more."""
        _log.warning(
            "%s has %d KV blocks of %d tokens, and not %d of %d",
            worker.url,
            *memory,
            *worker.memory,
        )
        self._fleet.failed(worker.index)
        worker.memory = memory
        self._fleet.came(worker.index, memory, load)
        if self.events is not None:
            self.events.came(worker.index, memory)
        self._on_change()

    async def _page(self, worker: Worker) -> tuple[str, float] | None:
        """/metrics, and when it was asked for: what it says is not older."""
        at_s = asyncio.get_running_loop().time()
        try:
            timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
            url = f"{worker.url}/metrics"
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                page = await answer.content.read(_PAGE_BYTES)
                while not answer.content.at_eof() and len(page) < _PAGE_BYTES:
                    page += await answer.content.readany()
                return page.decode(errors="replace"), at_s
        except FAULTS:
            return None
