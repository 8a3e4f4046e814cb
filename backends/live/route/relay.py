"""One request's way: to a worker, again to another one if it is lost, and back to its client."""

import asyncio
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from twinserve.backends.live.route.admission import Admission
from twinserve.backends.live.route.continuation import Continuation
from twinserve.backends.live.route.counters import Counters
from twinserve.backends.live.route.fleet import RoutedFleet, Stay
from twinserve.backends.live.route.messages import (
    Events,
    EventTooLongError,
    RefusedError,
    error_event,
    for_client,
    is_error,
)
from twinserve.backends.live.route.settings import RouteSettings
from twinserve.backends.live.route.workers import FAULTS, Worker, Workers
from twinserve.sim.fleet.request import Request

ANSWER_BYTES = 64 * 2**20  # of an answer that is not streamed
# a worker that ends gives up what it has (vLLM on SIGTERM). Quotes within texts have a backslash.
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')


class WorkerLostError(Exception):
    """A worker did not finish its answer."""


class RefusesRestError(Exception):
    """The next worker refuses to continue an answer."""


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
    headers: CIMultiDict[str]
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
        """Raises RefusedError if the client has no byte yet, and ClientGoneError."""
        tried: set[int] = set()
        for attempt in range(self._settings.retries + 1):
            try:
                stay = await self._place(job, tried, again=attempt > 0)
            except RefusedError as refused:
                if job.answer is None:
                    raise
                return await self._give_up(job, refused.kind, refused.said)
            worker = self._workers.all[stay.worker]
            whole: web.StreamResponse | None = None
            try:
                whole = await self._once(job, stay, worker)
            except RefusesRestError as refused:
                return await self._give_up(job, "worker_lost", str(refused))
            except WorkerLostError:
                self._fleet.ended(stay)
                await self._workers.suspect(worker)
                tried.add(stay.worker)
                self._counters.errors.labels("worker_lost").inc()
            finally:
                self._fleet.ended(stay)
                self._admission.ask_again()
            if whole is not None:  # the worker is rid of it; nothing that befalls it now matters
                return await self._end(job, whole)
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
            why = job.obstacle or "route runs with --no-migration"
        else:
            why = job.continuation.broken
        return f"its worker was lost, and the answer cannot go on elsewhere ({why})" if why else ""

    async def _once(self, job: Job, stay: Stay, worker: Worker) -> web.StreamResponse:
        """All of it is here then; of a stream the client has all but the end. Raises
        WorkerLostError if the worker does not end it, RefusesRestError, RefusedError."""
        try:
            async with asyncio.timeout(None) as scope:
                with worker.attempt(scope):
                    if not self._fleet.stands(stay):  # it went down while the request woke up
                        raise WorkerLostError
                    async with self._session.post(
                        worker.url + job.path,
                        data=job.body,
                        headers=job.headers,
                        skip_auto_headers=("Content-Type", "User-Agent"),
                        allow_redirects=False,
                    ) as upstream:
                        # what counts as true for `stream` is the worker's affair
                        events = upstream.content_type == "text/event-stream"
                        if upstream.status == 200 and (job.streams or events):
                            return await self._stream(job, stay, worker, upstream)
                        return await self._whole(job, stay, worker, upstream)
        except FAULTS as fault:
            if job.answer is not None and job.continuation is not None and job.continuation.ended:
                return job.answer
            raise WorkerLostError from fault

    async def _whole(
        self, job: Job, stay: Stay, worker: Worker, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """An answer in one piece, or an error of the worker's, which its client gets as it is."""
        body = bytearray()
        async for piece in upstream.content.iter_any():
            worker.heard()
            self._fleet.first_token(stay)
            body += piece
            if len(body) > ANSWER_BYTES:
                said = f"the answer is longer than {ANSWER_BYTES:,} bytes; stream it"
                if job.answer is not None:
                    raise RefusesRestError(said)
                raise RefusedError(502, "answer_too_long", said)
        if upstream.status == 200 and _ABORTED.search(body):
            raise WorkerLostError
        if upstream.status >= 500 and await self._workers.suspect(worker):
            raise WorkerLostError
        if upstream.status >= 400:
            self._counters.errors.labels(f"worker_{upstream.status}").inc()
        if job.answer is not None:  # the next worker refuses the rest
            raise RefusesRestError(f"the worker chosen to continue answered {upstream.status}")
        headers = for_client(upstream.headers)
        return web.Response(status=upstream.status, body=bytes(body), headers=headers)

    async def _stream(
        self, job: Job, stay: Stay, worker: Worker, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        events = Events()
        async for piece in upstream.content.iter_any():
            worker.heard()
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
                if is_error(event) and await self._workers.suspect(worker):
                    await self._pass_on(job, upstream, b"".join(out))
                    raise WorkerLostError
                out.append(job.continuation.event(event))
                if job.continuation.aborted:
                    await self._pass_on(job, upstream, b"".join(out))
                    raise WorkerLostError
            await self._pass_on(job, upstream, b"".join(out))
        if job.continuation is not None and not job.continuation.ended:
            raise WorkerLostError
        if job.answer is None:  # a stream without a byte
            raise WorkerLostError
        return job.answer

    async def _pass_on(self, job: Job, upstream: aiohttp.ClientResponse, piece: bytes) -> None:
        if not piece:
            return
        if job.answer is None:
            answer = web.StreamResponse(headers=for_client(upstream.headers))
            answer.headers["Cache-Control"] = "no-cache"
            await self._begin(job, answer)
        assert job.answer is not None
        await self.to_client(job.answer.write(piece))

    async def _begin(self, job: Job, answer: web.StreamResponse) -> None:
        self._counters.first_byte_s.observe(time.perf_counter() - job.began_s)
        job.answer = answer  # whatever comes now: no second one begins
        await self.to_client(answer.prepare(job.client))

    async def _end(self, job: Job, whole: web.StreamResponse) -> web.StreamResponse:
        if job.answer is None:
            await self._begin(job, whole)
        await self.to_client(whole.write_eof())
        return whole

    async def _close(self, job: Job, left: Continuation) -> web.StreamResponse:
        """Its last token has come, and the worker was lost after it."""
        assert job.answer is not None
        for piece in left.closing() if not left.ended else ():
            await self.to_client(job.answer.write(piece))
        return await self._end(job, job.answer)

    async def _give_up(self, job: Job, kind: str, said: str) -> web.StreamResponse:
        """The last event of a stream says why there are no more; [DONE] does not follow."""
        assert job.answer is not None
        self._counters.errors.labels("cut_short").inc()
        await self.to_client(job.answer.write(error_event(502, kind, said)))
        return await self._end(job, job.answer)

    async def to_client(self, writing: Awaitable[Any]) -> None:
        """Raise ClientGoneError, also if the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s) as scope:
                await writing
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            slow = isinstance(error, TimeoutError) and scope.expired()
            raise ClientGoneError("slow_client" if slow else "disconnected") from error
