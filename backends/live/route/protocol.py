"""aiohttp's HTTP server, with errors of its parser in the form of all others."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from twinserve.backends.live.route.messages import error_body

LINGERS_S = 1.0  # what was refused may still come to its end, so that the client sees why


class _Connection(RequestHandler):
    """What is no HTTP, or has a head that is too long, ends here; so does a connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._manager
        if isinstance(server, HttpServer) and server.full:
            server.count("too_many_connections")
            other = _TooMany()
            cast("asyncio.Transport", transport).set_protocol(other)
            other.connection_made(transport)
            return
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        server = self._manager
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log_exception("a request was not answered", exc_info=exc)
            kind, said = "internal_error", "route failed on this request; its log says how"
        elif exc is not None and "LineTooLong" in type(exc).__name__:
            status, kind = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large"
            said = "the request line or a header is too long; send less"
        else:
            kind, said = "bad_request", "this is no HTTP request that route can read"
        if isinstance(server, HttpServer):
            server.count(kind)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has started already")
        answer = web.Response(
            status=status, body=error_body(int(status), kind, said), content_type="application/json"
        )
        answer.force_close()
        return answer


class _TooMany(asyncio.Protocol):
    """A connection beyond the limit gets an answer before it asks, and its end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        said = "too many clients are connected; try again later"
        body = error_body(503, "too_many_connections", said)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()  # what the client still sends would else undo the answer
            asyncio.get_running_loop().call_later(LINGERS_S, transport.abort)
        else:
            transport.close()


class HttpServer(web.Server):
    """A factory of connections, for `loop.create_server`. most: connections at once.
    count: called with the kind of each error that they answer."""

    def __init__(
        self, handler, body_bytes: int, most: int, count: Callable[[str], None], **limits
    ) -> None:
        self._body_bytes, self._most, self.count = body_bytes, most, count
        super().__init__(
            handler, request_factory=self._request, handler_cancellation=True, **limits
        )

    def _request(self, message, payload, protocol, writer, task) -> web.BaseRequest:
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=self._body_bytes,
        )

    @property
    def full(self) -> bool:
        return len(self.connections) >= self._most

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)
