"""A steered server without vLLM: an engine that computes what it is granted, and the middleware in
front of an application that answers with what it was sent."""

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace

from twinserve.backends.live.serving.attributes import CheckAttributes, read_attributes
from twinserve.backends.live.serving.clients import ALL_TRUSTED, Clients
from twinserve.backends.live.serving.decider import Decider
from twinserve.backends.live.serving.options import EngineFacts, build_core, read_options


def decider_for(
    policy: str | dict, seats: int = 1, asynchronous: bool = False, blocks: int = 0, **given
) -> Decider:
    """blocks: of 8 tokens; 0: enough. given: to the Decider."""
    options = policy if isinstance(policy, dict) else {"policy": policy}
    facts = EngineFacts(blocks or 64 + seats, 8, seats, 64, 128, 1024, True)
    return Decider(build_core(read_options(options), facts, asynchronous), **given)


class Engine:
    """A server with few seats, whose requests end with their `output`-th token."""

    def __init__(
        self, policy: str | dict, clients: Clients = ALL_TRUSTED, seats: int = 1, **given
    ) -> None:
        self.decider = decider_for(policy, seats, clients=clients, **given)
        self.now = self.sent = 0
        self.left: dict[str, int] = {}
        self.order: list[str] = []  # names in which requests got their first token

    @property
    def policy(self):
        return self.decider.core.policy

    def send(
        self, said: dict | None = None, prompt: int = 10, output: int = 1, client: str | None = None
    ) -> str:
        stamp = {} if client is None else {"twinserve_client": client}
        read = read_attributes({**(said or {}), **stamp})
        assert self.decider.refusal(read) == ""
        name = f"{client or read.app or 'alone'}-{self.sent}"
        self.sent += 1
        self.left[name] = output
        at = self.now + 0.001 * self.sent
        self.decider.submit(name, prompt, read, at, most_tokens=prompt + output)
        return name

    def row(self, name: str) -> int:
        return self.decider.rows[name]

    def group(self, name: str) -> int:
        return int(self.decider.core.requests.group[self.row(name)])

    def step(self) -> list[str]:
        """The names that got a token."""
        self.now += 1
        core = self.decider.core
        if not self.decider.plan(float(self.now)).grants:
            return []
        plan = self.decider._steps[0].plan
        # an asynchronous one shows its step as ended; here it has whole prompts
        rows = plan.rows if core.asynchronous else plan.rows[core.emitting(plan)]
        emitted = {core.requests.ids[row] for row in rows.tolist()}
        self.order += [name for name in emitted if name not in self.order]
        for name in emitted:
            self.left[name] -= 1
        ended = {name for name in emitted if not self.left[name]}
        self.decider.complete(self.now + 0.5, emitted, ended, {})
        self.decider.check()
        return sorted(emitted)

    def drain(self) -> list[str]:
        """Names in the order in which requests were served."""
        while self.decider.rows:
            self.step()
            assert self.now < 200_000, "requests wait for ever"
        return self.order


@dataclass(frozen=True)
class Answer:
    """got, told: body and headers that the application got; None where it was not asked."""

    status: int
    body: bytes
    headers: dict[bytes, bytes]
    got: bytes | None
    told: dict[bytes, bytes]

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


def ask(
    body: bytes | dict,
    headers: list | None = None,
    method: str = "POST",
    pieces: int = 1,
    where: str = "vllm_config",
    **options,
) -> Answer:
    """What the middleware answers. where: vLLM keeps its settings, in the state of its application;
    options: of the scheduler; none: an application without settings."""
    given = json.dumps(body).encode() if isinstance(body, dict) else body
    size = -(-len(given) // pieces) or 1
    parts = [given[i : i + size] for i in range(0, len(given), size)] or [b""]
    inbox = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    seen: dict = {}
    outbox: list[dict] = []

    async def application(scope, receive, send):
        got = b""
        while True:
            message = await receive()
            got += message["body"]
            if not message.get("more_body"):
                break
        seen["got"], seen["told"] = got, dict(scope.get("headers", []))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive():
        return inbox.pop(0)

    async def send(message):
        outbox.append(message)

    scope: dict = {"type": "http", "method": method}
    if options:
        scope["headers"] = [(b"content-length", b"%d" % len(given)), *(headers or [])]
        state = {where: SimpleNamespace(additional_config=options)}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(**state))
    asyncio.run(CheckAttributes(application)(scope, receive, send))
    start, end = outbox
    return Answer(
        start["status"], end["body"], dict(start["headers"]), seen.get("got"), seen.get("told", {})
    )
