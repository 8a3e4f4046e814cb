"""The door to this package: a workload by its name or the path of its file."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from twinserve.traces import catalog, transform
from twinserve.traces.apps import generate as apps
from twinserve.traces.download import (
    SEARCH_PATH_VARIABLE,
    NotReachable,
    Progress,
    SearchPath,
    cache_folder,
    download,
    find_local,
    search_folders,
)
from twinserve.traces.generators import replica as replicas
from twinserve.traces.generators import synth
from twinserve.traces.generators.in_a_line import in_a_line, is_in_a_line
from twinserve.traces.generators.longdoc import is_longdoc, longdoc
from twinserve.traces.generators.tidal import tidal
from twinserve.traces.readers.formats import read_file
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.readers.sidecar import load as load_sidecar
from twinserve.traces.workload import Workload, WorkloadError

MIN_TICKS, MIN_ROWS_PER_TICK, MIN_TICK_S = 16, 2.0, 0.5


def find_tick(arrival_s: np.ndarray) -> float | None:
    """Return the seconds between the ticks that arrivals fall on, or None if arrivals do not look
    quantised.

    Quantised: at least 16 moments with 2 rows each on average; nine in ten of the gaps between
    moments within 5 % of a multiple of their median; and that median at least half a second.
    """
    known = arrival_s[~np.isnan(arrival_s)]
    moments = np.unique(known)
    if len(moments) < MIN_TICKS or len(known) < MIN_ROWS_PER_TICK * len(moments):
        return None
    gaps = np.diff(moments)
    tick = float(np.median(gaps))
    if tick < MIN_TICK_S:
        return None
    off = np.abs(gaps / tick - np.maximum(np.rint(gaps / tick), 1))
    return tick if np.mean(off < 0.05) >= 0.9 else None


def spread_ticks(w: Workload, seed: int = 0) -> Workload:
    """Arrivals drawn uniformly within their tick, rows keeping their order; unchanged if nothing is
    quantised.
    """
    tick = find_tick(w.arrival_s)
    if tick is None:
        return w
    known = ~np.isnan(w.arrival_s)
    moments, tick_of = np.unique(w.arrival_s[known], return_inverse=True)
    width = np.minimum(np.append(np.diff(moments), tick), tick)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x71C,)))
    share = rng.random(len(tick_of))
    share = share[np.lexsort((share, tick_of))]  # rows are sorted, so tick by tick
    arrival = w.arrival_s.copy()
    arrival[known] = moments[tick_of] + share * width[tick_of]
    done = f"spread-ticks(tick={tick:g}s, seed={seed})"
    return replace(w, arrival_s=arrival, provenance=w.provenance.then(done))


# A clock that starts here or later (seconds) counts from 1970, not from the start of the trace.
CALENDAR_S = 1e8
TIDAL = "tidal"


def load_trace(
    name_or_path: str | Path,
    *,
    seed: int = 0,
    search_path: SearchPath = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    format: str | None = None,
    raw_arrivals: bool = False,
    progress: Progress | None = None,
    rate: float | None = None,
    count: int | None = None,
    duration_s: float | None = None,
    block_tokens: int | None = None,
    time_unit: str | None = None,
    columns: str | None = None,
    benchmark: int | None = None,
) -> Workload:
    """Return the workload of a trace, by its name (`trace list` has them) or by the path of a file.

    A recorded trace is taken from the search path (the argument or TWINSERVE_TRACES), else from the
    cache, else downloaded once unless `offline`. If that fails, an embedded replica stands in if
    there is one: provenance.replica is then True and a notice says so.

    seed          of generated arrivals and lengths, of replicas, and of spreading ticks
    raw_arrivals  keep coarse ticks as they were recorded; by default arrivals are spread
    rate, count, duration_s   of generated arrivals only: requests/s, requests, seconds; of `apps`
                  count alone: applications
    format        the name of a file's format, if its content does not tell
    block_tokens, time_unit   tokens a hash id covers (Mooncake, Bailian), "ms" or "s" (Mooncake,
                  `custom`): if they are not the format's; refused for other formats
    columns       which column of a CSV file is what: arrival=ts,prompt=in,output=out
                  (readers/measured/table.py)
    benchmark     which benchmark of a report of guidellm with several, from 1
    progress      called with (bytes done, bytes in all or None) while downloading

    Raises WorkloadError with one line for an unknown name or anything wrong with a file.
    """
    name = os.fspath(name_or_path)
    if seed < 0:
        raise WorkloadError(f"seed {seed} is below 0: give a whole number from 0 up")
    given = {
        "count": count,
        "rate": rate,
        "duration": duration_s,
        "format": format,
        "block_size": block_tokens,
        "time_unit": time_unit,
        "columns": columns,
        "benchmark": benchmark,
    }
    places = {
        "search_path": search_path,
        "cache_dir": cache_dir,
        "offline": offline,
        "progress": progress,
    }
    takes, load = next((takes, load) for is_one, takes, load in _KINDS if is_one(name))
    for what, value in given.items():
        if value is not None and what not in takes:
            raise WorkloadError(
                f"trace '{name}' does not take {what} ({value}): leave it out"
                + ("; --rate-scale changes a recorded trace's rate" if what == "rate" else "")
            )
    return load(name, seed, raw_arrivals, places, *(given[what] for what in takes))


def has_name(name: str) -> bool:
    """Return whether `load_trace` takes the text for a trace's name, not for a path."""
    return any(is_one(name) for is_one, _, load in _KINDS if load is not _file)


def _synthetic(name: str, seed: int, raw: bool, places: dict, rate, count, duration) -> Workload:
    rate = 1.0 if rate is None else rate
    return synth.synth(name, rate=rate, count=count, duration_s=duration, seed=seed)


def _apps(name: str, seed: int, raw: bool, places: dict, count: int | None) -> Workload:
    number = {} if count is None else {"count": count}
    return apps.load(name, seed=seed, raw_arrivals=raw, **number, **places)


def _longdoc(name: str, seed: int, raw: bool, places: dict, count: int | None) -> Workload:
    return longdoc(name, requests=count, seed=seed)


def _tidal(name: str, seed: int, raw: bool, places: dict) -> Workload:
    return tidal(seed=seed)


def _in_a_line(name: str, seed: int, raw: bool, places: dict) -> Workload:
    return in_a_line(name, seed)


def _recorded(name: str, seed: int, raw: bool, places: dict) -> Workload:
    info = catalog.resolve(name)
    try:
        path = fetch(name, **places)
    except NotReachable as e:
        if not info.replica:
            raise WorkloadError(
                f"trace '{info.name}' is not at hand and has no embedded replica ({e}): put "
                f"{info.files[0]} into a folder of {SEARCH_PATH_VARIABLE}, from {info.url}"
            ) from None
        w = replicas.replica(info.name, seed)
        notice = (
            f"{info.name}: the original is in no folder of {SEARCH_PATH_VARIABLE}, not in the "
            "cache, and was not downloaded: this is its embedded replica, a synthetic trace with "
            "the same statistics; do not report it as the original"
        )
        w = replace(w, provenance=replace(w.provenance, notices=(notice,)))
        return w if raw else spread_ticks(w, seed)
    w = _read(path, info.format, ReadOptions(seed=seed), raw)
    return replace(w, provenance=replace(w.provenance, name=info.name))


def _file(
    name: str, seed: int, raw: bool, places: dict, format, block_tokens, time_unit, rate, *further
) -> Workload:
    options = ReadOptions(block_tokens, time_unit, rate, seed, *further)
    return _read(existing(name), format, options, raw)


# Kinds of names: how one is told, which settings it takes, and its loader. The first that fits.
_KINDS: tuple[tuple[Callable[[str], object], tuple[str, ...], Callable[..., Workload]], ...] = (
    (synth.is_synthetic, ("rate", "count", "duration"), _synthetic),
    (apps.is_apps, ("count",), _apps),
    (is_longdoc, ("count",), _longdoc),
    (TIDAL.__eq__, (), _tidal),
    (is_in_a_line, (), _in_a_line),
    (catalog.resolve, (), _recorded),
    (
        lambda name: True,
        ("format", "block_size", "time_unit", "rate", "columns", "benchmark"),
        _file,
    ),
)


def existing(name: str) -> Path:
    """Return the trace file of this path. Raises WorkloadError if there is none."""
    path = Path(name).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # a name too long or with a null character
        raise catalog.unknown(name[:80].replace("\0", "?")) from None
    if is_file:
        return path
    if is_folder:
        raise WorkloadError(f"{name}: a folder, not a trace file: give a file in it")
    if path.exists():
        raise WorkloadError(
            f"{name}: not a regular file: copy its content into a file, and give that file"
        )
    if os.sep in name or path.suffix in (".jsonl", ".json", ".csv"):
        raise WorkloadError(f"{name}: no such file: check the path")
    raise catalog.unknown(name)


def _read(path: Path, format: str | None, options: ReadOptions, raw: bool) -> Workload:
    w = read_file(path, format, options)
    known = w.known_arrivals_s
    if len(known) and known[0] >= CALENDAR_S:
        w = transform.rebase(w)
    # A trace that we wrote is replayed as it was run: nothing is spread twice.
    if raw or load_sidecar(path) is not None:
        return w
    return spread_ticks(w, options.seed)


def fetch(
    name: str,
    *,
    search_path: SearchPath = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The file of a recorded trace, downloaded into the cache if it is nowhere yet.

    Raises NotReachable if it cannot be had, WorkloadError for an unknown name or wrong content.
    """
    info = catalog.resolve(name)
    if info is None:
        if is_in_a_line(name):
            raise WorkloadError(f"'{name}' is generated: there is nothing to fetch")
        if apps.is_apps(name):
            raise WorkloadError(
                f"'{name}' is generated with the arrivals of {apps.ARRIVALS}: fetch that trace"
            )
        if synth.is_synthetic(name):
            raise WorkloadError(f"'{name}' is generated: there is nothing to fetch")
        raise catalog.unknown(name)
    cache = cache_folder(cache_dir)
    path = find_local(info, search_folders(search_path), cache)
    if path is not None:
        return path
    if offline:
        raise NotReachable("offline, and the file is in no folder of the search path or the cache")
    return download(info.url, cache / info.files[0], info.sha256, progress)
