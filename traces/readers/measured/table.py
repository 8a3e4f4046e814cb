"""Any CSV file, its columns named by the caller: arrival=ts,prompt=in,output=out.

    arrival, prompt, output      when a request was sent, tokens; all that a workload needs
    ttft, tpot, e2el, queued     latencies, for a measurement
    id, session, turn, class, priority, error

A column of times is in seconds, or says its unit: `arrival=ts:ms`. Arrivals may be calendar times
(ISO 8601, in any zone; without one in UTC). `error` is empty for a request that was served. `class`
is rt or be. Commas, semicolons or tabs stand between columns.
"""

from __future__ import annotations

import re

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.columns import shown
from twinserve.traces.readers.csvfile import Table
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "csv"
TIMES = ("arrival", "ttft", "tpot", "e2el", "queued")
TEXTS = ("id", "session", "class", "error")
FIELDS = (*TIMES, "prompt", "output", *TEXTS, "turn", "priority")
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
            raise WorkloadError(f"--columns: {field} stands twice: keep one")
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
    table = Table(data, path)
    table.require(*(column for column, _ in names.values()))
    columns = {field: _field(table, field, *names[field]) for field in names}
    unit = {f"{field}_s": columns.get(field) for field in TIMES}
    return measured(
        NAME,
        table.rows,
        **unit,
        prompt_tokens=columns.get("prompt"),
        output_tokens=columns.get("output"),
        priority=columns.get("priority"),
        turn=columns.get("turn"),
        service_class=columns.get("class"),
        errors=[str(value or "") for value in columns["error"].values]
        if "error" in names
        else None,
        ids=columns.get("id"),
        session=columns.get("session"),
        notices=table.unused([column.lower() for column, _ in names.values()]),
    )


def _field(table: Table, field: str, column: str, unit: str) -> Field:
    if field in TEXTS:
        return Field(column, [value or None for value in table.text(column).to_pylist()])
    values = table.loose_numbers(column)
    if field == "arrival" and not any(isinstance(value, float) for value in values):
        return Field(column, _stamps(table.text(column).to_pylist()))
    return Field(column, values, UNITS[unit])


def _stamps(values: list[str]) -> list[float | str | None]:
    """Seconds of calendar times from the first; what is none stays as it is."""
    import pandas as pd

    plain = [re.sub(r"(:\d\d),(\d)", r"\1.\2", text) for text in values]  # 10:00:00,5
    times = pd.to_datetime(pd.Series(plain), format="ISO8601", utc=True, errors="coerce")
    seconds = (times - times.min()).dt.total_seconds().tolist()
    return [(text or None) if at != at else at for text, at in zip(values, seconds, strict=True)]
