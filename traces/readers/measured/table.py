"""Any CSV file, its columns named by the caller: arrival=ts,prompt=in,output=out.

    arrival, prompt, output      when a request was sent, tokens; all that a workload needs
    ttft, tpot, e2el, queued     latencies, for a measurement
    id, session, turn, class, priority, error

A column of times is in seconds, or says its unit: `arrival=ts:ms`. Arrivals may be calendar times
(ISO 8601). `error` is empty for a request that was served. `class` is rt or be.
"""

from __future__ import annotations

import numpy as np

from twinserve.traces.measurement import Measurement, measured
from twinserve.traces.readers.columns import MAX_SECONDS, shown, unused
from twinserve.traces.readers.csvfile import Table
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import CLASS_NAMES, WorkloadError

NAME = "csv"
TIMES = ("arrival", "ttft", "tpot", "e2el", "queued")
COUNTS = ("prompt", "output")
FIELDS = (*TIMES, *COUNTS, "id", "session", "turn", "class", "priority", "error")
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
    where, n = table.rows, len(table.rows)
    errors = _texts(table, names, "error")
    served = np.array([not error for error in errors], bool) if errors else np.ones(n, bool)
    columns: dict = {}
    if "arrival" in names:
        columns["arrival_s"] = _arrivals(table, *names["arrival"])
    for field in ("ttft", "tpot", "e2el", "queued"):
        if field in names:
            columns[f"{field}_s"] = _seconds(table, *names[field], served)
    for field in COUNTS:
        if field in names:
            values = table.numbers(names[field][0], ~served)
            columns[f"{field}_tokens"] = where.whole(names[field][0], values)
    if "priority" in names:
        values = table.numbers(names["priority"][0])
        columns["priority"] = where.whole(names["priority"][0], values, -(2**53), 2**53)
    if "turn" in names:
        columns["turn"] = where.whole(names["turn"][0], table.numbers(names["turn"][0]))
    if "class" in names:
        columns["service_class"] = _classes(table, names["class"][0])
    sessions = _texts(table, names, "session")
    return measured(
        NAME,
        path,
        n,
        errors=errors or None,
        ids=_texts(table, names, "id"),
        session=[name or None for name in sessions],
        notices=unused(table.names, [column.lower() for column, _ in names.values()]),
        **columns,
    )


def _texts(table: Table, names: dict, field: str) -> list[str]:
    if field not in names:
        return []
    return [value or "" for value in table.text(names[field][0]).to_pylist()]


def _seconds(table: Table, column: str, unit: str, served: np.ndarray) -> np.ndarray:
    """NaN where the cell is empty, and for failed requests."""
    values = table.numbers(column, np.ones(len(table.rows), bool), np.nan)
    given = np.flatnonzero(~np.isnan(values))
    table.rows.kept(given).number(column, values[given], high=MAX_SECONDS / UNITS[unit])
    return np.where(served, values * UNITS[unit], np.nan)


def _arrivals(table: Table, column: str, unit: str) -> np.ndarray:
    """Numbers in their unit, or calendar times, in seconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = table.text(column)
    try:
        seconds = pc.cast(text, "double").to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        zoneless = pc.replace_substring_regex(text, r"(Z|[+-]00:?00)$", "")
        stamps = table.cast(column, pa.timestamp("ns"), "a number or a time in UTC", zoneless)
        ticks = stamps.astype(np.int64)
        return (ticks - ticks.min()) / 1e9
    table.rows.number(column, seconds, high=MAX_SECONDS / UNITS[unit])
    return (seconds - seconds.min()) * UNITS[unit]


def _classes(table: Table, column: str) -> list[str]:
    values = [value or CLASS_NAMES[0] for value in table.text(column).to_pylist()]
    for row, value in enumerate(values):
        if value not in CLASS_NAMES:
            table.rows.fail(row, column, f"is {shown(value)}, not one of {', '.join(CLASS_NAMES)}")
    return values
