"""What a client says about a request, in `vllm_xargs`: read and checked. Needs neither vLLM nor a
web framework.

    {"class": "rt" | "be", "priority": 0, "slo_ttft_s": 0.4, "slo_tpot_s": 0.2,
     "app": "agent-7", "app_class": "CC", "app_text": "write a ..", "app_requests": 12, "stage": 1}

All are optional. Other names are left to their owners, unless they look like a mistyped one
of these. The engine reads these between two steps, so all sizes are bounded, and looked at before
anything that takes time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinserve.backends.live.serving.prometheus import PolicyMetrics
from twinserve.policies.requests import RequestClass

if TYPE_CHECKING:
    from twinserve.backends.live.serving.gate import Gate, Verdict

_NOT_BELIEVED = b"x-twinserve-not-believed"
_CLASSES = {"rt": RequestClass.REAL_TIME, "be": RequestClass.BEST_EFFORT}
_OF_APPS = ("app_class", "app_text", "app_requests", "stage")  # say something of an application
NAMES = ("class", "priority", "slo_ttft_s", "slo_tpot_s", "app", *_OF_APPS)
_LONGEST_NAME = 256  # characters of the name of an application or of its class
_LONGEST_TEXT = 65_536  # characters of its input text
# whose request it is, as the server's own middleware says (serving/gate.py); no client may say so
STAMP = "twinserve_client"
_MOST_NAMES = 48  # in vllm_xargs, those of others included
_LONGEST_KEY = 64  # characters of such a name
_MOST_OF_OTHERS = 65_536  # characters and elements of their values together
_MISTYPED = 28  # longer names are not like one of ours
MOST = 1_000_000  # of a priority, either way, of stages and of requests
LEAST_S, MOST_S = 0.001, 86_400.0  # objectives
# put beside what the client said
_OF_SERVER = frozenset({STAMP, "kv_transfer_params", "ec_transfer_params"})


class BadAttributeError(ValueError):
    """An impossible attribute; one line for the client."""


@dataclass(frozen=True)
class RequestAttributes:
    """Seconds; NaN if the client named no objective. priority None: the request's own. client:
    whose it is, as the server found out; None if it did not look."""

    service_class: RequestClass = RequestClass.REAL_TIME
    priority: int | None = None
    slo_ttft_s: float = math.nan
    slo_tpot_s: float = math.nan
    app: str | None = None
    app_class: str | None = None
    app_text: str | None = None
    app_requests: int | None = None
    stage: int = 0
    client: str | None = None


def read_attributes(given: Mapping[str, Any] | None) -> RequestAttributes:
    """Return the attributes of a request. Raises BadAttributeError with one line."""
    if given is None:
        return RequestAttributes()
    if not isinstance(given, Mapping):
        raise BadAttributeError(
            f"vllm_xargs must be an object of names and values, not {_shown(given)}"
        )
    if len(given) > _MOST_NAMES:
        raise BadAttributeError(f"vllm_xargs has {len(given):,} names; send at most {_MOST_NAMES}")
    _check_others([name for name in given if name not in NAMES and name not in _OF_SERVER], given)
    service_class = given.get("class", "rt")
    if not isinstance(service_class, str) or service_class not in _CLASSES:
        raise BadAttributeError(
            "vllm_xargs.class must be 'rt' (real-time) or 'be' (best-effort), not "
            f"{_shown(service_class)}"
        )
    app = _text(given, "app", _LONGEST_NAME)
    for name in _OF_APPS:
        if name in given and app is None:
            raise BadAttributeError(f"vllm_xargs.{name} is of an application; name it with app")
    return RequestAttributes(
        service_class=_CLASSES[service_class],
        priority=_integer(given, "priority", -MOST) if "priority" in given else None,
        slo_ttft_s=_seconds(given, "slo_ttft_s"),
        slo_tpot_s=_seconds(given, "slo_tpot_s"),
        app=app,
        app_class=_text(given, "app_class", _LONGEST_NAME),
        app_text=_text(given, "app_text", _LONGEST_TEXT),
        app_requests=_integer(given, "app_requests", 1) if "app_requests" in given else None,
        stage=_integer(given, "stage", 0) if "stage" in given else 0,
        client=_text(given, STAMP, _LONGEST_KEY),
    )


def _check_others(names: list[Any], given: Mapping[str, Any]) -> None:
    """Names that are not ours: short, and none that looks like a mistyped one of ours."""
    room = _MOST_OF_OTHERS
    for name in names:
        if len(str(name)) > _LONGEST_KEY:
            raise BadAttributeError(
                f"vllm_xargs has a name of {len(str(name)):,} characters; send names of at most "
                f"{_LONGEST_KEY}"
            )
        room -= _size(given[name], room)
        if room < 0:
            raise BadAttributeError(
                f"vllm_xargs.{name}: unknown names have values of more than {_MOST_OF_OTHERS:,} "
                "characters in all; send less"
            )
    for name in names:
        if len(str(name)) > _MISTYPED:
            continue
        if close := get_close_matches(str(name), NAMES, n=1):
            raise BadAttributeError(f"vllm_xargs has no {name!r}; did you mean {close[0]!r}?")


def _size(value: Any, most: int) -> int:
    """Characters of a text, or elements of a list and their characters; counted up to `most`."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple) or len(value) > most:
        return len(value) if isinstance(value, list | tuple) else 1
    return sum(1 + len(one) if isinstance(one, str) else 1 for one in value)


def _text(given: Mapping[str, Any], name: str, longest: int) -> str | None:
    value = given.get(name)
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= longest):
        raise BadAttributeError(
            f"vllm_xargs.{name} must be a text of 1 to {longest} characters, not {_shown(value)}"
        )
    return value


def _integer(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise BadAttributeError(
            f"vllm_xargs.{name} must be an integer from {least:,} to {MOST:,}, not {_shown(value)}"
        )
    return value


def _seconds(given: Mapping[str, Any], name: str) -> float:
    if name not in given:
        return math.nan
    value = given[name]
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not LEAST_S <= value <= MOST_S:
        raise BadAttributeError(
            f"vllm_xargs.{name} must be a number of seconds from {LEAST_S:g} to {MOST_S:,.0f}, "
            f"not {_shown(value)}"
        )
    return float(value)


def _shown(value: Any) -> str:
    """A few words of it; nothing of what is large is written out."""
    if isinstance(value, str) and len(value) > 80:
        return f"a text of {len(value):,} characters"
    if isinstance(value, list | tuple | dict) and len(value) > 10:
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "one of more than 63 bits"  # Python refuses to write very long ones
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


Header = tuple[bytes, bytes]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class CheckAttributes:
    """ASGI middleware for `vllm serve --middleware`. A request whose vllm_xargs are wrong, or lack
    what the server's policy needs, gets 400 and one line before anything is queued. The scheduler
    runs in another process and could only answer with a server error. If clients have names, the
    request gets its client's. The answer's header `x-twinserve-not-believed` names the attributes
    that do not count. `GET /metrics` is answered with the scheduler's counts behind vLLM's
    (`prometheus.py`)."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        # not above: it reads these attributes. Not with the first request: that would wait for it
        from twinserve.backends.live.serving.gate import gate_of

        self.app = app
        self._gate_of = gate_of
        self._gate: Gate | None = None  # of the server's policy and clients

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            if scope.get("method") == "GET" and scope.get("path") == "/metrics":
                send = _with_counts(_settings(scope), send)
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        if messages[-1]["type"] != "http.request":
            return  # the client left
        body = b"".join(message.get("body", b"") for message in messages)
        if self._gate is None:
            self._gate = self._gate_of(_settings(scope))
        verdict = self._gate.judge(scope.get("headers", ()), body)
        if verdict.fault:
            await _refuse(send, verdict)
            return
        if verdict.body is not body:
            scope = {**scope, "headers": _of_length(scope.get("headers", ()), len(verdict.body))}
        waiting = [{"type": "http.request", "body": verdict.body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and verdict.unbelieved:
                line = (_NOT_BELIEVED, ", ".join(verdict.unbelieved).encode())
                message = {**message, "headers": [*message.get("headers", ()), line]}
            await send(message)

        await self.app(scope, again, told)


def _settings(scope: Message) -> Any:
    """vLLM keeps them in the application's state."""
    state = getattr(scope.get("app"), "state", None)
    return getattr(state, "vllm_config", None) or getattr(state, "args", None)


def _with_counts(settings: Any, send: Send) -> Send:
    """`send` of an answer in Prometheus' text format, with the scheduler's counts at its end."""
    given = getattr(settings, "additional_config", None) or {}
    if not isinstance(given, Mapping) or not given.get("stats_path"):
        return send
    more = PolicyMetrics(Path(given["stats_path"])).text()

    async def longer(message: Message) -> None:
        if message["type"] == "http.response.start":
            lengths = [int(v) for k, v in message["headers"] if k.lower() == b"content-length"]
            if lengths:
                headers = _of_length(message["headers"], lengths[0] + len(more))
                message = {**message, "headers": headers}
        elif not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + more}
        await send(message)

    return longer


def _of_length(headers: Iterable[Header], length: int) -> list[Header]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


async def _refuse(send: Send, verdict: Verdict) -> None:
    kind = "BadRequestError" if verdict.status < 500 else "InternalServerError"
    error = {"message": verdict.fault, "type": kind, "param": "vllm_xargs", "code": verdict.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": verdict.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
