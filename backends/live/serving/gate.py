"""What the API process does with a request before vLLM sees it: it judges what the client says, and
adds whose request it is. Needs neither vLLM nor a web framework; `CheckAttributes` is in front."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinserve.backends.live.serving.applications import RequestRules
from twinserve.backends.live.serving.attributes import (
    STAMP,
    BadAttributeError,
    RequestAttributes,
    read_attributes,
)
from twinserve.backends.live.serving.clients import Clients, read_clients, stamped
from twinserve.errors import worded
from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy
from twinserve.sim.setup.config import SettingsError

_log = logging.getLogger(__name__)
_OURS = b"vllm_xargs"
_GENERATES = ("prompt", "messages", "input", "token_ids")  # one of these is in a request for text
_ABOUT_APPS = ("app", "app_class", "app_text", "app_requests", "stage")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Verdict:
    """fault: why the request is refused, in one line, or empty. body: as vLLM is to get it.
    unbelieved: names of attributes that count for less than they say."""

    fault: str = ""
    status: int = 400
    body: bytes = b""
    unbelieved: tuple[str, ...] = ()


class Gate:
    """rules: of the server's policy; None: the scheduler alone judges that. clients: None: their
    file cannot be read, which `fault` says."""

    def __init__(
        self, rules: RequestRules | None, clients: Clients | None, fault: str = ""
    ) -> None:
        self._rules, self._clients, self._fault = rules, clients, fault

    def judge(self, headers: Headers, body: bytes) -> Verdict:
        clients = self._clients
        if clients is None:
            return Verdict(self._fault, 500)
        if not body or not (clients.stamped or _OURS in body):
            return Verdict(body=body)
        try:
            parsed = json.loads(body)
            # written anew nothing is escaped that need not be, so that a name is what it looks like
            written = json.dumps(parsed) if clients.stamped else ""
        except (ValueError, RecursionError):
            if clients.stamped:
                return Verdict(
                    "the body is not JSON, which this server needs to identify clients; send JSON"
                )
            return Verdict(body=body)  # the API says so itself
        if f'"{STAMP}"' in written:
            return Verdict(f"clients must not set {STAMP}; leave it out")
        if not isinstance(parsed, dict):
            return Verdict(body=body)
        return self._judge_object(parsed, headers, body)

    def _judge_object(self, parsed: dict[str, Any], headers: Headers, body: bytes) -> Verdict:
        clients = self._clients
        assert clients is not None
        place, name = _place(parsed)
        given = place.get(name)
        try:
            attributes = read_attributes(given)
        except BadAttributeError as error:
            return Verdict(worded(error))
        if clients.stamped:
            client = clients.identify(headers)
            if any(one in parsed for one in (*_GENERATES, "sampling_params")):
                place[name] = stamped(given, client)
                body = json.dumps(parsed).encode()
            attributes = read_attributes(stamped(given, client))
        believed = clients.believed(attributes)
        fault = self._rules.refusal(believed) if self._rules is not None else ""
        return Verdict(fault, body=body, unbelieved=_unbelieved(attributes, believed, given or {}))


def _place(parsed: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Where vLLM looks for the attributes: an object and a name in it. Requests in tokens have
    them in their sampling parameters."""
    sampling = parsed.get("sampling_params")
    if isinstance(sampling, dict) and "vllm_xargs" not in parsed:
        return sampling, "extra_args"
    return parsed, "vllm_xargs"


def _unbelieved(
    said: RequestAttributes, believed: RequestAttributes, given: Mapping[str, Any]
) -> tuple[str, ...]:
    pairs = {
        "class": (said.service_class, believed.service_class),
        "priority": (said.priority, believed.priority),
        "slo_ttft_s": (said.slo_ttft_s, believed.slo_ttft_s),
        "slo_tpot_s": (said.slo_tpot_s, believed.slo_tpot_s),
        **dict.fromkeys(_ABOUT_APPS, (said.app, believed.app)),
    }
    return tuple(name for name, pair in pairs.items() if name in given and not _same(*pair))


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def gate_of(settings: Any) -> Gate:
    """settings: what vLLM keeps in its application's state, with `additional_config`. If it, or
    what it names, is not there the scheduler alone judges."""
    given = getattr(settings, "additional_config", None)
    if not isinstance(given, Mapping):
        return Gate(None, read_clients(None))
    try:
        slo = (given.get("slo_ttft_s"), given.get("slo_tpot_s"))
        clients = read_clients(given.get("clients"), *slo)
    except SettingsError as error:  # it could be read when the engine started
        _log.error("%s", error)
        return Gate(None, None, worded(error))
    return Gate(_rules_of(given), clients)


def _rules_of(given: Mapping[str, Any]) -> RequestRules | None:
    if not isinstance(given.get("policy"), str):
        return None
    # the scheduler has read it before, but a file may be gone since, or not be in this process's
    # sight
    try:
        spec = parse_policy(given["policy"])
        return RequestRules.of(spec.policy, spec.policy.Options(**spec.options))
    except (PolicyError, RegistryError) as error:
        _log.warning("the policy's requests are checked by the scheduler alone: %s", error)
        return None
