"""Tables as numpy columns, which metrics read. A data frame is made on demand: importing pandas
takes longer than a short run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twinserve.formats import shipped_rows

if TYPE_CHECKING:
    import pandas as pd


def _columns(table: str) -> dict[str, str]:
    rows = shipped_rows(__package__, "columns.csv")
    return {row["column"]: row["type"] for row in rows if row["table"] == table}


TABLES = {name: _columns(name) for name in ("requests", "placements", "replicas", "steps", "gaps")}
REQUESTS, PLACEMENTS, REPLICAS, STEPS, GAPS = TABLES.values()
FAILURES = _columns("failures")  # of runs in which something was to fail (sim/fleet/faults.py)
OPTIONAL_TABLES = {"failures": FAILURES}

# Further columns of REQUESTS in runs with a front end, whose other times are the clients'; seconds.
ENGINE_ARRIVAL, ENGINE_FIRST_TOKEN = "engine_arrival_s", "engine_first_token_s"
# Further column of REQUESTS with a host tier: prompt tokens that the first admission found there,
# behind those found on the device.
HOST_TOKENS = "host_tokens"
# Further columns of REQUESTS where prefill is apart from decode, each with `_s` behind it: seconds
# (sim/fleet/rows.py). With a front end there is one more.
TTFT_PARTS = ("router", "queue", "prefill", "transfer", "decode_queue", "first_step")
FRONT_END_PART = "front_end"
OUTCOMES = (
    "completed",
    "timed_out",
    "disconnected",
    "failed",
    "moved",
    "rejected",
    "never_sent",
    "handed_over",
)  # by requests.End, without NONE
STAYS = ("moved", "handed_over")  # of these, the ends of stays after which the request goes on


class Columns:
    """Columns by name, one entry a row. Text is str or None."""

    def __init__(self, columns: Mapping[str, np.ndarray], rows: int | None = None) -> None:
        self._columns = dict(columns)
        self._rows = len(next(iter(self._columns.values()), ())) if rows is None else rows

    @classmethod
    def of_frame(cls, frame: pd.DataFrame) -> Columns:
        """Return the columns of `frame`, with None for missing text."""
        found = {}
        for name in frame:
            values = frame[name]
            if values.dtype.kind not in "biuf":
                values = values.astype(object).where(values.notna(), None)
            found[name] = values.to_numpy()
        return cls(found, len(frame))

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Columns:
        """Return the columns of a list of dicts; a missing name is None."""
        names = dict.fromkeys(name for row in rows for name in row)
        found = {name: [row.get(name) for row in rows] for name in names}
        return cls(
            {
                name: np.array(values, object if None in values else None)
                for name, values in found.items()
            }
        )

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    def assign(self, **columns: np.ndarray) -> Columns:
        """Return the columns with these replaced or added."""
        return Columns(self._columns | columns)

    def take(self, rows: np.ndarray) -> Columns:
        """Return these rows: positions, or bool[n]."""
        return Columns({name: column[rows] for name, column in self._columns.items()})

    def part(self, begin: int, end: int) -> Columns:
        """Return these rows, as views."""
        return Columns({name: column[begin:end] for name, column in self._columns.items()})

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self._columns, copy=False)


def joined(parts: Sequence[Columns]) -> Columns:
    """Concatenate tables with the same columns."""
    if len(parts) == 1:
        return parts[0]
    return Columns({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def known(values: np.ndarray) -> np.ndarray:
    """Return bool[n]: the text is present."""
    return np.not_equal(values, None) & (values == values)
