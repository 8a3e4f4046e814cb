"""One request's way: to a worker, again to another one where it is lost, and back to its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from twinserve.backends.live.route.admission import Admission
from twinserve.backends.live.route.answers import RefusedError, error_event
from twinserve.backends.live.route.continuation import Continuation
from twinserve.backends.live.route.counters import Counters
from twinserve.backends.live.route.events import Events, EventTooLongError
from twinserve.backends.live.route.fleet import RoutedFleet, Stay
from twinserve.backends.live.route.settings import RouteSettings
from twinserve.backends.live.route.workers import FAULTS, Worker, Workers
from twinserve.sim.fleet.request import Request

ANSWER_BYTES = 64 * 2**20  # of an answer that is not streamed
_BACK = ("Content-Type", "Retry-After", "X-Request-Id", "WWW-Authenticate")  # headers for clients


class WorkerLostError(Exception):
    """A worker did not end its answer."""


class ClientGoneError(Exception):
    """kind  disconnected, or slow"""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Job:
    """A request under way.

    path, body    as the next worker gets them
    continuation  None: an answer that was begun cannot go on elsewhere; obstacle says why
    answer        None while the client has no byte of it
    """

    client: web.BaseRequest
    request: Request
    path: str
    body: bytes
    headers: Mapping[str, str]
    streams: bool
    continuation: Continuation | None
    obstacle: str = ""
    began_s: float = field(default_factory=time.perf_counter)
    answer: web.StreamResponse | None = None


class Relay:
    def __init__(
        self,
        settings: RouteSettings,
        session: aiohttp.ClientSession,
        fleet: RoutedFleet,
        workers: Workers,
        admission: Admission,
        counters: Counters,
    ) -> None:
        self._settings, self._session = settings, session
        self._fleet, self._workers = fleet, workers
        self._admission, self._counters = admission, counters

    async def answer(self, job: Job) -> web.StreamResponse:
        """Raises RefusedError where the client has no byte yet, and ClientGoneError."""
        tried: set[int] = set()
        for attempt in range(self._settings.retries + 1):
            try:
                stay = await self._place(job, tried, again=attempt > 0)
            except RefusedError as refused:
                if job.answer is None:
                    raise
                return await self._give_up(job, refused.kind, refused.said)
            worker = self._workers.all[stay.worker]
            try:
                return await self._once(job, stay, worker)
            except WorkerLostError:
                self._fleet.ended(stay)
                await self._workers.suspect(worker)
                tried.add(stay.worker)
                self._counters.errors.labels("worker_lost").inc()
            finally:
                self._fleet.ended(stay)
                self._admission.ask_again()
            if (left := job.continuation) is not None and left.complete:
                return await self._close(job, left)
            if job.answer is not None and (why := self._stuck(job)):
                return await self._give_up(job, "worker_lost", why)
            if attempt < self._settings.retries:
                moved = self._counters.retries if job.answer is None else self._counters.migrations
                moved.labels(worker.url).inc()
                if left is not None:
                    job.path, job.body = left.next()
        said = f"lost at {self._settings.retries + 1} workers, one after the other"
        if job.answer is None:
            raise RefusedError(502, "worker_lost", f"the request was {said}; try again later", 1)
        return await self._give_up(job, "worker_lost", f"the answer was {said}")

    async def _place(self, job: Job, tried: set[int], again: bool) -> Stay:
        began_s = time.perf_counter()
        stay = await self._admission.place(job.request, tried, first=again)
        self._counters.waited_s.observe(time.perf_counter() - began_s)
        self._counters.picks.labels(self._workers.all[stay.worker].url).inc()
        return stay

    @staticmethod
    def _stuck(job: Job) -> str:
        """Why an answer that was begun cannot go on elsewhere; empty: it can."""
        if job.continuation is None:
            why = job.obstacle or "route was told not to migrate"
        else:
            why = job.continuation.broken
        return f"its worker was lost, and the answer cannot go on elsewhere ({why})" if why else ""

    async def _once(self, job: Job, stay: Stay, worker: Worker) -> web.StreamResponse:
        """Raises WorkerLostError where the worker does not end it."""
        try:
            async with asyncio.timeout(None) as scope:
                with worker.attempt(scope):
                    async with self._session.post(
                        worker.url + job.path, data=job.body, headers=job.headers
                    ) as upstream:
                        if upstream.status == 200 and job.streams:
                            return await self._stream(job, stay, worker, upstream)
                        return await self._whole(job, stay, worker, upstream)
        except FAULTS as fault:
            raise WorkerLostError from fault

    async def _whole(
        self, job: Job, stay: Stay, worker: Worker, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """An answer in one piece, or an error of the worker's, which its client gets as it is."""
        body = bytearray()
        async for piece in upstream.content.iter_any():
            self._fleet.first_token(stay)
            body += piece
            if len(body) > ANSWER_BYTES and job.answer is None:
                said = f"the answer is longer than {ANSWER_BYTES:,} bytes; stream it"
                raise RefusedError(502, "answer_too_long", said)
        if upstream.status >= 500 and await self._workers.suspect(worker):
            raise WorkerLostError
        if upstream.status >= 400:
            self._counters.errors.labels(f"worker_{upstream.status}").inc()
        if job.answer is not None:  # the next worker refuses the rest
            said = f"the worker that was to go on answered {upstream.status}"
            return await self._give_up(job, "worker_lost", said)
        headers = {name: upstream.headers[name] for name in _BACK if name in upstream.headers}
        answer = web.Response(status=upstream.status, body=bytes(body), headers=headers)
        self._first_byte(job)
        await self._to_client(answer.prepare(job.client))
        job.answer = answer
        await self._to_client(answer.write_eof())
        return answer

    async def _stream(
        self, job: Job, stay: Stay, worker: Worker, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        events = Events()
        async for piece in upstream.content.iter_any():
            self._fleet.first_token(stay)
            if job.continuation is None:
                await self._pass_on(job, upstream, piece)
                continue
            out: list[bytes] = []
            try:
                found = events.feed(piece)
            except EventTooLongError:
                raise WorkerLostError from None
            for event in found:
                if event.startswith(b'data: {"error"') and await self._workers.suspect(worker):
                    await self._pass_on(job, upstream, b"".join(out))
                    raise WorkerLostError
                out.append(job.continuation.event(event))
            await self._pass_on(job, upstream, b"".join(out))
        if job.continuation is not None and not job.continuation.ended:
            raise WorkerLostError
        return await self._end(job, upstream)

    async def _pass_on(self, job: Job, upstream: aiohttp.ClientResponse, piece: bytes) -> None:
        if not piece:
            return
        if job.answer is None:
            headers = {name: upstream.headers[name] for name in _BACK if name in upstream.headers}
            answer = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
            self._first_byte(job)
            await self._to_client(answer.prepare(job.client))
            job.answer = answer
        await self._to_client(job.answer.write(piece))

    async def _end(self, job: Job, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        if job.answer is None:  # a stream without a byte
            raise WorkerLostError
        await self._to_client(job.answer.write_eof())
        return job.answer

    async def _close(self, job: Job, left: Continuation) -> web.StreamResponse:
        """Its last token has come, and the worker was lost after it."""
        assert job.answer is not None
        pieces = left.closing() if not left.ended else []
        for piece in pieces or [b""]:
            if piece:
                await self._to_client(job.answer.write(piece))
        await self._to_client(job.answer.write_eof())
        return job.answer

    async def _give_up(self, job: Job, kind: str, said: str) -> web.StreamResponse:
        """The last event of a stream says why there are no more; [DONE] does not follow."""
        assert job.answer is not None
        self._counters.errors.labels("cut_short").inc()
        await self._to_client(job.answer.write(error_event(502, kind, said)))
        await self._to_client(job.answer.write_eof())
        return job.answer

    def _first_byte(self, job: Job) -> None:
        self._counters.first_byte_s.observe(time.perf_counter() - job.began_s)

    async def _to_client(self, writing) -> None:
        """Raises ClientGoneError, also where the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s) as scope:
                await writing
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            slow = isinstance(error, TimeoutError) and scope.expired()
            raise ClientGoneError("slow_client" if slow else "disconnected") from error
