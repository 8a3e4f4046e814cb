"""Write a run's tables as Parquet. Recorded columns are written in parts, and take no pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinserve.errors import worded
from twinserve.sim.results.folders import ResultsError
from twinserve.sim.results.steps import is_frame

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1 << 20  # rows of a row group: what pyarrow writes by default


def write_table(
    path: Path,
    tables: list[Any],
    schema: Mapping[str, str],
    metadata: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write `tables` to `path`, one behind the other: frames, Columns, or recorded tables.

    schema  type of each column by name. These columns come first; further ones follow unchanged

    Raises ResultsError for a missing column or another type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(tables) > 1:
        parts = iter([pa.concat_tables([_table(one, schema, path.name) for one in tables])])
    else:
        parts = (_table(part, schema, path.name) for part in _parts(tables[0]))
    first = next(parts).replace_schema_metadata(metadata)
    with pq.ParquetWriter(path, first.schema, compression="zstd", compression_level=3) as writer:
        writer.write_table(first, ROWS)
        del first
        for part in parts:
            writer.write_table(part.replace_schema_metadata(metadata), ROWS)


def _parts(table: Any) -> Iterator[Any]:
    if is_frame(table):
        yield table
        return
    for begin in range(0, max(len(table), 1), ROWS):
        yield table.part(begin, min(begin + ROWS, len(table)))


def _table(part: Any, schema: Mapping[str, str], where: str) -> pa.Table:
    import pyarrow as pa

    missing = [name for name in schema if name not in part]
    if missing:
        raise ResultsError(f"{where}: no column {', '.join(missing)}; the rows are incomplete")
    columns = {}
    for name in (*schema, *(column for column in part if column not in schema)):
        try:
            columns[name] = _array(part[name], schema.get(name))
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as error:
            reason = (str(error).splitlines() or [worded(error)])[0]
            raise ResultsError(
                f"{where}: column {name} is not {schema.get(name)}: {reason}"
            ) from error
    # pandas' own metadata names its version: it would make the bytes depend on it for nothing.
    return pa.table(columns)


def _array(values: Any, kind: str | None) -> pa.Array:
    """Return a column in Arrow. A missing text becomes a null; NaN stays NaN in float columns."""
    import pyarrow as pa

    if kind == "double":
        return pa.array(np.asarray(values, np.float64), pa.float64())
    if kind is None and isinstance(values, np.ndarray) and values.dtype.kind in "OU":
        kind = "large_string"  # as that of a frame
    return pa.Array.from_pandas(values, type=kind and pa.type_for_alias(kind))
