"""What a client says about a request, in `vllm_xargs`: read and checked. Needs neither vLLM nor a
web framework.

    {"class": "rt" | "be", "priority": 0, "slo_ttft_s": 0.4, "slo_tpot_s": 0.2,
     "app": "agent-7", "app_class": "CC", "app_text": "write a ..", "app_requests": 12, "stage": 1}

All are optional. Other names are left to whoever knows them, unless they look like a mistyped one
of these. The engine reads these between two steps, so all sizes are bounded, and looked at before
anything that takes time.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from twinserve.policies.requests import RequestClass

_log = logging.getLogger(__name__)
_OURS = b"vllm_xargs"
_CLASSES = {"rt": RequestClass.REAL_TIME, "be": RequestClass.BEST_EFFORT}
_OF_APPS = ("app_class", "app_text", "app_requests", "stage")  # say something of an application
NAMES = ("class", "priority", "slo_ttft_s", "slo_tpot_s", "app", *_OF_APPS)
_LONGEST_NAME = 256  # characters of the name of an application or of its class
_LONGEST_TEXT = 65_536  # characters of its input text
_MOST_NAMES = 48  # in vllm_xargs, those of others included
_LONGEST_KEY = 64  # characters of such a name
_MOST_OF_OTHERS = 65_536  # characters and elements of their values together
_MISTYPED = 28  # longer names are not like one of ours
_MOST = 1_000_000  # of a priority, either way, of stages and of requests
_LEAST_S, _MOST_S = 0.001, 86_400.0  # objectives
# vLLM itself puts these beside what the client said
_OF_VLLM = frozenset({"kv_transfer_params", "ec_transfer_params"})


class BadAttributeError(ValueError):
    """An attribute that cannot be; one line for the client."""


@dataclass(frozen=True)
class RequestAttributes:
    """Seconds; NaN where the client named no objective. priority None: the request's own."""

    service_class: RequestClass = RequestClass.REAL_TIME
    priority: int | None = None
    slo_ttft_s: float = math.nan
    slo_tpot_s: float = math.nan
    app: str | None = None
    app_class: str | None = None
    app_text: str | None = None
    app_requests: int | None = None
    stage: int = 0


def read_attributes(given: Mapping[str, Any] | None) -> RequestAttributes:
    """Raises BadAttributeError with one line."""
    if given is None:
        return RequestAttributes()
    if not isinstance(given, Mapping):
        raise BadAttributeError(
            f"vllm_xargs must be an object of names and values, not {_shown(given)}"
        )
    if len(given) > _MOST_NAMES:
        raise BadAttributeError(f"vllm_xargs has {len(given):,} names; send at most {_MOST_NAMES}")
    _check_others([name for name in given if name not in NAMES and name not in _OF_VLLM], given)
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
        priority=_integer(given, "priority", -_MOST) if "priority" in given else None,
        slo_ttft_s=_seconds(given, "slo_ttft_s"),
        slo_tpot_s=_seconds(given, "slo_tpot_s"),
        app=app,
        app_class=_text(given, "app_class", _LONGEST_NAME),
        app_text=_text(given, "app_text", _LONGEST_TEXT),
        app_requests=_integer(given, "app_requests", 1) if "app_requests" in given else None,
        stage=_integer(given, "stage", 0) if "stage" in given else 0,
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
                f"vllm_xargs.{name}: the values of names that the server does not know are longer "
                f"than {_MOST_OF_OTHERS:,} characters together; send less"
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
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise BadAttributeError(
            f"vllm_xargs.{name} must be an integer from {least:,} to {_MOST:,}, not {_shown(value)}"
        )
    return value


def _seconds(given: Mapping[str, Any], name: str) -> float:
    if name not in given:
        return math.nan
    value = given[name]
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not _LEAST_S <= value <= _MOST_S:
        raise BadAttributeError(
            f"vllm_xargs.{name} must be a number of seconds from {_LEAST_S:g} to {_MOST_S:,.0f}, "
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


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class CheckAttributes:
    """ASGI middleware for `vllm serve --middleware`: a request whose vllm_xargs make no sense, or
    lack what the server's policy needs, is answered with 400 and one line, before anything is
    queued. The scheduler runs in another process and could only answer with a server error."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._refusal: Callable[[RequestAttributes], str] | None = None  # of the server's policy

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if self._refusal is None and _OURS in body:
            self._refusal = _refusal_of(scope)
        fault = _fault(body, self._refusal)
        if fault:
            await _refuse(send, fault)
            return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)


def _refusal_of(scope: Message) -> Callable[[RequestAttributes], str]:
    """What the policy of the server that handles `scope` says of requests; vLLM keeps its settings
    in the application's state. Where they, or what they name, are not there the scheduler alone
    judges."""
    from twinserve.backends.live.serving.applications import RequestRules
    from twinserve.policies.errors import PolicyError
    from twinserve.policies.names import RegistryError
    from twinserve.policies.registry import parse_policy

    state = getattr(scope.get("app"), "state", None)
    settings = getattr(state, "vllm_config", None) or getattr(state, "args", None)
    given = getattr(settings, "additional_config", None)
    if not isinstance(given, Mapping) or not isinstance(given.get("policy"), str):
        return lambda attributes: ""
    # the scheduler has read it before, but a file may be gone since, or not be in this process's
    # sight
    try:
        spec = parse_policy(given["policy"])
        return RequestRules.of(spec.policy, spec.policy.Options(**spec.options)).refusal
    except (PolicyError, RegistryError) as error:
        _log.warning("the policy's requests are judged by the scheduler alone: %s", error)
        return lambda attributes: ""


def _fault(body: bytes, refusal: Callable[[RequestAttributes], str] | None) -> str:
    """What is wrong with the body's vllm_xargs; empty where nothing is, or where it is not ours to
    judge."""
    if _OURS not in body or refusal is None:
        return ""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the API says so itself
    if not isinstance(parsed, dict):
        return ""
    try:
        return refusal(read_attributes(parsed.get("vllm_xargs")))
    except BadAttributeError as error:
        return str(error)


async def _refuse(send: Send, line: str) -> None:
    body = json.dumps(
        {"error": {"message": line, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
