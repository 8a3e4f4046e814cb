"""What a client says about a request, in `vllm_xargs`: read and checked. Needs neither vLLM nor a web framework.

    {"class": "rt" | "be", "priority": 0, "slo_ttft_s": 0.4, "slo_tpot_s": 0.2, "app": "agent-7", "stage": 1}

All are optional. Other names are left to whoever knows them, unless they look like a mistyped one of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ...policies.requests import RequestClass

_CLASSES = {"rt": RequestClass.REAL_TIME, "be": RequestClass.BEST_EFFORT}
NAMES = ("class", "priority", "slo_ttft_s", "slo_tpot_s", "app", "stage")
_LONGEST_NAME = 256  # characters of an application's name
_INT64 = 2**63
_LONGEST_S = 1e9


class BadAttributeError(ValueError):
    """An attribute that cannot be; one line for the client."""


@dataclass(frozen=True)
class RequestAttributes:
    """Seconds; NaN where the client named no objective. priority None: the request's own."""

    klass: RequestClass = RequestClass.REAL_TIME
    priority: int | None = None
    slo_ttft_s: float = math.nan
    slo_tpot_s: float = math.nan
    app: str | None = None
    stage: int = 0


def read_attributes(given: Mapping[str, Any] | None) -> RequestAttributes:
    """Raises BadAttributeError with one line."""
    if given is None:
        return RequestAttributes()
    if not isinstance(given, Mapping):
        raise BadAttributeError(f"vllm_xargs must be an object of names and values, not {_shown(given)}")
    for name in given:
        if name not in NAMES and (close := get_close_matches(str(name), NAMES, n=1)):
            raise BadAttributeError(f"vllm_xargs has no {name!r}; did you mean {close[0]!r}?")
    klass = given.get("class", "rt")
    if not isinstance(klass, str) or klass not in _CLASSES:
        raise BadAttributeError(f"vllm_xargs.class must be 'rt' (real-time) or 'be' (best-effort), not {_shown(klass)}")
    app = given.get("app")
    if app is not None and not (isinstance(app, str) and 0 < len(app) <= _LONGEST_NAME):
        raise BadAttributeError(f"vllm_xargs.app must be a name of 1 to {_LONGEST_NAME} characters, not {_shown(app)}")
    if "stage" in given and app is None:
        raise BadAttributeError("vllm_xargs.stage is a stage of an application; name it with app")
    return RequestAttributes(
        klass=_CLASSES[klass],
        priority=_integer(given, "priority", -_INT64) if "priority" in given else None,
        slo_ttft_s=_seconds(given, "slo_ttft_s"),
        slo_tpot_s=_seconds(given, "slo_tpot_s"),
        app=app,
        stage=_integer(given, "stage", 0) if "stage" in given else 0,
    )


def _integer(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _INT64:
        kind = "an integer of 0 or more" if least == 0 else "an integer"
        raise BadAttributeError(f"vllm_xargs.{name} must be {kind}, not {_shown(value)}")
    return value


def _seconds(given: Mapping[str, Any], name: str) -> float:
    if name not in given:
        return math.nan
    value = given[name]
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 0 < value < _LONGEST_S:
        raise BadAttributeError(f"vllm_xargs.{name} must be a number of seconds above 0, not {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class CheckAttributes:
    """ASGI middleware for `vllm serve --middleware`: a request whose vllm_xargs make no sense is answered with 400 and
    one line, before anything is queued. The scheduler runs in another process and could only answer with a server
    error."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        fault = _fault(b"".join(message.get("body", b"") for message in messages))
        if fault:
            await _refuse(send, fault)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)


def _fault(body: bytes) -> str:
    """What is wrong with the body's vllm_xargs; empty where nothing is, or where it is not ours to judge."""
    if b"vllm_xargs" not in body:
        return ""
    try:
        parsed = json.loads(body)
    except ValueError:
        return ""  # the API says so itself
    if not isinstance(parsed, dict):
        return ""
    try:
        read_attributes(parsed.get("vllm_xargs"))
    except BadAttributeError as error:
        return str(error)
    return ""


async def _refuse(send: Send, line: str) -> None:
    body = json.dumps(
        {"error": {"message": line, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
