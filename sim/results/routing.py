"""Routing records: all inputs of a live router and its answers, in order.

FILE.jsonl.gz holds one JSON array a line. The first has the record's version, the router and its
workers. Each other line is an event: its time (seconds of the front's clock), kind and fields
(`KINDS`). Requests have numbers and no text. Prefixes are the numbers of the KV blocks that the
router compared. A worker that restarts is a new replica.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

from pydantic import Field, Strict, TypeAdapter, ValidationError

from twinserve.formats import Format, parse_json, whole_file
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.recorder import Load

ROUTING: Format[list[list]] = Format(
    "routing records", version=1, by="twinserve route --record FILE", oldest=1
)
_NUMBER = "routing"
_Whole = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_Number = Annotated[int, Strict(), Field(ge=-1, lt=2**63)]  # -1: none
_Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Seconds = Annotated[_Float, Field(ge=0, le=1e12)]  # of a clock
_Word = Annotated[str, Strict()]
# more than any front gives out; routers keep tables that are as long as the largest
_Contents = list[Annotated[int, Strict(), Field(ge=0, lt=2**28)]]
_Load = tuple[_Seconds, _Whole, _Whole, _Whole, _Whole]
# fields of an event, after its time and kind
KINDS: dict[str, dict[str, Any]] = {
    "came": {
        "replica": _Whole,
        "worker": _Whole,
        "num_blocks": _Whole,
        "block_tokens": Annotated[_Whole, Field(gt=0)],
        "load": _Load,
    },
    "failed": {"replica": _Whole},
    "measured": {"replica": _Whole, "load": _Load},
    "heard": {"replica": _Whole, "stored": Annotated[bool, Strict()], "contents": _Contents},
    "request": {
        "number": _Whole,
        "id": _Word,
        "values": dict[str, _Number | _Float | None],
        "group": _Number,
        "affinity": _Number,
        "contents": dict[int, _Contents],
    },
    # view: of each replica that is up: number, requests in flight, load. choice: a replica, or the
    # name of a Verdict; avoided: replicas that are not to be chosen
    "asked": {
        "number": _Whole,
        "avoided": list[_Whole],
        "choice": _Whole | Literal["HOLD", "REJECT"],
        "view": list[tuple[_Whole, _Whole, _Load]],
    },
    "sent": {"number": _Whole, "replica": _Whole},
    "first token": {"number": _Whole, "replica": _Whole},
    "ended": {"number": _Whole, "replica": _Whole},
    "forgotten": {"affinity": _Number},
}


class Event(NamedTuple):
    """fields  by the names of `KINDS`"""

    at_s: float
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Routing:
    """router   as on the command line; profile: of its workers, or None
    workers  URLs"""

    router: str
    profile: str | None
    workers: list[str]
    events: list[Event]


class RoutingWriter:
    """Write a record while the router runs; `path` appears when it is closed. Raises OSError."""

    def __init__(self, path: Path, router: str, profile: str | None, workers: list[str]) -> None:
        self._whole: AbstractContextManager[Path] = whole_file(path)
        partial = self._whole.__enter__()
        head = {"router": router, "profile": profile, "workers": workers}
        self._file: IO[bytes] = gzip.open(partial, "wb", compresslevel=1)
        try:
            self._line({_NUMBER: ROUTING.version, **head})
        except OSError as error:
            self.abandon(error)
            raise

    def note(self, at_s: float, kind: str, *fields: Any) -> None:
        """Record an event. fields: in the order of `KINDS`."""
        assert len(fields) == len(KINDS[kind]), kind
        self._line([at_s, kind, *fields])

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # the end did not fit
            self.abandon(error)
            raise
        self._whole.__exit__(None, None, None)

    def abandon(self, error: OSError) -> None:
        """Delete the record. error: its cause, which gets the file's name."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._whole.__exit__(type(error), error, error.__traceback__)

    def _line(self, entry: object) -> None:
        said = json.dumps(entry, separators=(",", ":"), allow_nan=False)
        self._file.write(said.encode() + b"\n")


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's columns for a record; a missing objective is None."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in values.items()
    }


def read_routing(path: Path) -> Routing:
    """Read a record. Raises ResultsError: no such file, torn, no routing record, or of a later
    version; OSError if the file cannot be read."""
    try:
        opened = path.open("rb")
    except FileNotFoundError:
        raise ResultsError(
            f"{path}: there is no routing record; route with --record FILE"
        ) from None
    with opened:
        try:
            with gzip.open(opened) as content:
                lines = [parse_json(line) for line in content]
            version = ROUTING.check(lines[0][_NUMBER], path, ResultsError)
            head, *rest = ROUTING.upgraded(lines, version)
            named = _HEAD.validate_python((head["router"], head["profile"], head["workers"]))
            return Routing(*named, list(_events(rest)))
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except ResultsError:
            raise
        except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
            why = " ".join(str(error).split())
    raise ResultsError(f"{path}: torn, or not a routing record ({why}); record again")


_HEAD: TypeAdapter = TypeAdapter(tuple[_Word, _Word | None, list[_Word]])


def _events(lines: list[list]) -> Iterator[Event]:
    """Raise ValueError if an event has a wrong form, or cannot follow the others."""
    lives = _Lives()
    for number, (at_s, kind, *fields) in enumerate(lines, 2):
        try:
            time_s, *values = _fields(kind).validate_python((at_s, *fields))
            event = Event(time_s, kind, dict(zip(KINDS[kind], values, strict=True)))
            fits = lives.follow(event)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"line {number}: {kind}: {first['msg']}") from None
        if not fits:
            raise ValueError(f"line {number}: {kind}: names what was not recorded before")
        yield event


@cache
def _fields(kind: str) -> TypeAdapter:
    """Return the types of an event's time and its fields."""
    return TypeAdapter(tuple[_Seconds, *KINDS[kind].values()])  # type: ignore[misc]


class _Lives:
    """Check events against the workers and requests so far, so that a later reader need not."""

    def __init__(self) -> None:
        self._replicas = 0
        self._up: list[int] = []
        self._requests: set[int] = set()
        self._stays: set[tuple[int, int]] = set()

    def follow(self, event: Event) -> bool:
        """Return whether the event can follow the earlier ones."""
        told, kind = event.fields, event.kind
        replica, number = told.get("replica", -1), told.get("number", -1)
        if kind == "came":
            self._up.append(replica)
            self._replicas += 1
            return replica == self._replicas - 1
        if kind == "request":
            self._requests.add(number)
            return type(told["values"].get("prompt_tokens")) is int
        if kind == "asked":
            up = [seen[0] for seen in told["view"]]
            some_left = set(told["avoided"]) < set(up)
            return number in self._requests and up == self._up and some_left
        if kind in ("first token", "ended"):
            known = (number, replica) in self._stays
            if kind == "ended":
                self._stays.discard((number, replica))
            return known
        if kind == "forgotten":
            return True
        known = replica in self._up
        if kind == "sent":
            known &= number in self._requests and (number, replica) not in self._stays
            self._stays.add((number, replica))
        elif kind == "failed" and known:
            self._up.remove(replica)
        return known


def fields_of(load: Load) -> tuple[float, int, int, int, int]:
    return load.at_s, load.running, load.waiting, load.used, load.total


def load_of(fields: tuple[float, int, int, int, int]) -> Load:
    """Return the inverse of `fields_of`."""
    return Load(*fields)
