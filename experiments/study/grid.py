"""Many independent runs, in parallel over the cores, resumable: points in, one table out.

An experiment is a list of points, each the keyword arguments of one function. What a point gave is
kept in a file of its own, so an interrupted experiment goes on where it was, and a figure added
later costs only its own points. A file says of which sources of the package it is, and with which
recorded traces at hand: results of other code are not taken for results of this one, unless that is
asked for, and those with other traces never. A file of a later version of the format ends the
experiment: it is neither taken nor replaced.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.formats import Format, same
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.download import sha256_of
from twinserve.traces.verbs import list_traces
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_atomically

Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]
EXPERIMENTS = "twinserve.experiments."
# Of the package, whether it is installed or reached through the links in src/twinserve.
ROOT = Path(__file__).resolve().parents[2]
KEPT = ".points"  # folder of the points' files, in the experiment's own
POINTS: Format[dict] = Format(
    "kept points of studies", version=1, by="name another --out", upgrades=(same,)
)


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
    label: str = "",
    any_version: bool = False,
) -> pd.DataFrame:
    """work(**arguments) of every point; the rows in the order of the points, axes first.

    work         a function of a module (workers import it), which returns one row or several, as
                 plain values
    out          folder of the experiment; what is there from an earlier run of the same code is not
                 run again
    workers      processes; by default one for each core; 1: in this process
    any_version  take points of other versions of the code too, as when a file was edited that
                 cannot matter

    The traces are all that have a name (`trace list`), whether a point reads them or not; a trace
    given by its path is known by that only.

    Whatever `work` raises ends the grid; points that have ended are kept. Raises SettingsError
    where one was kept by a later version of twinserve.
    """
    sources, traces = sources_digest(work), traces_digest()
    # defaults are part of a point too: they may change
    bound = inspect.signature(work).bind_partial
    files = [out / KEPT / f"{_digest(work, bound(**point.arguments))}.json" for point in points]
    wanted = None if any_version else sources
    kept = {file: rows for file in files if (rows := _kept(file, traces, wanted)) is not None}
    todo = {
        file: point.arguments for file, point in zip(files, points, strict=True) if file not in kept
    }
    if todo:
        _check_writable(out / KEPT)
    total = len(set(files))
    with RunProgress(shown=True) as progress:
        progress.begin(label, len(kept) / max(total, 1))
        for file, rows in _results(work, todo, workers or os.cpu_count() or 1):
            said = POINTS.numbered({"sources": sources, "traces": traces, "rows": rows})
            write_atomically(file, dump_json(said).encode())
            kept[file] = _kept(file, traces)
            progress.count(len(kept), total, "points")
    return pd.DataFrame(
        [
            {**point.axes, **row}
            for file, point in zip(files, points, strict=True)
            for row in kept[file]
        ]
    )


def _check_writable(folder: Path) -> None:
    """Before the first point is run, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WorkloadError(
            f"{folder}: cannot be written ({error.strerror}): check the folder and the free space"
        ) from None


def _kept(file: Path, traces: str, sources: str | None = None) -> list | None:
    """Rows of a point; None where it has to be run: not there, damaged, with other traces, or not
    of `sources`. Raises SettingsError for one of a later version."""
    try:
        document = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    found = POINTS.read(document, file, SettingsError)
    try:
        fits = sources in (None, found["sources"]) and traces == found["traces"]
        return list(found["rows"]) if fits else None
    except (KeyError, TypeError):
        return None


def _results(
    work: Callable[..., Rows], todo: Mapping[Path, Mapping], workers: int
) -> Iterable[tuple[Path, list]]:
    if workers == 1 or len(todo) < 2:
        for file, arguments in todo.items():
            yield file, _one(work, arguments)
        return
    # forked workers would inherit the threads of the progress bar
    others, context = set(multiprocessing.active_children()), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(todo)), context, _end_with_parent) as pool:
        running = {pool.submit(_one, work, arguments): file for file, arguments in todo.items()}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()  # what it computes is not kept any more
            raise


def _end_with_parent() -> None:
    """In a worker: it waits for work for ever where its parent was killed, so it watches that."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _one(work: Callable[..., Rows], arguments: Mapping) -> list:
    found = work(**arguments)
    # a simulation's objects refer to each other in circles; a worker would keep dozens of them
    gc.collect()
    return [found] if isinstance(found, Mapping) else list(found)


def _digest(work: Callable, bound: inspect.BoundArguments) -> str:
    bound.apply_defaults()
    text = json.dumps(
        [work.__module__, work.__qualname__, bound.arguments], sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def sources_digest(work: Callable) -> str:
    """Of whatever can change what `work` returns: its own module, and every module and data file of
    the simulator."""
    packages = [ROOT / name for name in ("sim", "policies", "backends", "profiles", "traces")]
    found = sorted(
        path
        for package in packages
        for path in package.rglob("*")
        if path.suffix in (".py", ".json", ".npz")
    )
    sha = hashlib.sha256()
    for path in [*_own_modules(Path(inspect.getfile(work))), *found]:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def traces_digest() -> str:
    """Of the files that a run would find for the recorded traces; where there is none, of what
    stands in for it."""
    found = [
        (trace["name"], trace["where"]) for trace in list_traces() if trace["kind"] == "recorded"
    ]
    files = [
        (name, _content(Path(where)) if Path(where).is_file() else where.partition(":")[0])
        for name, where in found
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:24]


def _content(file: Path) -> str:
    status = file.stat()
    return _content_of(file, status.st_size, status.st_mtime_ns)


@cache
def _content_of(file: Path, size: int, changed_ns: int) -> str:
    """Read once for all figures of a study, as long as it stays as it is."""
    return sha256_of(file)


def _own_modules(file: Path) -> list[Path]:
    """`file`, and the modules of the experiments that it imports, and theirs."""
    found, todo = set(), [file.resolve()]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(EXPERIMENTS):
                module = ROOT.joinpath(*node.module.split(".")[1:])
                todo += [
                    module.with_suffix(".py"),
                    *(module / f"{name.name}.py" for name in node.names),
                ]
    return sorted(found)


def interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and half width of Student's interval for it; half width nan for a single value."""
    found = np.asarray(list(values), float)
    if len(found) < 2:
        return float(found.mean()), float("nan")
    from scipy import stats  # a second to import, and the workers of a grid need none

    half = (
        stats.t.ppf(0.5 + confidence / 2, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    )
    return float(found.mean()), float(half)


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """A row for each combination of `by`, as they appear: the mean of each of `values` and, as
    NAME_ci, the half width."""
    rows = []
    for keys, group in frame.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, keys if isinstance(keys, tuple) else (keys,), strict=True)) | {
            "seeds": len(group)
        }
        for name in values:
            row[name], row[f"{name}_ci"] = interval(group[name])
        rows.append(row)
    return pd.DataFrame(rows)


def shown(mean: float, half: float, digits: int = 3) -> str:
    """`12.3 +- 0.4` with as many significant digits of the mean as asked for."""

    def number(value: float, digits: int) -> str:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"

    return number(mean, digits) + (f" ± {number(half, 2)}" if np.isfinite(half) else "")
