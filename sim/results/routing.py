"""Routing records: all that a live router was told and asked, in order, and what it said.

FILE.jsonl.gz holds one JSON array a line: first the record's version, the router and its workers;
then the events, each with its time (seconds of the front's clock), its kind and its fields
(`KINDS`). Requests have numbers, and no text: what their prompts begin with are the numbers of KV
blocks that the router compared. A replica is a life of a worker.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from twinserve.formats import Format, parse_json, whole_file
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.recorder import Load

ROUTING: Format[list[list]] = Format(
    "routing records", version=1, by="twinserve route --record FILE", oldest=1
)
_NUMBER = "routing"
# fields of an event, after its time and kind
KINDS = {
    "came": ("replica", "worker", "num_blocks", "block_tokens", "load"),
    "failed": ("replica",),
    "measured": ("replica", "load"),
    "heard": ("replica", "stored", "contents"),
    "request": ("number", "id", "values", "group", "affinity", "contents"),
    # view: of each replica that is up: number, requests in flight, load. choice: a replica, or the
    # name of a Verdict; avoided: replicas that are not to be chosen
    "asked": ("number", "avoided", "choice", "view"),
    "sent": ("number", "replica"),
    "first token": ("number", "replica"),
    "ended": ("number", "replica"),
    "forgotten": ("affinity",),
}


class Event(NamedTuple):
    """fields  by the names of `KINDS`"""

    at_s: float
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Routing:
    """router   as on the command line; profile: of its workers, or None
    workers  URLs
    """

    router: str
    profile: str | None
    workers: list[str]
    events: list[Event]


class RoutingWriter:
    """A record that is written while the router runs. It takes the place of `path` when it is
    closed, and goes where it is not. Raises OSError."""

    def __init__(self, path: Path, router: str, profile: str | None, workers: list[str]) -> None:
        self._whole: AbstractContextManager[Path] = whole_file(path)
        partial = self._whole.__enter__()
        self._file: IO[bytes] = gzip.open(partial, "wb", compresslevel=1)
        head = {"router": router, "profile": profile, "workers": workers}
        self._line({_NUMBER: ROUTING.version, **head})

    def note(self, at_s: float, kind: str, *fields: Any) -> None:
        """fields: in the order of `KINDS`."""
        assert len(fields) == len(KINDS[kind]), kind
        self._line([at_s, kind, *fields])

    def close(self) -> None:
        self._file.close()
        self._whole.__exit__(None, None, None)

    def abandon(self, error: BaseException) -> None:
        """Nothing is left of it."""
        self._file.close()
        try:
            self._whole.__exit__(type(error), error, error.__traceback__)
        except BaseException as same:
            if same is not error:
                raise

    def _line(self, entry: object) -> None:
        said = json.dumps(entry, separators=(",", ":"), allow_nan=False)
        self._file.write(said.encode() + b"\n")


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a request for a record: no objective is None."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in values.items()
    }


def read_routing(path: Path) -> Routing:
    """Raises ResultsError: no such file, torn, no routing record, or of a later version."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ResultsError(
            f"{path}: there is no routing record; route with --record FILE"
        ) from None
    try:
        lines = [parse_json(line) for line in gzip.decompress(content).splitlines()]
        version = ROUTING.check(lines[0][_NUMBER], path, ResultsError)
        head, *rest = ROUTING.upgraded(lines, version)
        events = [_event(line) for line in rest]
        return Routing(head["router"], head["profile"], list(head["workers"]), events)
    except ResultsError:
        raise
    except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
        raise ResultsError(
            f"{path}: torn, or not a routing record ({' '.join(str(error).split())}); record again"
        ) from None


def _event(line: list) -> Event:
    at_s, kind, *fields = line
    return Event(float(at_s), kind, dict(zip(KINDS[kind], fields, strict=True)))


def fields_of(load: Load) -> list[float]:
    return [load.at_s, load.running, load.waiting, load.used, load.total]


def load_of(fields: list) -> Load:
    """The other way round."""
    at_s, running, waiting, used, total = fields
    return Load(float(at_s), running, waiting, used, total)
