"""SGLang's router in a process of its own, over HTTP, before workers that are ours: a worker says
that it got a request, and answers when the test wants it to."""

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

START = "from sglang_router.cli import main; import sys; sys.exit(main())"
PATIENCE_S = 60.0


@dataclass(eq=False)
class Sent:
    """A request under way: the worker that got it, the connections that wait for its answer."""

    worker: int
    answer: asyncio.StreamWriter
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class RealRouter:
    port: int
    arrived: asyncio.Queue = field(default_factory=asyncio.Queue)
    talks: set[asyncio.Task] = field(default_factory=set)
    _idle: list = field(default_factory=list)

    async def send(self, text: str) -> Sent:
        """The router sends a prompt on; which worker got it."""
        client = self._idle.pop() if self._idle else await self._connect()
        _write(client[1], "POST /generate", {"text": text})
        worker, answer = await asyncio.wait_for(self.arrived.get(), PATIENCE_S)
        return Sent(worker, answer, client)

    async def end(self, sent: Sent) -> None:
        """Its worker answers, and its client has the answer."""
        _write(sent.answer, "HTTP/1.1 200 OK", {})
        await asyncio.wait_for(_read(sent.client[0]), PATIENCE_S)
        self._idle.append(sent.client)

    async def workers(self) -> list[dict]:
        """What the router says of them."""
        reader, writer = await self._connect()
        _write(writer, "GET /workers")
        _, body = await asyncio.wait_for(_read(reader), PATIENCE_S)
        writer.close()
        return json.loads(body)["workers"]

    async def add(self, worker_port: int) -> None:
        """Register a worker, and wait until it takes requests."""
        url = f"http://127.0.0.1:{worker_port}"
        reader, writer = await self._connect()
        _write(writer, "POST /workers", {"url": url})
        await asyncio.wait_for(_read(reader), PATIENCE_S)
        writer.close()
        while not any(w["url"] == url and w["is_healthy"] for w in await self.workers()):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)  # its policy learns of it after that

    async def _connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, number: int) -> tuple[asyncio.Server, int]:
        """A worker; the port that it listens on."""

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.talks.add(asyncio.current_task())
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # also a try of HTTP/2
                while True:
                    head, _ = await _read(reader)
                    if head.startswith("POST /generate "):
                        self.arrived.put_nowait((number, writer))
                    else:  # its health, what it is
                        _write(writer, "HTTP/1.1 200 OK", {})
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def real_router(python: str, workers: int, **options: object) -> AsyncIterator[RealRouter]:
    """The running router with so many workers, registered one after the other. options: its own, as
    `balance_abs_threshold`."""
    router = RealRouter(_free_port())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [
        python, "-c", START, "launch", "--host=127.0.0.1", f"--port={router.port}",
        f"--prometheus-port={_free_port()}", "--policy=cache_aware", "--log-level=error",
        "--disable-retries", "--disable-circuit-breaker", "--disable-health-check", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    servers = []
    try:
        await _until_it_listens(router.port, process)
        for number in range(workers):
            server, port = await router.serve(number)
            servers.append(server)
            await router.add(port)
        yield router
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.close()
        if router.talks:  # they see that nobody is there any more
            await asyncio.wait(router.talks, timeout=PATIENCE_S)


async def _until_it_listens(port: int, process: subprocess.Popen) -> None:
    for _ in range(int(PATIENCE_S / 0.1)):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        assert process.poll() is None, "sglang-router ended before it listened"
        await asyncio.sleep(0.1)
    raise AssertionError("sglang-router does not listen")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _write(writer: asyncio.StreamWriter, first: str, content: dict | None = None) -> None:
    """A request (`POST /path`) or an answer (`HTTP/1.1 200 OK`)."""
    body = b"" if content is None else json.dumps(content).encode()
    line = first if first.startswith("HTTP/") else f"{first} HTTP/1.1"
    head = (
        f"{line}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """First line and body of what comes next."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = 0
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return head.split("\r\n", 1)[0], await reader.readexactly(length)
