"""Many independent calls of one function, in parallel over the cores, resumable: points in, one
table out.

An experiment is a list of points, each the keyword arguments of one function. What a point gave is
kept in a file of its own (`points.Store`): a figure added later costs only its own points.
"""

import gc
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.sweep.executors import completed, local
from twinserve.sim.sweep.points import Kept, Store, sources_digest, traces_digest

Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """One run. axes: what tells its rows apart in the table (policy, rate, seed); arguments: of the
    function, plain JSON."""

    axes: Mapping[str, Any]
    arguments: Mapping[str, Any]


def run_grid(
    work: Callable[..., Rows],
    points: Sequence[Point],
    out: Path,
    workers: int | None = None,
    any_version: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """work(**arguments) of every point; the rows in the order of the points, axes first.

    work         a function of a module (workers import it), which returns one row or several, as
                 plain values
    out          folder of the experiment; what is there from an earlier run of the same code is not
                 run again
    workers      processes; by default one for each core; 1: in this process
    any_version  take points of other versions of the code too, as when a file was edited that
                 cannot matter
    report       called with points done and in all, at the start and after each

    The traces are all that have a name (`trace list`), whether a point reads them or not; a trace
    given by its path is known by that only.

    Whatever `work` raises ends the grid; points that have ended are kept. Raises SettingsError if
    one was kept by a later version of twinserve.
    """
    store = Store.of(out, sources_digest(work), traces_digest(), any_version)
    digests = _digests(work, points)
    kept = {digest: found for digest in digests if (found := store.read(digest)) is not None}
    todo = {
        digest: (work, point.arguments)
        for digest, point in zip(digests, points, strict=True)
        if digest not in kept
    }
    if todo:
        store.check_writable()
    total = len(set(digests))
    report(len(kept), total)
    for digest, future in completed(local(workers, len(todo)), _one, todo):
        rows, seconds = future.result()
        kept[digest] = store.write(digest, Kept(rows, seconds=seconds))
        report(len(kept), total)
    return pd.DataFrame(
        [
            {**point.axes, **row}
            for digest, point in zip(digests, points, strict=True)
            for row in kept[digest].rows
        ]
    )


@dataclass(frozen=True)
class Plan:
    """What grids take.

    total    runs, each counted once
    left     that are not kept
    seconds  that those take one after another; None where nothing like them was run before
    """

    total: int
    left: int
    seconds: float | None


def shown_grid(
    work: Callable[..., Rows],
    points: Sequence[Point],
    out: Path,
    workers: int | None,
    label: str,
    any_version: bool,
) -> pd.DataFrame:
    """`run_grid`, and how far it is under the name `label`."""
    with RunProgress(shown=True) as progress:

        def report(done: int, total: int) -> None:
            if not begun:
                begun.append(True)
                progress.begin(label, done / max(total, 1))
            progress.count(done, total, "points")

        begun: list[bool] = []
        return run_grid(work, points, out, workers, any_version, report)


def planned(
    grids: Iterable[tuple[Callable[..., Rows], Sequence[Point]]],
    out: Path,
    any_version: bool = False,
) -> Plan:
    """What `run_grid` of each work and its points has to run. A run that was never run takes as
    long as the others of its grid do, or else of all grids. Raises SettingsError."""
    seen: set[str] = set()
    left: list[tuple[float | None, list[float]]] = []  # what each took, those of its grid
    for work, points in grids:
        store = Store.of(out, sources_digest(work), traces_digest(), any_version)
        digests = dict.fromkeys(_digests(work, points))
        took = {digest: store.seconds(digest) for digest in digests}
        known = [seconds for seconds in took.values() if seconds is not None]
        new = [digest for digest in digests if digest not in seen]
        left += [(took[digest], known) for digest in new if store.read(digest) is None]
        seen |= digests.keys()
    everywhere = [seconds for _, known in left for seconds in known]
    if not everywhere:
        return Plan(len(seen), len(left), None)
    seconds = (_mean(known or everywhere) if own is None else own for own, known in left)
    return Plan(len(seen), len(left), sum(seconds))


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _one(work: Callable[..., Rows], arguments: Mapping) -> tuple[list, float]:
    """Its rows, and the wall seconds that they took."""
    began = time.perf_counter()
    found = work(**arguments)
    # a simulation's objects refer to each other in circles; a worker would keep dozens of them
    gc.collect()
    rows = [found] if isinstance(found, Mapping) else list(found)
    return rows, time.perf_counter() - began


def runs_digest(work: Callable[..., Rows], points: Sequence[Point]) -> str:
    """Tells the runs of a grid: their function and arguments, and their order."""
    return hashlib.sha256(" ".join(_digests(work, points)).encode()).hexdigest()[:24]


def _digests(work: Callable, points: Sequence[Point]) -> list[str]:
    # defaults are part of a point too: they may change
    bound = inspect.signature(work).bind_partial
    return [_digest(work, bound(**point.arguments)) for point in points]


def _digest(work: Callable, bound: inspect.BoundArguments) -> str:
    bound.apply_defaults()
    text = json.dumps(
        [work.__module__, work.__qualname__, bound.arguments], sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]
