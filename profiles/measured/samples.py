"""Timed engine steps of a calibration: rows in memory, and one parquet file with their provenance.

The file has one row a step (or a swap). Its schema's metadata has, under the key `twinserve`, the
provenance as JSON: versions, engine arguments, device, date, choice of points, and the file's own
version (SAMPLES).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.formats import Format, parse_json, whole_file
from twinserve.profiles.composition import Churn, StepComposition
from twinserve.profiles.measured import disturbed as disturbances
from twinserve.profiles.specs import ProfileError

_KEY = b"twinserve"
SWAP_OUT, SWAP_IN = "swap_out", "swap_in"
LEAVING = "leaving"  # pairs: a step, and the next one, in which all its requests end
TRAFFIC = "traffic"  # steps of a live run, not of a test bench
_CHURN = (
    "joined",
    "swapped_out",
    "swapped_in",
    "swapped_out_tokens",
    "swapped_in_tokens",
    "changed",
)
ENOUGH = 3  # undisturbed samples of a point, that make the others unnecessary
_SAMPLES_OF_NONE = (LEAVING, TRAFFIC)  # kinds whose samples are not repeats of each other


@dataclass(frozen=True, slots=True)
class StepSample:
    """One timed step.

    kind      what it is for: "decode", "prefill", "mixed", ...
    point     samples of one point are repeats of (nearly) the same work
    round     the pass over all points in which it was taken
    work      what the step computed
    seconds   wall time of the whole step, until its tokens are known on the host
    exec_s    of these, seconds in the model executor (NaN: not measured)
    device_s  seconds between two events on the GPU around the executor's part (NaN: no GPU)
    off_core_s  seconds in which an engine of one CPU thread did not run, since others had the core
                (NaN: not known)
    first     the first step of just this work: some engines prepare kernels for a number of tokens
              that they have not seen lately, so it is kept apart
    """

    kind: str
    point: int
    round: int
    work: StepComposition
    seconds: float
    exec_s: float = float("nan")
    device_s: float = float("nan")
    off_core_s: float = float("nan")
    first: bool = False


@dataclass(frozen=True, slots=True)
class SwapSample:
    """One transfer of KV between device and host: direction SWAP_OUT or SWAP_IN, tokens, bytes of
    all ranks, seconds."""

    direction: str
    tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """Everything that a calibration measured. provenance: JSON-like, see the module's text."""

    steps: list[StepSample]
    swaps: list[SwapSample] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)


def by_point(samples: Sequence[StepSample]) -> dict[int, list[StepSample]]:
    """point -> its samples, points in rising order."""
    found: dict[int, list[StepSample]] = {}
    for sample in sorted(samples, key=lambda s: s.point):
        found.setdefault(sample.point, []).append(sample)
    return found


def disturbed(samples: Sequence[StepSample]) -> np.ndarray:
    """bool[n]: others had a hand in it (profiles.measured.disturbed). `samples` in the order in
    which they were taken. Steps of traffic, and of requests that leave, are no repeats of each
    other: of them only those are found that lost their core."""
    works: dict[tuple, int] = {}
    keys = [
        (s.kind, i) if s.kind in _SAMPLES_OF_NONE else (s.kind, s.point, s.first)
        for i, s in enumerate(samples)
    ]
    work = np.array([works.setdefault(key, len(works)) for key in keys], np.int64)
    seconds = np.array([s.seconds for s in samples], np.float64)
    off_core = np.array([s.off_core_s for s in samples], np.float64)
    return disturbances.disturbed(work, seconds, off_core)


def disturbed_share(samples: Sequence[StepSample]) -> float:
    """Return the share of the samples' time that went into `disturbed` ones, 0 to 1. A program that
    takes the core for whole time slices disturbs few steps, and much of the time."""
    seconds = np.array([s.seconds for s in samples], np.float64)
    return float(seconds[disturbed(samples)].sum() / seconds.sum()) if len(seconds) else 0.0


def calm(samples: Sequence[StepSample]) -> list[StepSample]:
    """Those that are not `disturbed`."""
    flags = disturbed(samples).tolist()
    return [s for s, flag in zip(samples, flags, strict=True) if not flag]


def unsettled(samples: Sequence[StepSample]) -> list[int]:
    """Points that have samples, and fewer than ENOUGH undisturbed ones, in rising order."""
    enough = {point for point, found in by_point(calm(samples)).items() if len(found) >= ENOUGH}
    return [point for point in by_point(samples) if point not in enough]


def settled(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return the reliable samples of a busy machine: of each point the undisturbed ones, if there
    are three. Otherwise all, less the time that the engine's thread was kept off its core.
    `samples` in the order in which they were taken."""
    of_calm, found = by_point(calm(samples)), []
    for point, of_point in by_point(samples).items():
        if len(of_calm.get(point, ())) >= ENOUGH:
            found += of_calm[point]
        else:
            found += [
                replace(s, seconds=s.seconds - s.off_core_s)
                if disturbances.lost(np.array(s.seconds), np.array(s.off_core_s))
                else s
                for s in of_point
            ]
    return found


def write_samples(measurement: Measurement, path: str | Path) -> None:
    """Write parquet to `path`, whole or not at all; folders are created. OSError if that is
    impossible."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(step) for step in measurement.steps] + [
        _swap_row(swap) for swap in measurement.swaps
    ]
    document = SAMPLES.numbered(measurement.provenance)
    metadata = {_KEY: json.dumps(document, sort_keys=True, default=str).encode()}
    table = pa.Table.from_pylist(rows, schema=_schema().with_metadata(metadata))
    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def read_samples(path: str | Path) -> Measurement:
    """What `write_samples` wrote. ProfileError (one line) for anything else, and for a file of a
    later version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        document = dict(parse_json((table.schema.metadata or {})[_KEY]))
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise _foreign(path, error) from None
    provenance, version = SAMPLES.opened(document, path, ProfileError)
    try:
        rows = SAMPLES.upgraded(table, version).select(_schema().names).to_pylist()
    except (KeyError, pa.ArrowException) as error:
        raise _foreign(path, error) from None
    swaps = [r for r in rows if r["kind"] in (SWAP_OUT, SWAP_IN)]
    steps = [r for r in rows if r["kind"] not in (SWAP_OUT, SWAP_IN)]
    return Measurement(
        [_sample(row) for row in steps],
        [SwapSample(r["kind"], r["decode_context"], r["bytes"], r["seconds"]) for r in swaps],
        provenance,
    )


def _foreign(path: str | Path, error: Exception) -> ProfileError:
    why = (
        "`twinserve calibrate --raw` did not write it"
        if isinstance(error, KeyError | TypeError)
        else _first_line(error)
    )
    return ProfileError(f"{path}: not a file of calibration samples ({why})")


def _schema():
    import pyarrow as pa

    return pa.schema(
        [
            ("kind", pa.string()),
            ("point", pa.int32()),
            ("round", pa.int32()),
            ("prefill_new", pa.list_(pa.int32())),
            ("prefill_resident", pa.list_(pa.int32())),
            ("decode_requests", pa.int32()),
            ("decode_context", pa.int64()),  # of a swap: its tokens
            ("decode_context_max", pa.int64()),
            ("seconds", pa.float64()),
            ("exec_s", pa.float64()),
            ("device_s", pa.float64()),
            ("off_core_s", pa.float64()),
            ("first", pa.bool_()),
            ("bytes", pa.int64()),
            ("joined", pa.int32()),
            ("swapped_out", pa.int32()),
            ("swapped_in", pa.int32()),
            ("swapped_out_tokens", pa.int64()),
            ("swapped_in_tokens", pa.int64()),
            ("changed", pa.bool_()),
        ]
    )


def _with_churn(table):
    """Files written before batches were watched: nothing is known to have changed."""
    import pyarrow as pa

    for field_ in _schema():
        if field_.name in _CHURN and field_.name not in table.column_names:
            nothing = pa.array(np.zeros(len(table), field_.type.to_pandas_dtype()), field_.type)
            table = table.append_column(field_, nothing)
    return table


SAMPLES: Format = Format(  # content: the table
    "calibration samples", version=1, by="twinserve calibrate --raw", upgrades=(_with_churn,)
)


def _row(sample: StepSample) -> dict:
    work = sample.work
    return {
        "kind": sample.kind,
        "point": sample.point,
        "round": sample.round,
        "prefill_new": work.prefill_new.tolist(),
        "prefill_resident": work.prefill_resident.tolist(),
        "decode_requests": work.decode_requests,
        "decode_context": work.decode_context,
        "decode_context_max": work.decode_context_max,
        "seconds": sample.seconds,
        "exec_s": sample.exec_s,
        "device_s": sample.device_s,
        "off_core_s": sample.off_core_s,
        "first": sample.first,
        "bytes": 0,
        **{name: getattr(work.churn, name) for name in _CHURN},
    }


def _swap_row(swap: SwapSample) -> dict:
    empty = _row(StepSample(swap.direction, -1, 0, StepComposition(), swap.seconds))
    return empty | {"decode_context": swap.tokens, "bytes": swap.nbytes}


def _sample(row: dict) -> StepSample:
    new, resident = (np.array(row[name], np.int64) for name in ("prefill_new", "prefill_resident"))
    churn = Churn(**{name: row[name] for name in _CHURN})
    work = StepComposition(
        row["decode_requests"],
        row["decode_context"],
        row["decode_context_max"],
        new,
        resident,
        churn,
    )
    times = (row[name] for name in ("seconds", "exec_s", "device_s", "off_core_s"))
    return StepSample(row["kind"], row["point"], row["round"], work, *times, first=row["first"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
