"""Results of a run: rows in memory, and a folder of files.

    run.json            resolved configuration
    summary.json        metrics (docs/metrics.md)
    requests.parquet    one row a request
    placements.parquet  one row a stay of a request on a replica
    replicas.parquet    one row a replica: its parts and its life
    steps.parquet       one row an engine step
    gaps.parquet        inter-token gaps, pooled
    failures.parquet    one row a failure, if the run has failures
    trace.json.gz       optional timeline for Perfetto
    decisions.jsonl.gz  optional log of every plan, to be replayed (sim/results/decisions.py)
    timing.json         wall-clock timings of our own code

run.json has the folder's version (RESULTS, docs/invariants.md). Earlier versions are read, later
ones refused.

The same configuration and seed give the same bytes under the same versions of pyarrow and zlib,
except in timing.json. A folder is renamed to its name when complete, so an interrupted run leaves
no partial results.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinserve.errors import worded
from twinserve.formats import parse_json
from twinserve.sim.results.checked import SHAPES, Shape, check_rows, check_shape
from twinserve.sim.results.columns import OPTIONAL_TABLES, TABLES, Columns, known
from twinserve.sim.results.folders import (
    ResultsError,
    may_replace,
    resolved,
    try_to_write,
    whole_folder,
)
from twinserve.sim.results.steps import FramedGaps, FramedSteps, Gaps, Spread, Steps, is_frame
from twinserve.sim.results.versions import (
    RESULTS,
    Stored,
    made_of,
    one_stay_each,
    up_all_the_time,
    with_ends,
)

if TYPE_CHECKING:
    import pandas as pd
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
        values = np.asarray(values, np.float64)
    if isinstance(values, np.ndarray):
        if kind is None and values.dtype.kind in "OU":
            kind = "large_string"  # as that of a frame
        if (plain := _plain(values, kind)) is not None:
            return plain
    return pa.Array.from_pandas(values, type=kind and pa.type_for_alias(kind))


def _plain(values: np.ndarray, kind: str | None) -> pa.Array | None:
    """Return a column of the plain kinds by its buffers; None for others. Any other way to make an
    array of Arrow imports pandas, which takes longer than a short run."""
    import pyarrow as pa

    if type(values) is not np.ndarray or values.ndim != 1 or not values.dtype.isnative:
        return None
    if kind in ("string", "large_string") and values.dtype.kind in "OU":
        return _text(values, kind)
    if kind in ("bool", None) and values.dtype.kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])
    if kind == "int64" and np.can_cast(values.dtype, np.int64) and values.dtype.kind in "iu":
        values = values.astype(np.int64, copy=False)
    elif kind != "double" and (kind is not None or values.dtype.kind not in "iu"):
        return None
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def _text(values: np.ndarray, kind: str) -> pa.Array | None:
    """Return text, with nulls for missing ones; None if there is something else, or too much."""
    import pyarrow as pa

    there = known(values)
    texts = values[there].tolist()
    try:
        data = "".join(texts).encode()
    except TypeError:
        return None
    wide = kind == "large_string"
    if len(data) >= 1 << 31 and not wide:
        return None
    ends = np.zeros(len(values) + 1, np.int64 if wide else np.int32)
    same = sum(map(len, texts)) == len(data)  # in characters as in bytes
    ends[1:][there] = list(map(len, texts if same else map(str.encode, texts)))
    ends.cumsum(dtype=ends.dtype, out=ends)
    missing = None if there.all() else _bits(there)
    buffers = [missing, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.type_for_alias(kind), len(values), buffers)


def _bits(chosen: np.ndarray) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(chosen, bitorder="little"))


PRINTED_VERSION = 1  # of what `--json` prints of runs
POOL_GROUP = "best-effort pool"  # group of the closed loop's requests; their stage is the batch

_FILES = (
    "run.json",
    "summary.json",
    "timing.json",
    *(f"{name}.parquet" for name in (*TABLES, *OPTIONAL_TABLES)),
    "trace.json.gz",
    "decisions.jsonl.gz",
)
_KV_TOTAL = b"kv_total_blocks"


def pool_request_id(batch: int, i: int) -> str:
    """Return the id of the i-th request of a pool batch."""
    return f"be-{batch}-{i}"


@dataclass
class RunRows:
    """The rows of one run, from which every metric is computed. Columns: REQUESTS, STEPS, GAPS.

    requests  a row for each submitted request (the file has `unsent` too)
    steps     a row for each engine step of all replicas; `step_columns` has them as recorded
    gaps      inter-token gaps pooled over requests; `count` equal gaps may share a row
    kv_total_blocks  KV blocks of the first replica; 0: unbounded
    placements  a row for each stay of a request on a replica; None: not known
    replicas    a row for each replica; None: not known
    unsent      requests not submitted, because an earlier stage or turn did not complete; columns
                as `requests`
    failures    a row for each failure; None: the run has no failures
    """

    requests: Spread = Spread()
    steps: Spread = Spread()
    gaps: Spread = Spread()
    kv_total_blocks: int
    placements: Spread = Spread(optional=True)
    replicas: Spread = Spread(optional=True)
    unsent: Spread = Spread(optional=True)
    failures: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.held("requests"), Columns):
            self.requests = with_ends(self.requests)

    def held(self, name: str) -> Any:
        """Return a table as it is now: a frame, Columns, a recorded table, or None."""
        return self.failures if name == "failures" else self.__dict__[f"_{name}"]

    def _columns(self, name: str) -> Columns | None:
        held = self.held(name)
        return held if held is None or isinstance(held, Columns) else Columns.of_frame(held)

    @property
    def request_columns(self) -> Columns:
        """Columns of `requests` for metrics; no frame is made."""
        found = self._columns("requests")
        assert found is not None
        return found

    @property
    def replica_columns(self) -> Columns | None:
        """Columns of `replicas` for metrics."""
        return self._columns("replicas")

    @property
    def step_columns(self) -> Steps:
        """Columns of `steps` for metrics; a row for each step is made only on demand."""
        held = self.held("steps")
        return FramedSteps(held) if is_frame(held) else held

    @property
    def gap_pools(self) -> Gaps:
        """Pools of `gaps` for metrics."""
        held = self.held("gaps")
        return FramedGaps(held) if is_frame(held) else held

    @property
    def never_sent(self) -> int:
        held = self.held("unsent")
        return 0 if held is None else len(held)

    @property
    def kv_blocks(self) -> int:
        """The most KV blocks of all replicas up at once, busy or idle; 0: unbounded. If replicas
        are not known, those with steps count for the whole run."""
        if self.replicas is None or not len(self.replicas):
            return self.kv_total_blocks * max(self.steps["replica"].nunique(), 1)
        up = self.replicas[self.replicas["up_s"].notna()]
        came = up[["up_s", "num_blocks"]].to_numpy(np.float64)
        went = up[["down_s", "num_blocks"]].to_numpy(np.float64)[up["down_s"].notna()]
        # one that goes at the very time at which another comes makes room for it
        changes = np.concatenate([went * [1.0, -1.0], came])
        order = np.argsort(changes[:, 0], kind="stable")
        return int(np.cumsum(changes[order, 1]).max(initial=0.0))


@dataclass
class RunResult:
    """A run: rows, run.json, timings of our code, metrics, and optional decision log (bytes)."""

    rows: RunRows
    config: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    decisions: bytes | None = None


def write_run(
    out_dir: str | os.PathLike, result: RunResult, overwrite: bool = False, timeline: bool = False
) -> Path:
    """Write `result` as the folder `out_dir` and return the folder; `timeline` adds trace.json.gz.

    An existing folder is replaced only if it is empty, or holds just a former run and `overwrite`
    is set. Otherwise, or if the folder cannot be written, raises ResultsError and leaves nothing
    behind.
    """
    out = resolved(out_dir)
    may_replace(out, _FILES, overwrite)
    rows, texts = result.rows, _texts(result)
    with whole_folder(out) as partial:
        for name, schema in (TABLES | OPTIONAL_TABLES).items():
            if tables := _tables(result, name):
                blocks = {_KV_TOTAL: str(int(rows.kv_total_blocks)).encode()}
                metadata = blocks if name == "steps" else None
                write_table(partial / f"{name}.parquet", tables, schema, metadata)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        if result.decisions is not None:
            (partial / "decisions.jsonl.gz").write_bytes(result.decisions)
        if timeline:
            from twinserve.sim.results.timeline import write_timeline  # it builds on this module

            write_timeline(partial / "trace.json.gz", rows)
    return out


def _texts(result: RunResult) -> dict[str, str]:
    return {
        "run.json": dump_json(RESULTS.numbered(result.config), "run.json"),
        "summary.json": dump_json(result.summary, "summary.json"),
        "timing.json": dump_json(result.timing, "timing.json"),
    }


def _tables(result: RunResult, name: str) -> list[Any]:
    """Return what a file has, one table behind the other."""
    rows = result.rows
    if name == "requests" and rows.never_sent:
        return [rows.held(name), rows.held("unsent")]
    found = rows.held(name)
    if found is None and name == "placements":
        found = one_stay_each(rows.requests)
    if found is None and name == "replicas":
        found = up_all_the_time(rows.requests, made_of(result.config))
    return [] if found is None else [found]


def read_run(run_dir: str | os.PathLike) -> RunResult:
    """Read the run in folder `run_dir`. Raises ResultsError: no folder, missing or torn file, later
    version."""
    folder = Path(run_dir)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise ResultsError(f"{folder}: {what}; give the --out folder of a finished run")
    file = folder / "run.json"
    if not file.exists():
        raise ResultsError(
            f"{folder}: holds no run (run.json is missing); give the --out folder of a run"
        )
    run, version = RESULTS.opened(_read_json(file, SHAPES["run"]), file, ResultsError)
    names = (*TABLES, *OPTIONAL_TABLES)
    there = {name: path for name in names if (path := folder / f"{name}.parquet").exists()}
    tables = {name: _read_table(path) for name, path in there.items()}
    frames = {name: table.to_pandas() for name, table in tables.items()}
    stored = RESULTS.upgraded(Stored(frames, run), version)
    _check_whole(stored.tables, folder)
    metadata = tables["steps"].schema.metadata or {}
    total = metadata.get(_KV_TOTAL)
    if total is None:
        path = folder / "steps.parquet"
        raise ResultsError(f"{path}: has no kv_total_blocks; run again with --overwrite")
    requests = stored.tables["requests"]
    sent = requests["outcome"] != "never_sent"
    kept = {"requests": requests[sent], "unsent": requests[~sent]}
    frames = stored.tables | {n: part.reset_index(drop=True) for n, part in kept.items()}
    return RunResult(
        RunRows(**frames, kv_total_blocks=int(total)),
        config=stored.run,
        timing=_read_json(folder / "timing.json", SHAPES["timing"]),
        summary=_read_json(folder / "summary.json", SHAPES["summary"]),
    )


def present_run(
    document: Mapping[str, Any], where: str | os.PathLike, error: type[Exception]
) -> dict:
    """Return a run.json in its present form. Raises `error` for a later version."""
    run, version = RESULTS.opened(document, where, error)
    return RESULTS.upgraded(Stored({}, run), version).run


def find_runs(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """Return the run folders among `paths`; in a folder without one, those one level below."""
    found: list[Path] = []
    for path in map(Path, paths):
        below = [] if (path / "run.json").exists() or not path.is_dir() else sorted(path.iterdir())
        # Hidden folders are writes that were cut off.
        visible = [folder for folder in below if not folder.name.startswith(".")]
        runs = [folder for folder in visible if (folder / "run.json").exists()]
        found.extend(runs or [path])  # a path without any run gets its error from read_run
    return found


def plain(value: Any, where: str = "value") -> Any:
    """Return `value` as JSON allows: numpy and dataclasses unpacked, NaN and infinities as None."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # numpy's float64 is a float
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, where)
    kind = type(value).__name__
    raise ResultsError(f"{where}: a {kind} cannot be written as JSON; pass plain values")


def dump_json(value: Any, where: str = "value") -> str:
    """Return indented JSON with sorted keys and a final newline; see `plain` for allowed values."""
    return json.dumps(plain(value, where), indent=2, sort_keys=True, allow_nan=False) + "\n"


def printed_runs(summaries: Iterable[tuple[str, Mapping]], **further: Any) -> str:
    """Return the output of `--json`: a list of runs in the given order, each with its label, and
    what is `further` to be said of all."""
    runs = [{"label": label, **summary} for label, summary in summaries]
    return dump_json({"version": PRINTED_VERSION, "runs": runs, **further})


def _read_table(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ResultsError(
            f"{path}: torn or not a parquet file; run again with --overwrite"
        ) from error


def _check_whole(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Raise ResultsError if a table is missing, or differs from what `write_run` writes."""
    for name in TABLES:
        path = folder / f"{name}.parquet"
        if name not in tables:
            raise ResultsError(f"{path}: missing; the results are incomplete, run again")
        check_rows(name, tables[name], path)
    for name in OPTIONAL_TABLES:
        if name in tables:
            check_rows(name, tables[name], folder / f"{name}.parquet")


def _read_json(path: Path, shape: Shape) -> dict:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultsError(f"{path}: missing; the results are incomplete, run again") from error
    except (ValueError, OSError) as error:
        raise ResultsError(f"{path}: torn or not JSON; run again with --overwrite") from error
    check_shape(value, shape, path)
    return value


def check_target(out_dir: str | os.PathLike, overwrite: bool = False, or_else: str = "") -> None:
    """Check that `write_run` can write here. or_else: advice if not. Raises ResultsError."""
    out = resolved(out_dir)
    may_replace(out, _FILES, overwrite, or_else)
    try_to_write(out)
