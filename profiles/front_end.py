"""The front end of a served engine: what lies between a client and the engine's queue (HTTP,
tokenising), and between the engine's tokens and the client (detokenising, HTTP).

load_front_end("vllm")           constants of published measurements
load_front_end("front.json")     a file that `twinserve calibrate --front-end` wrote

A front end has latencies, which do not depend on load, and service times on threads, which make
requests and tokens wait for each other (`twinserve.sim.fleet.front_end`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from functools import cache
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from twinserve.formats import Format, whole_file
from twinserve.profiles.catalog import nearest
from twinserve.profiles.specs import STRICT, ProfileError, one_line, read_json


def _without_steps(terms: dict) -> dict:
    """Version 1 had times in decode steps, and how much repeats differed."""
    if terms.get("response_steps"):
        raise ProfileError(
            "its response_steps are no longer supported; measure the front end again"
        )
    gone = ("response_steps", "spread")
    return {name: term for name, term in terms.items() if name not in gone}


FRONT_END: Format[dict] = Format(
    "front ends",
    version=2,
    by="twinserve calibrate --front-end",
    oldest=1,
    upgrades=(_without_steps,),
)
CLIENTS = ("one-process", "many", "none")
# Of six hosts, where the published times are 1 (docs/profiles.md); a file's fit is 6 to 9 % off the
# CPU time of a load.
HOST_FACTORS, FILE_OFF = (0.8, 1.4), 1.1
MOST_FACTOR = 100.0


@dataclass(frozen=True, config=STRICT)
class Threads:
    """What threads do, in seconds of CPU time on the front end's host.

    accept_s, submit_s  a request: before it is tokenised, and after
    prompt_token_s      a token of its prompt, on the same thread, before the engine
    detokenise_s        the same with the request's first output
    tokenise_s          a token of its prompt, on the tokeniser's thread
    step_s, token_s     a step's outputs: each step, and each token of a request
    chunk_s             each message to a client
    chat_s              a chat on the tokeniser's thread, more than a completion: its template
    launch_s            an engine with no step under way: from a step's begin until the next one is
                        planned
    client_request_s, client_chunk_s  on the client's thread
    host_factor         times all of these on the host of the server that is simulated
    """

    accept_s: float = Field(ge=0, lt=10)
    submit_s: float = Field(ge=0, lt=10)
    prompt_token_s: float = Field(ge=0, lt=1)
    tokenise_s: float = Field(ge=0, lt=1)
    step_s: float = Field(ge=0, lt=10)
    token_s: float = Field(ge=0, lt=1)
    chunk_s: float = Field(ge=0, lt=1)
    detokenise_s: float = Field(0.0, ge=0, lt=1)
    chat_s: float = Field(0.0, ge=0, lt=10)
    launch_s: float = Field(0.0, ge=0, lt=10)
    client_request_s: float = Field(0.0, ge=0, lt=10)
    client_chunk_s: float = Field(0.0, ge=0, lt=1)
    host_factor: float = Field(1.0, gt=0, le=MOST_FACTOR)


@plain_dataclass(frozen=True)
class Serving:
    """How the server is started, and its clients.

    servers          API servers of each engine
    stream_interval  tokens a message of a streamed answer
    stream, chat     whether answers are streamed, and requests are chats
    client           of CLIENTS
    batch_wait_s     seconds that a request waits for others to be tokenised with it
    parse_s          CPU seconds of a chat before it is tokenised: its template is parsed anew
    host_factor      instead of that of the file
    """

    servers: int = 1
    stream_interval: int = 1
    stream: bool = True
    chat: bool = False
    client: str = CLIENTS[0]
    batch_wait_s: float = 0.0
    parse_s: float = 0.0
    host_factor: float | None = None


@dataclass(frozen=True, config=STRICT)
class Service(Threads):
    """Service times on the host that is simulated, 0 where nothing is done, and set up as in
    `Serving`."""

    batch_wait_s: float = 0.0
    servers: int = 1
    stream_interval: int = 1
    client: str = CLIENTS[0]


@plain_dataclass(frozen=True)
class Delays:
    """A front end on an engine: seconds of a request, of each token of its prompt, and of each
    token of its answer, whatever the load; service: what comes on top, None: nothing."""

    request_s: float
    prompt_token_s: float
    response_s: float
    service: Service | None = None

    def request_side(self, prompt_tokens: int) -> float:
        """Seconds from the client's sending to the engine's queue, without queues."""
        return self.request_s + self.prompt_token_s * prompt_tokens


NO_DELAYS = Delays(0.0, 0.0, 0.0)


@dataclass(frozen=True, config=STRICT)
class FrontEnd:
    """The terms of a front end.

    request_s       seconds a request that depend on no load: between threads and processes
    prompt_token_s  seconds a token of the prompt, the same
    response_s      seconds from a token in the engine to its client, the same
    source          origin of the numbers
    fit_error       mean absolute relative error of the client's time to first token beyond the
                    engine's, over lower quartiles of requests that no fit saw; None: not known
    threads         its service times; None: its times depend on no load
    """

    name: str = Field(min_length=1)
    request_s: float = Field(ge=0, lt=1e3)
    prompt_token_s: float = Field(ge=0, lt=1)
    response_s: float = Field(ge=0, lt=1e3)
    source: str = ""
    fit_error: float | None = Field(None, ge=0)
    threads: Threads | None = None

    def on(self, serving: Serving = Serving()) -> Delays:
        """Its seconds in front of an engine."""
        service = None if self.threads is None else service_of(self.threads, serving)
        return Delays(self.request_s, self.prompt_token_s, self.response_s, service)

    def idle_s(self, prompt_tokens: int, serving: Serving = Serving()) -> float:
        """Seconds of a request's time to first token beyond the engine's, if it is the only one."""
        delays = self.on(serving)
        seconds = delays.request_side(prompt_tokens) + delays.response_s
        if (s := delays.service) is not None:
            once = (s.client_request_s, s.accept_s, s.chat_s, s.batch_wait_s, s.submit_s)
            token_s = s.tokenise_s + s.prompt_token_s + s.detokenise_s
            seconds += sum(once) + token_s * prompt_tokens
            seconds += s.step_s + s.token_s + 0.5 * (s.chunk_s + s.client_chunk_s)
        return seconds

    @property
    def host_factors(self) -> tuple[float, float]:
        """Lowest and highest factor of a host of which nothing is known: of a file, by its fit."""
        if self is published().get(self.name):
            return HOST_FACTORS
        factor = 1.0 if self.threads is None else self.threads.host_factor
        return factor / FILE_OFF, min(factor * FILE_OFF, MOST_FACTOR)

    def describe(self, serving: Serving = Serving()) -> str:
        """Its terms, in a line."""
        if self.threads is not None:
            return self._on_threads(service_of(self.threads, serving), serving)
        terms = [f"{1e3 * self.request_s:.3g} ms a request"]
        if self.prompt_token_s:
            terms.append(f"{1e6 * self.prompt_token_s:.3g} us a prompt token")
        if self.response_s:
            terms.append(f"{1e3 * self.response_s:.3g} ms to see a token")
        return f"front end {self.name}: {', '.join(terms)}"

    def _on_threads(self, t: Service, serving: Serving) -> str:
        factor = _host_factor(self.threads, serving)
        kind = "chat" if serving.chat else "request"
        request = 1e3 * (t.accept_s + t.chat_s + t.submit_s)
        prompt = 1e6 * (t.prompt_token_s + t.tokenise_s + t.detokenise_s)
        threads = "one thread" if t.servers == 1 else f"{t.servers} threads"
        terms = [
            f"{threads}, {request:.3g} ms a {kind}",
            f"{prompt:.3g} us a prompt token",
            f"{1e3 * t.step_s:.3g} ms a step",
            f"{1e6 * t.token_s:.3g} us a token",
        ]
        if serving.stream:
            terms.append(f"{1e6 * t.chunk_s:.3g} us a message")
        if t.batch_wait_s:
            terms.append(f"{1e3 * t.batch_wait_s:g} ms until a batch is tokenised")
        if t.stream_interval > 1:
            terms.append(f"{t.stream_interval} tokens a message")
        said = f"front end {self.name}: {', '.join(terms)}; host factor {factor:.3g} in all of them"
        if serving.stream:
            return said
        return f"{said}; not streamed: clients see E2E, and TTFT and TPOT are the server's"


def _host_factor(threads: Threads, serving: Serving) -> float:
    return threads.host_factor if serving.host_factor is None else serving.host_factor


def service_of(threads: Threads, serving: Serving) -> Service:
    """Their service times on the simulated host. ProfileError if these are absurd."""
    factor = _host_factor(threads, serving)
    absent = {"host_factor"} if serving.chat else {"host_factor", "chat_s"}
    absent |= set() if serving.stream else {"chunk_s", "client_chunk_s"}
    absent |= {"client_request_s", "client_chunk_s"} if serving.client == "none" else set()
    times = {name: factor * s for name, s in asdict(threads).items() if name not in absent}
    times["accept_s"] += factor * serving.parse_s
    for name in absent - {"host_factor"}:
        times[name] = 0.0
    set_up = {
        n: getattr(serving, n) for n in ("batch_wait_s", "servers", "stream_interval", "client")
    }
    try:
        return Service(**times, **set_up)
    except ValidationError as error:
        raise ProfileError(f"front end with host factor {factor:g}: {one_line(error)}") from None


@cache
def published() -> dict[str, FrontEnd]:
    """Return the front ends that go by a name."""
    threads = Threads(
        accept_s=0.40e-3,
        submit_s=0.45e-3,
        prompt_token_s=0.77e-6,
        detokenise_s=0.43e-6,
        tokenise_s=1.7e-6,
        step_s=0.27e-3,
        token_s=17e-6,
        chunk_s=28e-6,
        chat_s=0.2e-3,
        launch_s=2.5e-3,
        client_request_s=0.4e-3,
        client_chunk_s=29e-6,
        host_factor=1.2,
    )
    source = "vLLM 0.32's API server before an emulated engine, on one host (docs/profiles.md)"
    return {"vllm": FrontEnd("vllm", 1.3e-3, 0.0, 0.4e-3, source, threads=threads)}


NONE = "none"


def name_and_options(text: str) -> tuple[str, str | None]:
    """`vllm:client=many` as `vllm` and `client=many`; None: no colon, or that of a path."""
    name, colon, options = text.partition(":")
    if name.lower().endswith(".json") or not text.lower().endswith(".json"):
        return name, options if colon else None
    return text, None


def with_options(text: str, options: Mapping[str, object]) -> str | None:
    """The same front end with these options, below those that it has. None if it takes none.
    Raises ProfileError as `load_front_end`."""
    name, rest = name_and_options(text)
    front_end = load_front_end(name)
    if front_end is None or front_end.threads is None:
        return None
    had = [part for part in (rest or "").split(",") if part]
    names = {part.partition("=")[0].strip() for part in had}
    had += [f"{key}={value}" for key, value in options.items() if key not in names]
    return f"{name}:{','.join(had)}"


def load_front_end(name_or_path: str | os.PathLike[str]) -> FrontEnd | None:
    """Return a file (anything that ends in .json), or a published front end; None for `none`.

    ProfileError, one line, otherwise.
    """
    text = os.fspath(name_or_path)
    if text == NONE:
        return None
    if not text.lower().endswith(".json"):
        if text not in published():
            known = [NONE, *published()]
            raise ProfileError(f"no front end {text!r}{nearest(text, known)}; or name a .json file")
        return published()[text]
    terms = FRONT_END.read(read_json(Path(text)), text, ProfileError)
    try:
        return TypeAdapter(FrontEnd).validate_python(terms)
    except ValidationError as error:
        raise ProfileError(f"{text}: {one_line(error)}") from None


def save_front_end(front_end: FrontEnd, path: str | os.PathLike[str]) -> None:
    """Write it as JSON; folders are created."""
    text = json.dumps(FRONT_END.numbered(asdict(front_end)), indent=2) + "\n"
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
