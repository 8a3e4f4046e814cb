"""The tables of a run that are long: steps, and gaps between tokens. A run of equal steps stays one
entry until a column is asked for step by step: there may be seventy times as many steps as runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from twinserve.sim.results.recorder import StepRecorder


class Steps(Protocol):
    """Columns of steps.parquet, by step or by run of steps.

    lengths  int64[r]: steps of each run
    seconds  float64[n]: of each step
    used     int64[n]: KV blocks that requests hold during each step
    ended_s  float64[r]: when the last step of each run ended, seconds
    """

    lengths: np.ndarray

    @property
    def seconds(self) -> np.ndarray: ...
    @property
    def used(self) -> np.ndarray: ...
    @property
    def ended_s(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def each(self, name: str) -> np.ndarray:
        """One entry a step."""
        ...

    def first(self, name: str) -> np.ndarray:
        """One entry a run: that of its first step."""
        ...


class FramedSteps:
    """Steps of which each is a row of `frame`, and a run of its own."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self.lengths = np.ones(len(frame), np.int64)

    def __len__(self) -> int:
        return len(self._frame)

    def __contains__(self, name: str) -> bool:
        return name in self._frame

    def each(self, name: str) -> np.ndarray:
        return self._frame[name].to_numpy()

    first = each

    @property
    def seconds(self) -> np.ndarray:
        return self.each("end_s") - self.each("start_s")

    @property
    def used(self) -> np.ndarray:
        return self.each("kv_used_blocks")

    @property
    def ended_s(self) -> np.ndarray:
        return self.each("end_s")


class RecordedSteps:
    """What `recorders` recorded, one after another. Columns change within a run only if runs have
    times and take blocks; what happens once is of a run's first step."""

    def __init__(self, recorders: Sequence[StepRecorder]) -> None:
        runs = [ends for recorder in recorders for ends in recorder.ends]
        self.lengths = np.fromiter(map(len, runs), np.int64, len(runs))
        self._ends = np.concatenate(runs) if runs else np.zeros(0)
        self._last = self.lengths.cumsum()
        self._first = self._last - self.lengths
        self.ended_s = self._ends[self._last - 1]
        counts = [len(recorder.ends) for recorder in recorders]
        self._of_runs = {
            "replica": np.repeat([recorder.replica for recorder in recorders], counts),
            "start_s": np.array([s for recorder in recorders for s in recorder.starts], np.float64),
        }
        found = [recorder.run_columns() for recorder in recorders]
        for name in dict.fromkeys(name for columns in found for name in columns):
            # zero where a replica has no such column: not all of them need speculate
            self._of_runs[name] = np.concatenate(
                [
                    columns.get(name, np.zeros(count, np.int64))
                    for columns, count in zip(found, counts, strict=True)
                ]
            )
        self._once = set(recorders[0].ONCE)
        self._growth = self._taken(recorders)

    def _taken(self, recorders: Sequence[StepRecorder]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The blocks that runs newly take, by whose they are: int64[k], runs that take some, and
        int64[m], what they have taken by each of their steps."""
        before = 0
        runs: dict[str, list[int]] = {}
        growths: dict[str, list[np.ndarray]] = {}
        for recorder in recorders:
            for run, name, growth in recorder.growth:
                runs.setdefault(name, []).append(before + run)
                # an arrival may have cut the run
                growths.setdefault(name, []).append(growth[: len(recorder.ends[run])])
            before += len(recorder.ends)
        found = {}
        for name, parts in growths.items():
            at = np.array(runs[name])
            total, most = np.concatenate(parts).cumsum(), self.lengths[at]
            ends = most.cumsum()
            total -= np.concatenate([[0], total[ends[:-1] - 1]]).repeat(most)
            found[name] = at, total
        return found

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, name: str) -> bool:
        return name in self._of_runs or name in ("end_s", "kv_used_blocks")

    def first(self, name: str) -> np.ndarray:
        return self._of_runs[name]

    def each(self, name: str) -> np.ndarray:
        if name == "end_s":
            return self._ends
        if name == "kv_used_blocks":
            return self.used
        if name == "kv_cached_blocks":
            cached = self._repeated(name)
            return np.minimum(cached, self._free(), out=cached)
        column = self._repeated(name)
        if name == "start_s":  # inside a run a step starts when the one before it ended
            column[1:] = self._ends[:-1]
            column[self._first] = self._of_runs[name]
        elif name in self._growth:
            self._grow(column, name)
        return column

    def _repeated(self, name: str) -> np.ndarray:
        column = self._of_runs[name]
        if name == "start_s":
            return np.empty(len(self))
        if name not in self._once and column.any():
            return column.repeat(self.lengths)
        spread = np.zeros(len(self), column.dtype)  # pages that nothing is written to take no time
        if column.any():
            spread[self._first] = column
        return spread

    def _grow(self, column: np.ndarray, name: str, sign: int = 1) -> None:
        runs, total = self._growth[name]
        most = self.lengths[runs]
        at = np.arange(len(total)) + (self._first[runs] - (most.cumsum() - most)).repeat(most)
        column[at] += sign * total

    def _free(self) -> np.ndarray:
        free = self._repeated("kv_free_blocks")
        for name in self._growth:
            self._grow(free, name, -1)
        return free

    @cached_property
    def seconds(self) -> np.ndarray:
        return self._ends - self.each("start_s")

    @cached_property
    def used(self) -> np.ndarray:
        used = self.each("kv_rt_blocks")
        if self._of_runs["kv_be_blocks"].any() or "kv_be_blocks" in self._growth:
            used += self.each("kv_be_blocks")
        return used

    def frame(self) -> pd.DataFrame:
        """One row a step, recorder by recorder."""
        import pandas as pd

        names = [name for name in self._of_runs if name != "kv_free_blocks"]
        names.insert(names.index("start_s") + 1, "end_s")
        names.insert(names.index("hit_tokens") + 1, "kv_used_blocks")
        return pd.DataFrame({name: self.each(name) for name in names}, copy=False)


class Gaps(Protocol):
    """Gaps between tokens: what was found in each, in order."""

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Class ("rt" or "be"), seconds and count of each entry."""
        ...


class FramedGaps:
    """Gaps of which each is a row of `frame`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        frame = self._frame
        seconds, counts = frame["gap_s"].to_numpy(np.float64), frame["count"].to_numpy(np.int64)
        return frame["service_class"].to_numpy(object), seconds, counts


@dataclass(frozen=True)
class GapPool:
    """Distinct gaps of one class, seconds ascending, and how often each was. warmup: whether their
    later tokens are of steps that began in a warm-up; None: not asked for."""

    service_class: str
    seconds: np.ndarray
    counts: np.ndarray
    warmup: bool | None = None


class RecordedGaps:
    """The pools of each recorder."""

    def __init__(self, pools: Sequence[Sequence[GapPool]]) -> None:
        self._pools = [pool for of_one in pools for pool in of_one]
        self._warmed = any(pool.warmup is not None for pool in self._pools)

    def pooled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pools = self._pools
        if not pools:
            return np.zeros(0, object), np.zeros(0), np.zeros(0, np.int64)
        names = np.array([pool.service_class for pool in pools])
        return (
            names.repeat([len(pool.counts) for pool in pools]),
            np.concatenate([pool.seconds for pool in pools]),
            np.concatenate([pool.counts for pool in pools]),
        )

    def frame(self) -> pd.DataFrame:
        """service_class, gap_s, count, and warmup on demand."""
        import pandas as pd

        names, seconds, counts = self.pooled()
        frame = {"service_class": pd.Series(names, dtype=str), "gap_s": seconds, "count": counts}
        if self._warmed:
            warmup = np.array([pool.warmup for pool in self._pools])
            frame["warmup"] = warmup.repeat([len(pool.counts) for pool in self._pools])
        return pd.DataFrame(frame, copy=False)


def is_frame(held: object) -> bool:
    """Whether a table is a frame of pandas; one that was recorded knows how to become one."""
    return not hasattr(type(held), "frame")


class Spread:
    """A field of RunRows for a table that may be given as it was recorded. It becomes a frame when
    it is asked for. optional: by default there is none."""

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
        """A frame, or a RecordedSteps, RecordedGaps or Columns; None: not known."""
        rows.__dict__[self._name] = value
