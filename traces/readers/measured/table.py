"""Any CSV file or JSON lines, the columns named by the caller: arrival=ts,prompt=in,output=out.

    arrival, prompt, output      when a request was sent, tokens; all that a workload needs
    ttft, tpot, e2el, queued     latencies, for a measurement
    first, end                   moments of the first token and of the last, instead of latencies
    id, session, turn, class, priority, error, status

A column of times is in seconds, or says its unit: `arrival=ts:ms`. Moments may be calendar times
(ISO 8601, all in a zone, or none). `error` is empty for a request that was served;
`status` is a code of HTTP or a word, as gateways log them. `class` is rt or be. Commas, semicolons
or tabs stand between columns. A field of a JSON object inside another is `outer.inner`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.columns import shown
from twinserve.traces.readers.csvfile import Table, number_of
from twinserve.traces.readers.jsonl import parse
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "csv"
LATENCIES = ("ttft", "tpot", "e2el", "queued")
MOMENTS = {"arrival": "arrival", "first": "ttft", "end": "e2el"}  # and what they tell
TIMES = (*MOMENTS, *LATENCIES)
TEXTS = ("id", "session", "class", "error", "status")
FIELDS = (*TIMES, "prompt", "output", *TEXTS, "turn", "priority")
# As LiteLLM and Envoy have them; no word at all says nothing.
_SERVED = re.compile(
    r"(?:2\d\d(?:\.0)?(?: .*)?|success\w*|succeeded|ok|completed?|finished|done|true|)",
    re.IGNORECASE,
)
_ZONE = re.compile(r"[T ].*(Z|[+-]\d\d(:?\d\d)?)$", re.IGNORECASE)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_columns(text: str) -> dict[str, tuple[str, str]]:
    """Field -> column and unit, of `arrival=ts:ms,prompt=in`. Raises WorkloadError."""
    found: dict[str, tuple[str, str]] = {}
    for part in text.split(","):
        field, _, column = (word.strip() for word in part.partition("="))
        if field not in FIELDS or not column:
            raise WorkloadError(
                f"--columns: {shown(part)} is not understood: write FIELD=COLUMN, with FIELD of "
                f"{', '.join(FIELDS)}"
            )
        if field in found:
            raise WorkloadError(f"--columns: {field} is given twice: keep one")
        name, colon, unit = column.rpartition(":")
        if field in TIMES and colon and unit in UNITS:
            found[field] = (name, unit)
        else:
            found[field] = (column, "s")
    return found


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a CSV file. Raises WorkloadError."""
    if options.columns is None:
        raise WorkloadError(
            f"{path}: a CSV file needs its columns named: twinserve trace convert --columns "
            "arrival=COLUMN,prompt=COLUMN,output=COLUMN"
        )
    names = parse_columns(options.columns)
    table = (
        Objects(data, path)
        if data.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in b"{["
        else Table(data, path)
    )
    table.require(*(column for column, _ in names.values()))
    others = [field for field in names if field not in MOMENTS]
    columns = {field: _field(table, field, *names[field]) for field in others}
    columns |= _moments(table, names)
    unit = {f"{field}_s": columns.get(field) for field in ("arrival", *LATENCIES)}
    return measured(
        NAME,
        table.rows,
        **unit,
        prompt_tokens=columns.get("prompt"),
        output_tokens=columns.get("output"),
        priority=columns.get("priority"),
        turn=columns.get("turn"),
        service_class=columns.get("class"),
        errors=_errors(columns),
        ids=columns.get("id"),
        session=columns.get("session"),
        notices=table.unused([column.lower() for column, _ in names.values()]),
    )


class Objects(Table):
    """JSON lines, or one array of objects, as a table."""

    def __init__(self, data: bytes, path: str):
        rows, self.rows = parse(data, path)
        flat = [dict(_leaves(row)) for row in rows]
        self.titles = list(dict.fromkeys(name for row in flat for name in row))
        self.names = [name.lower() for name in self.titles]
        self.columns = {name.lower(): [row.get(name) for row in flat] for name in self.titles}

    def texts(self, name: str) -> list[str]:
        values = self.columns[name.lower()]
        return ["" if value is None else str(value).strip() for value in values]

    def loose_numbers(self, name: str) -> Sequence:
        values = self.columns[name.lower()]
        return [number_of(value) if isinstance(value, str) else value for value in values]


def _leaves(row: Mapping, before: str = "") -> Iterator[tuple[str, object]]:
    """Names and values, those of objects inside as `outer.inner`."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _errors(columns: Mapping[str, Field]) -> list[str] | None:
    """What went wrong with each request, empty where nothing did."""
    told = [columns[name].values for name in ("error", "status") if name in columns]
    return [str(next(filter(None, said), "")) for said in zip(*told, strict=True)] or None


def _field(table: Table, field: str, column: str, unit: str) -> Field:
    if field in TEXTS:
        values = [value or None for value in table.texts(column)]
        if field == "status":
            values = [v and (None if _SERVED.fullmatch(v) else f"status {v}") for v in values]
        return Field(column, values)
    return Field(column, table.loose_numbers(column), UNITS[unit])


def _moments(table: Table, names: Mapping[str, tuple[str, str]]) -> dict[str, Field]:
    """Arrivals, and the latencies that other moments tell. Raises WorkloadError."""
    found: dict[str, Field] = {}
    base, sent = None, np.array([])
    for field, told in MOMENTS.items():
        if field not in names:
            continue
        if field != told and told in names:
            raise WorkloadError(f"--columns: {field} and {told} say the same: keep one")
        if "arrival" not in names:
            raise WorkloadError(f"--columns: {field} is counted from an arrival: name that, too")
        column, unit = names[field]
        values: Sequence = table.loose_numbers(column)
        if not any(isinstance(value, (int, float)) for value in values):
            values, base = _stamps(table, column, base)
        seconds = np.array([v if isinstance(v, (int, float)) else np.nan for v in values])
        seconds = seconds * UNITS[unit]
        sent = seconds if field == told else sent
        found[told] = Field(column, values, UNITS[unit])
        if field != told:
            found[told] = Field(column, seconds - sent)
    return found


def _stamps(table: Table, column: str, base: Any) -> tuple[list[float | str | None], Any]:
    """Seconds of calendar times from the first arrival; what is none stays as it is. base: the
    first arrival, and whether arrivals have a zone. Raises WorkloadError if some times have one."""
    import pandas as pd

    values = table.texts(column)
    plain = [re.sub(r"(:\d\d),(\d)", r"\1.\2", text) for text in values]  # 10:00:00,5
    times = pd.to_datetime(pd.Series(plain), format="ISO8601", utc=True, errors="coerce")
    zoned = [_ZONE.search(text) is not None for text in values]
    first, has_zone = base or (times.min(), any(zoned))
    for row, known in enumerate(times.notna()):
        if known and zoned[row] != has_zone:
            which = "no zone, unlike other times" if has_zone else "a zone, unlike other times"
            table.rows.fail(row, column, f"has {which}", "give every time a zone, or none")
    seconds = (times - first).dt.total_seconds().tolist()
    pairs = zip(values, seconds, strict=True)
    return [(text or None) if at != at else at for text, at in pairs], (first, has_zone)
