"""The requests of one engine: a table of columns, shared by engine, ledger and policy. A row
appears when its request is submitted, so no policy can read a request before that. No column holds
the true output length, because a live engine does not know it. Only the engine writes the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from twinserve.native.chosen import columns

# Rows that a column by row has room for at first, here and wherever one is kept beside the table.
# It doubles when they are more: a fleet has a table a replica, and many of them serve few requests.
FIRST_ROWS = 16


class RequestClass(IntEnum):
    REAL_TIME = 0
    BEST_EFFORT = 1


class End(IntEnum):
    """How a request ended."""

    NONE = 0  # not yet
    COMPLETED = 1  # it got all its tokens
    TIMED_OUT = 2  # its client waited no longer
    DISCONNECTED = 3  # its client left
    FAILED = 4  # its replica failed, or another request of its application ended early
    MOVED = 5  # it goes on as another row
    REJECTED = 6  # no replica was to take it
    NEVER_SENT = 7  # what it waits for did not complete
    HANDED_OVER = 8  # its prompt is computed; another engine fetches the KV and goes on


class State(IntEnum):
    WAITING = 0  # holds no KV: new, or dropped and to be recomputed
    RUNNING = 1  # holds KV on the device; paused in place while a plan leaves it out
    SWAPPED = 2  # its KV is on the host
    FINISHED = 3


@dataclass(frozen=True, slots=True)
class Application:
    """Requests that belong together: a task graph, a session, or a closed loop. It is known before
    most of its requests exist. Column `group` of a request has the number of its application, and
    column `stage` its stage.

    kind  the class of the application, if the workload names one; text: its input text, if any
    order the stamp of its requests (`RequestTable.order`)
    """

    group: int
    name: str
    arrival_s: float
    kind: str | None = None
    text: str | None = None
    order: float = math.nan


@dataclass(frozen=True, slots=True)
class ApplicationEnd:
    """No further request of this group will arrive."""

    group: int


class RequestTable:
    """Columns over rows 0 .. len - 1, in order of submission.

    Each column is declared with its type and its first value. It is an array of length `len(self)`,
    a view: fetch it anew after a submission, since storage may have moved. `ids[row]` is the
    request's name. `prefix[row]` has the int64 content ids of its prompt's full KV blocks, or None;
    equal ids mean the same text up to that block's end. `text[row]` is the input text of its
    application, or None.

    With asynchronous scheduling a plan is made while the step before it runs. The table then shows
    that step as if it had ended when it began. `computed_tokens` includes what the step computes.
    `output_tokens` includes the token that it will give, which `in_flight` marks. `last_token_s` is
    its start. Other columns such as `first_token_s` show only what has happened. A row whose last
    token is being computed has nothing left to compute, and `in_flight` is 0. Between steps, and
    always in synchronous scheduling, `in_flight` is 0 and all values are known.

    With speculation the table shows the step under way as if all its drafts were right. The
    outcome takes rejected drafts out of `computed_tokens` and `output_tokens`.
    """

    arrival_s: Annotated[NDArray[np.float64], 0.0]  # objectives and gaps count from here
    placed_s: Annotated[NDArray[np.float64], 0.0]  # came to this engine; by default at arrival
    prompt_tokens: Annotated[NDArray[np.int64], 0]
    output_tokens: Annotated[NDArray[np.int64], 0]  # emitted so far
    computed_tokens: Annotated[NDArray[np.int64], 0]  # whose KV exists (on device or host)
    # of output_tokens: 1, and drafts verified, while computed and not known yet (asynchronous)
    in_flight: Annotated[NDArray[np.int64], 0]
    # guesses at its next tokens, which the next step that computes it verifies (speculation)
    draft_tokens: Annotated[NDArray[np.int64], 0]
    service_class: Annotated[NDArray[np.int8], RequestClass.REAL_TIME]
    priority: Annotated[NDArray[np.int64], 0]  # smaller is more urgent
    slo_ttft_s: Annotated[NDArray[np.float64], np.nan]
    slo_tpot_s: Annotated[NDArray[np.float64], np.nan]
    group: Annotated[NDArray[np.int64], -1]  # session or application; -1 where there is none
    stage: Annotated[NDArray[np.int64], 0]
    # place of its application in an order of the whole fleet (policies/order.py), the smallest
    # first; NaN: it has none
    order: Annotated[NDArray[np.float64], np.nan]
    state: Annotated[NDArray[np.int8], State.WAITING]
    end: Annotated[NDArray[np.int8], End.NONE]
    ended_s: Annotated[NDArray[np.float64], np.nan]
    first_scheduled_s: Annotated[NDArray[np.float64], np.nan]
    first_token_s: Annotated[NDArray[np.float64], np.nan]
    last_token_s: Annotated[NDArray[np.float64], np.nan]
    hit_tokens: Annotated[NDArray[np.int64], 0]  # prefix tokens found at the first admission
    # of these behind them, found on the host by then
    host_tokens: Annotated[NDArray[np.int64], 0]
    # of its text, whose KV another engine keeps for this one to fetch; 0 once it began to
    remote_tokens: Annotated[NDArray[np.int64], 0]
    recomputes: Annotated[NDArray[np.int64], 0]  # times dropped
    swaps: Annotated[NDArray[np.int64], 0]  # times swapped out
    # moved over PCIe for it, both ways; some layers of a token are that share of it
    swapped_tokens: Annotated[NDArray[np.float64], 0.0]
    late_tokens: Annotated[NDArray[np.int64], 0]  # tokens whose gap exceeded slo_tpot_s

    __slots__ = (*__annotations__, "_data", "_size", "ids", "prefix", "text")

    def __init__(self, capacity: int = FIRST_ROWS) -> None:
        self._data: dict[str, np.ndarray] = {
            name: np.full(capacity, fill, dtype) for name, (dtype, fill) in _COLUMNS.items()
        }
        self._size = 0
        self.ids: list[str] = []
        self.prefix: list[np.ndarray | None] = []
        self.text: list[str | None] = []
        self._publish()

    def _publish(self) -> None:
        columns.publish(self, self._data, self._size)

    def __len__(self) -> int:
        return self._size

    def submit(
        self,
        request_id: str,
        prefix: np.ndarray | None = None,
        text: str | None = None,
        **values: float,
    ) -> int:
        """Append a request; `values` are columns (seconds, tokens). Returns its row."""
        row = self._size
        if row == len(self._data["arrival_s"]):
            for name, (dtype, fill) in _COLUMNS.items():
                column: np.ndarray = np.full(2 * row, fill, dtype)
                column[:row] = self._data[name]
                self._data[name] = column
        values.setdefault("placed_s", values.get("arrival_s", 0.0))
        for name, value in values.items():
            self._data[name][row] = value
        self._size = row + 1
        self.ids.append(request_id)
        self.prefix.append(prefix)
        self.text.append(text)
        self._publish()
        return row

    def known_tokens(self, rows):
        """Return prompt plus output tokens of `rows` (int or index array), the token in flight
        included. The engine must compute these before the next token."""
        return self.prompt_tokens[rows] + self.output_tokens[rows]

    def lacking(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays for those of `rows` (int64[n]) that have tokens left to compute: the
        rows, their computed tokens and their missing tokens."""
        return columns.lacking(self, rows)

    def __getitem__(self, row: int) -> RequestView:
        if not 0 <= row < self._size:
            raise IndexError(f"there is no row {row}: the table has {self._size} requests")
        return RequestView(self, row)

    def __iter__(self) -> Iterator[RequestView]:
        return (RequestView(self, row) for row in range(self._size))


def _declared(hint: Any) -> tuple[type, float]:
    array, unknown = get_args(hint)
    # of NDArray[T]: dtype[T] at the end, or T itself (NumPy 2.5 on)
    last = get_args(array)[-1]
    return next(iter(get_args(last)), last), unknown


# name -> (dtype, value before anything is known)
_COLUMNS: dict[str, tuple[type, float]] = {
    name: _declared(hint)
    for name, hint in get_type_hints(RequestTable, include_extras=True).items()
}


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as an object, for policies that handle requests one by one. Its attributes are
    the columns."""

    table: RequestTable
    row: int

    @property
    def id(self) -> str:
        return self.table.ids[self.row]

    @property
    def prefix(self) -> np.ndarray | None:
        return self.table.prefix[self.row]

    @property
    def text(self) -> str | None:
        return self.table.text[self.row]

    @property
    def known_tokens(self) -> int:
        return int(self.table.known_tokens(self.row))

    def __getattr__(self, name: str) -> Any:
        if name not in _COLUMNS:
            raise AttributeError(f"a request has no {name!r}; it has {', '.join(_COLUMNS)}")
        return getattr(self.table, name)[self.row].item()
