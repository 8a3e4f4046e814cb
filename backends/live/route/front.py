"""An OpenAI-compatible HTTP front: what it answers on which path."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from twinserve.backends.live.route.admission import Admission
from twinserve.backends.live.route.continuation import CHAT, COMPLETIONS, Continuation, obstacle
from twinserve.backends.live.route.counters import CONTENT_TYPE, Counters
from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.messages import RefusedError, for_client, for_worker
from twinserve.backends.live.route.names import Sessions
from twinserve.backends.live.route.prompts import Prompts
from twinserve.backends.live.route.protocol import LINGERS_S, HttpServer
from twinserve.backends.live.route.relay import ClientGoneError, Job, Relay
from twinserve.backends.live.route.settings import RouteSettings, model_of, router_of
from twinserve.backends.live.route.tokens import Tokens
from twinserve.backends.live.route.workers import FAULTS, Workers
from twinserve.backends.live.serving.clients import read_clients
from twinserve.sim.results.routing import RoutingWriter
from twinserve.sim.setup.config import SettingsError

if TYPE_CHECKING:
    from twinserve.backends.live.route.kv_blocks import Gap
    from twinserve.backends.live.route.kv_events import KvEvents

_log = logging.getLogger("twinserve.route")
_GENERATES = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT}
_CLIENT_LEFT = 499  # in the metrics alone, as nginx has it
_PROBE_S = 5.0


class Front:
    """Make it, `start` it, and `stop` it, in one event loop. Raises SettingsError and
    RegistryError for what cannot be served."""

    def __init__(self, settings: RouteSettings) -> None:
        self.settings = settings
        loop = asyncio.get_running_loop()
        router = router_of(settings.router, bool(settings.kv_events), settings.profile)
        clients = read_clients(settings.clients)
        model = model_of(settings.profile)
        self.fleet = RoutedFleet(router, len(settings.workers), loop.time, model)
        self.sessions = Sessions(settings.session_s, self.fleet.forgotten)
        self.fleet.remembers = self.sessions.__contains__
        self._prompts = Prompts(clients, self.sessions)
        self.admission = Admission(
            self.fleet, settings.max_in_flight, settings.queue, settings.queue_timeout_s
        )
        self.counters = Counters(settings.workers, self.fleet, self.admission)
        # a connection that a worker is about to close is not used again: uvicorn does so after 5 s
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_PROBE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # else cookies of one client's answer go with all
            headers={"Accept-Encoding": "identity"},
        )
        self.workers = Workers(settings, self._session, self.fleet, self.admission.ask_again)
        self._relay = Relay(
            settings, self._session, self.fleet, self.workers, self.admission, self.counters
        )
        self._tokens: Tokens | None = None
        self._record: RoutingWriter | None = None
        self._events: KvEvents | None = None
        self._server: asyncio.Server | None = None
        self._http: HttpServer | None = None
        self._under_way: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def start(self) -> int:
        """Start, and return the port. Raises OSError if the port cannot be used."""
        settings = self.settings
        self._http = HttpServer(
            self._answer,
            settings.body_bytes,
            settings.connections,
            lambda kind: self.counters.errors.labels(kind).inc(),
            max_line_size=settings.header_bytes,
            max_field_size=settings.header_bytes,
            keepalive_timeout=settings.idle_timeout_s,
            lingering_time=LINGERS_S,
            access_log=None,
        )
        if settings.kv_events:
            self._hear(settings)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._http, settings.host, settings.port, backlog=4096
        )
        if settings.record is not None:
            self._record = RoutingWriter(
                settings.record, settings.router, settings.profile, settings.workers
            )
            self.fleet.note = self._note
        self.workers.start()
        return self._server.sockets[0].getsockname()[1]

    def _hear(self, settings: RouteSettings) -> None:
        from twinserve.backends.live.route.kv_events import KvEvents

        def gap(worker: int, outcome: Gap) -> None:
            self.counters.kv_gaps.labels(settings.workers[worker], outcome.value).inc()

        if self.fleet.router.hears_kv_events():  # no other router compares token ids
            self._tokens = Tokens(settings, self._session, self.fleet, self.counters)
        self._events = self.workers.events = KvEvents(
            settings.endpoints, self.fleet, self._prompts, gap, self.admission.ask_again
        )
        self.counters.hear(self._events)

    @property
    def under_way(self) -> int:
        """Return the number of unfinished requests, waiting ones included."""
        return len(self._under_way)

    async def drain(self) -> int:
        """Refuse new requests; let others end within `drain_s`. Returns how many did not."""
        self.draining = True
        _log.info("draining: %d requests are under way", len(self._under_way))
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._under_way)

    async def stop(self) -> None:
        """End requests that are under way, and stop."""
        if self._server is not None:
            self._server.close()
        for task in list(self._under_way):
            task.cancel()
        await self.workers.stop()
        if self._events is not None:
            await self._events.stop()
        if self._http is not None:
            await self._http.shutdown(1.0)
        await self._session.close()
        record, self._record, self.fleet.note = self._record, None, None
        if record is not None:
            record.close()

    def _note(self, at_s: float, kind: str, *fields: Any) -> None:
        """A record that cannot be written ends; requests go on."""
        record = self._record
        if record is None:
            return
        try:
            record.note(at_s, kind, *fields)
        except OSError as error:
            _log.error("%s: %s; nothing is recorded", self.settings.record, error.strerror)
            self._record = None
            record.abandon(error)

    # -- requests ----------------------------------------------------------------------------------
    async def _answer(self, client: web.BaseRequest) -> web.StreamResponse:
        """Of every request; whatever it is about."""
        path = client.path.rstrip("/") or "/"
        try:
            if path in _GENERATES:
                self._wants(client, "POST")
                return await self._generate(client, path)
            if path in ("/health", "/metrics", "/v1/models"):
                self._wants(client, "GET")
                answer = await self._told(client, path)
            else:
                raise RefusedError(404, "not_found", f"there is no {path[:200]} here")
        except RefusedError as refused:
            answer = self._refuse(path, refused)
        try:  # as with long answers: a client that takes nothing is cut off
            await self._relay.to_client(answer.prepare(client))
            await self._relay.to_client(answer.write_eof())
        except ClientGoneError as gone:
            raise self._gone(client, gone) from gone
        return answer

    def _gone(self, client: web.BaseRequest, gone: ClientGoneError) -> asyncio.CancelledError:
        self.counters.errors.labels(gone.kind).inc()
        if client.transport is not None:
            client.transport.abort()
        return asyncio.CancelledError()

    @staticmethod
    def _wants(client: web.BaseRequest, method: str) -> None:
        if client.method != method:
            said = f"{client.path[:200]} takes {method}, not {client.method[:20]}"
            raise RefusedError(405, "method_not_allowed", said, allow=method)

    def _refuse(self, path: str, refused: RefusedError) -> web.Response:
        self.counters.errors.labels(refused.kind).inc()
        if path in _GENERATES:
            self.counters.requests.labels(path, str(refused.status)).inc()
        answer = web.Response(
            status=refused.status,
            body=refused.body,
            headers=refused.headers,
            content_type="application/json",
        )
        if refused.status in (408, 413) or self.draining:
            answer.force_close()
        return answer

    async def _told(self, client: web.BaseRequest, path: str) -> web.Response:
        if path == "/metrics":
            return web.Response(body=self.counters.page(), headers={"Content-Type": CONTENT_TYPE})
        if path == "/v1/models":
            return await self._models(client)
        if self.draining:
            raise RefusedError(503, "draining", "the router is shutting down", 1)
        if not self.fleet.up:
            raise RefusedError(503, "no_worker", "no worker is up", 1)
        return web.json_response({"workers_up": len(self.fleet.up)})

    async def _models(self, client: web.BaseRequest) -> web.Response:
        """As the first worker has it that answers: all serve the same."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_S)
        for index in self.fleet.up:
            url = f"{self.settings.workers[index]}/v1/models"
            try:
                async with self._session.get(
                    url, headers=for_worker(client.headers), timeout=timeout, allow_redirects=False
                ) as answer:
                    return web.Response(
                        status=answer.status,
                        body=await answer.read(),
                        headers=for_client(answer.headers),
                    )
            except FAULTS:
                continue
        raise RefusedError(503, "no_worker", "no worker that is up lists its models", 1)

    async def _generate(self, client: web.BaseRequest, path: str) -> web.StreamResponse:
        if self.draining:
            raise RefusedError(503, "draining", "the router is shutting down; ask another one", 1)
        began_s = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        self._idle.clear()
        status = str(_CLIENT_LEFT)
        try:
            answer = await self._relay.answer(await self._job(client, path))
            status = str(answer.status)
            return answer
        except RefusedError as refused:
            status = ""  # counted where it is answered
            raise refused
        except ClientGoneError as gone:
            raise self._gone(client, gone) from gone
        except asyncio.CancelledError:
            self.counters.errors.labels("disconnected").inc()
            raise
        except Exception:  # a defect, or a router's own; protocol.py answers
            status = "500"
            raise
        finally:
            if status:
                self.counters.requests.labels(path, status).inc()
                self.counters.total_s.observe(time.perf_counter() - began_s)
            self._under_way.discard(task)
            if not self._under_way:
                self._idle.set()

    async def _job(self, client: web.BaseRequest, path: str) -> Job:
        given = await self._body(client)
        body = _object(given)
        name = client.headers.get("X-Request-Id", "")[:200] or uuid.uuid4().hex
        session = client.headers.get(self.settings.session_header)
        headers = [(k.lower(), v) for k, v in client.raw_headers]
        tokens = None
        if self._tokens is not None:
            tokens = await self._tokens.of(body, for_worker(client.headers))
        now = asyncio.get_running_loop().time()
        streams = body.get("stream") is True
        kept: Continuation | None = None
        why = "" if streams else "because of 'stream'"
        try:
            request = self._prompts.request(name, body, now, headers, session, tokens)
            if streams and self.settings.migrate:
                field = obstacle(path, body)
                why = "" if field is None else f"because of {field!r}"
                kept = Continuation(path, body) if field is None else None
            given = given if kept is None else kept.first()
        except RecursionError:
            raise RefusedError(400, "bad_json", "the body is nested too deeply") from None
        return Job(
            client, request, path, given, for_worker(client.headers, name), streams, kept, why
        )

    async def _body(self, client: web.BaseRequest) -> bytes:
        most = self.settings.body_bytes
        too_long = RefusedError(
            413, "body_too_large", f"the body is longer than {most:,} bytes; send less"
        )
        if (client.content_length or 0) > most:
            raise too_long
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                if client.headers.get("Expect", "").lower() == "100-continue":
                    await client.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    client.writer.output_size = 0  # that was no part of the answer
                return await client.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_long from None
        except TimeoutError:
            said = f"the body did not come within {self.settings.body_timeout_s:g} s"
            raise RefusedError(408, "body_timeout", said) from None
        except web.RequestPayloadError:
            raise RefusedError(400, "bad_request", "the body is not as its headers say") from None


def _object(given: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(given)
    except (ValueError, RecursionError):
        raise RefusedError(400, "bad_json", "the body is not JSON; send an object") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "bad_json", "the body is no JSON object; send one")
    return body


def serve(settings: RouteSettings) -> int:
    """Until SIGTERM or SIGINT; requests that are under way may then end, a second signal ends them.
    Returns how many did not end. Raises SettingsError, RegistryError, and OSError if it cannot
    listen."""
    router_of(
        settings.router, bool(settings.kv_events), settings.profile
    )  # what is wrong is said before anything starts
    model_of(settings.profile)
    read_clients(settings.clients)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    return asyncio.run(until_told(settings, lambda url: print(f"listening on {url}", flush=True)))


async def until_told(settings: RouteSettings, listening: Callable[[str], None]) -> int:
    told, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear() -> None:
        (again if told.is_set() else told).set()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, hear)
    front = Front(settings)
    try:
        try:
            port = await front.start()
        except socket.gaierror as error:
            why = f"--host {settings.host}: {error.strerror}; give an address of this machine"
            raise SettingsError(why) from None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        listening(f"http://{host}:{port}")
        await told.wait()
        drained = asyncio.create_task(front.drain())
        stopped = asyncio.create_task(again.wait())
        await asyncio.wait((drained, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return drained.result() if drained.done() else front.under_way
    finally:
        await front.stop()
