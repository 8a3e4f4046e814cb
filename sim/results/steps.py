"""The long tables of a run: steps, and gaps between tokens. A run of equal steps stays one entry
until a column is needed step by step: steps can be seventy times as many as runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from twinserve.sim.results.columns import Columns

if TYPE_CHECKING:
    import pandas as pd

    from twinserve.sim.results.recorder import StepRecorder


class Pieces:
    """Consecutive arrays, without one array of them all."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays
        self._firsts = np.cumsum([0, *map(len, arrays)]).tolist()

    def __len__(self) -> int:
        return self._firsts[-1]

    def between(self, begin: int, end: int) -> np.ndarray:
        found = bisect_right(self._firsts, begin) - 1, bisect_left(self._firsts, end)
        pieces = [
            self._arrays[i][max(begin - self._firsts[i], 0) : end - self._firsts[i]]
            for i in range(*found)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._arrays[0][:0]])

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the values at `places`, which ascend."""
        cuts = places.searchsorted(self._firsts)
        return np.concatenate(
            [
                array[places[begin:end] - first]
                for array, first, begin, end in zip(
                    self._arrays, self._firsts, cuts, cuts[1:], strict=False
                )
            ]
        )


class Steps(Protocol):
    """Columns of steps.parquet, by step or by run of steps.

    lengths  int64[r]: steps of each run
    ended_s  float64[r]: when the last step of each run ended, seconds
    """

    lengths: np.ndarray

    @property
    def ended_s(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def each(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return one entry a step, of all steps or of those from `begin` to `end`."""
        ...

    def seconds(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return float64[n]: the duration of each of these steps."""
        ...

    def first(self, name: str) -> np.ndarray:
        """Return one entry a run: that of its first step."""
        ...


class FramedSteps:
    """Steps from the rows of `frame`, each a run of its own."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self.lengths = np.ones(len(frame), np.int64)

    def __len__(self) -> int:
        return len(self._frame)

    def __contains__(self, name: str) -> bool:
        return name in self._frame

    def each(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self._frame[name].to_numpy()[begin:end]

    first = each

    def seconds(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self.each("end_s", begin, end) - self.each("start_s", begin, end)

    @property
    def ended_s(self) -> np.ndarray:
        return self.each("end_s")


class RecordedSteps:
    """The steps of several `recorders` in turn. Within a run only times and taken blocks change;
    single events belong to the run's first step."""

    def __init__(self, recorders: Sequence[StepRecorder]) -> None:
        self._ends = Pieces([ends for recorder in recorders for ends in recorder.ends()])
        self.lengths = np.concatenate([np.diff(r.firsts, append=r.steps) for r in recorders])
        edges = np.concatenate([[0], self.lengths.cumsum()])
        self._first, self._last = edges[:-1], edges[1:]
        counts = [len(recorder.starts) for recorder in recorders]
        # integers here are narrow
        replicas = narrow(np.array([recorder.replica for recorder in recorders]))
        self._of_runs = {
            "replica": replicas.repeat(counts),
            "start_s": np.concatenate([recorder.starts for recorder in recorders]),
        }
        found = [recorder.run_columns() for recorder in recorders]
        for name in dict.fromkeys(name for columns in found for name in columns):
            # zero where a replica has no such column: not all of them need speculate
            self._of_runs[name] = np.concatenate(
                [
                    columns.get(name, np.zeros(count, np.uint8))
                    for columns, count in zip(found, counts, strict=True)
                ]
            )
        self._once = set(recorders[0].ONCE)
        self._growth = self._taking(recorders)

    def _taking(
        self, recorders: Sequence[StepRecorder]
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """Return, by column, int64[k]: the runs that change it, and the blocks of each of their
        steps. The latter may list more steps than the run has, if an arrival cut the run."""
        runs: dict[str, list[int]] = {}
        taken: dict[str, list[np.ndarray]] = {}
        before = 0
        for recorder in recorders:
            evicted = [(run, "kv_cached_blocks", leave) for run, leave in recorder.evicted]
            for run, name, growth in recorder.growth + evicted:
                runs.setdefault(name, []).append(before + run)
                taken.setdefault(name, []).append(growth)
            before += len(recorder.starts)
        return {name: (np.array(found), taken[name]) for name, found in runs.items()}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, name: str) -> bool:
        return name in self._of_runs or name in ("end_s", "kv_used_blocks")

    @property
    def ended_s(self) -> np.ndarray:
        return self._ends.at(self._last - 1)

    def first(self, name: str) -> np.ndarray:
        return _wide(self._of_runs[name])

    def each(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        end = len(self) if end is None else end
        if name == "end_s":
            return self._ends.between(begin, end)
        if begin >= end:
            return _wide(self._of_runs.get(name, self.lengths)[:0])
        some = slice(
            int(self._last.searchsorted(begin, "right")),
            int(self._last.searchsorted(end, "left")) + 1,
        )
        first = int(self._first[some.start])
        return self._column(name, some)[begin - first : end - first]

    def seconds(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self.each("end_s", begin, end) - self.each("start_s", begin, end)

    def _column(self, name: str, some: slice) -> np.ndarray:
        """Return the column of the steps of these runs."""
        if name == "kv_used_blocks":
            used = self._column("kv_rt_blocks", some)
            if self._of_runs["kv_be_blocks"].any() or "kv_be_blocks" in self._growth:
                used += self._column("kv_be_blocks", some)
            return used
        column = self._repeated(name, some)
        if name == "kv_cached_blocks":
            free = self._repeated("kv_free_blocks", some)
            for taker in self._growth:
                self._grow(column if taker == name else free, taker, some, -1)
            np.minimum(column, free, out=column)
        elif name == "start_s":  # inside a run a step starts when the one before it ended
            first = self._first[some]
            column[1:] = self._ends.between(int(first[0]), int(self._last[some][-1]) - 1)
            column[first - first[0]] = self._of_runs[name][some]
        elif name in self._growth:
            self._grow(column, name, some)
        return column

    def _repeated(self, name: str, some: slice) -> np.ndarray:
        column, lengths = _wide(self._of_runs[name][some]), self.lengths[some]
        if name == "start_s":
            return np.empty(lengths.sum())
        if name not in self._once and column.any():
            return column.repeat(lengths)
        # pages that nothing is written to take no time
        spread = np.zeros(lengths.sum(), column.dtype)
        if column.any():
            spread[self._first[some] - self._first[some.start]] = column
        return spread

    def _grow(self, column: np.ndarray, name: str, some: slice, sign: int = 1) -> None:
        """Add the blocks taken by the runs of `some`, or subtract them with sign -1."""
        runs, taken = self._growth[name]
        mine = slice(*runs.searchsorted([some.start, some.stop]).tolist())
        runs, taken = runs[mine], taken[mine]
        if not len(runs):
            return
        most = self.lengths[runs]
        parts = [part[:n] for part, n in zip(taken, most.tolist(), strict=True)]
        before = most.cumsum() - most
        total = np.concatenate(parts).cumsum(dtype=np.int64)
        total -= np.concatenate([[0], total[before[1:] - 1]]).repeat(most)
        at = np.arange(len(total)) + (self._first[runs] - self._first[some.start] - before).repeat(
            most
        )
        column[at] += sign * total

    def part(self, begin: int, end: int) -> Columns:
        """Return the rows of these steps, recorder by recorder."""
        names = [name for name in self._of_runs if name != "kv_free_blocks"]
        names.insert(names.index("start_s") + 1, "end_s")
        names.insert(names.index("hit_tokens") + 1, "kv_used_blocks")
        return Columns({name: self.each(name, begin, end) for name in names})

    def frame(self) -> pd.DataFrame:
        return self.part(0, len(self)).frame()


def narrow(column: np.ndarray) -> np.ndarray:
    """Return integers in the smallest type that holds them all."""
    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    return column if low < 0 or high >= 1 << 32 else column.astype(np.min_scalar_type(high))


def _wide(column: np.ndarray) -> np.ndarray:
    return column if column.dtype.kind == "f" else column.astype(np.int64, copy=False)


class Gaps(Protocol):
    """Gaps between tokens, as they were found."""

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the class (bool, best-effort), seconds, and count of each entry."""
        ...


class FramedGaps:
    """Gaps from the rows of `frame`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        frame = self._frame
        seconds, counts = frame["gap_s"].to_numpy(np.float64), frame["count"].to_numpy(np.int64)
        return (frame["service_class"] == "be").to_numpy(bool), seconds, counts


@dataclass(frozen=True)
class GapPool:
    """Distinct gaps of one class, seconds ascending, and their counts. warmup: whether their later
    tokens are of steps that began in a warm-up; None: not asked for."""

    service_class: str
    seconds: np.ndarray
    counts: np.ndarray
    warmup: bool | None = None


class RecordedGaps:
    """The pools of several recorders in turn."""

    def __init__(self, pools: Iterable[Sequence[GapPool]]) -> None:
        found = [pool for of_one in pools for pool in of_one]
        self._of = [(pool.service_class, pool.warmup, len(pool.counts)) for pool in found]
        self._seconds = np.concatenate([np.zeros(0), *(pool.seconds for pool in found)])
        self._counts = np.concatenate([np.zeros(0, np.int64), *(pool.counts for pool in found)])

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        best_effort = np.array([name == "be" for name, _, _ in self._of], bool)
        return best_effort.repeat(self._lengths), self._seconds, self._counts

    @property
    def _lengths(self) -> np.ndarray:
        return np.array([length for _, _, length in self._of], np.int64)

    def __len__(self) -> int:
        return len(self._seconds)

    def part(self, begin: int, end: int) -> Columns:
        """Return service_class, gap_s, count, and on demand warmup of these entries."""
        names = np.array([name for name, _, _ in self._of], object)
        columns = {
            "service_class": names.repeat(self._lengths)[begin:end],
            "gap_s": self._seconds[begin:end],
            "count": self._counts[begin:end],
        }
        if any(warmup is not None for _, warmup, _ in self._of):
            warmups = np.array([warmup for _, warmup, _ in self._of])
            columns["warmup"] = warmups.repeat(self._lengths)[begin:end]
        return Columns(columns)

    def frame(self) -> pd.DataFrame:
        frame = self.part(0, len(self)).frame()
        return frame.astype({"service_class": str})  # also where there are no rows


def is_frame(held: object) -> bool:
    """Return whether a table is a pandas frame; a recorded table can become one."""
    return not hasattr(type(held), "frame")


class Spread:
    """A field of RunRows for a table that becomes a frame on demand. optional: default None."""

    def __init__(self, optional: bool = False) -> None:
        self._optional = optional

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, rows: object, owner: type | None = None) -> Any:
        if rows is None:
            if self._optional:
                return None
            raise AttributeError("a field without a default")
        held = rows.__dict__[self._name]
        if held is not None and not is_frame(held):
            held = rows.__dict__[self._name] = held.frame()
        return held

    def __set__(self, rows: object, value: Any) -> None:
        """Take a frame, or a RecordedSteps, RecordedGaps or Columns; None: not known."""
        rows.__dict__[self._name] = value
