"""The door to this package: a workload by name or path, and the verbs of `twinserve trace`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twinserve.traces import apps, catalog, synth, transform
from twinserve.traces import replica as replicas
from twinserve.traces.catalog import TraceInfo
from twinserve.traces.download import (
    SEARCH_PATH_VARIABLE,
    NotReachable,
    Progress,
    cache_folder,
    download,
    find_local,
    search_folders,
)
from twinserve.traces.formats import UNITS, detect_format, read_file
from twinserve.traces.longdoc import is_longdoc, longdoc
from twinserve.traces.options import ReadOptions
from twinserve.traces.sidecar import load as load_sidecar
from twinserve.traces.stats import statistics
from twinserve.traces.ticks import find_tick, spread_ticks
from twinserve.traces.tidal import tidal
from twinserve.traces.workload import Workload, WorkloadError
from twinserve.traces.write import check_target, write_trace

# A clock that starts here or later (seconds) counts from 1970, not from the start of the trace.
CALENDAR_S = 1e8
TIDAL = "tidal"
SearchPath = str | Path | Sequence[str | Path] | None


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
) -> Workload:
    """The workload of a trace, by its name (`trace list` has them) or by the path of a file.

    A recorded trace is taken from the search path (the argument or TWINSERVE_TRACES), else from the
    cache, else downloaded once unless `offline`. Where that fails, an embedded replica stands in if
    there is one: provenance.replica is then True and a notice says so.

    seed          of generated arrivals and lengths, of replicas, and of spreading ticks
    raw_arrivals  keep coarse ticks as they were recorded; by default arrivals are spread
    rate, count, duration_s   of generated arrivals only: requests/s, requests, seconds; of `apps` count alone:
                  applications
    format        the name of a file's format, where its content does not tell
    block_tokens, time_unit   tokens a hash id covers (Mooncake, Bailian), "ms" or "s" (Mooncake,
                  `custom`): where they are not the format's; refused for other formats
    progress      called with (bytes done, bytes in all or None) while downloading

    Raises WorkloadError with one line for an unknown name or anything wrong with a file.
    """
    name = os.fspath(name_or_path)
    if seed < 0:
        raise WorkloadError(f"seed {seed} is below 0: give a whole number from 0 up")
    if synth.is_synthetic(name):
        _need_unset(name, format=format, block_size=block_tokens, time_unit=time_unit)
        speed = 1.0 if rate is None else rate
        return synth.synth(name, rate=speed, count=count, duration_s=duration_s, seed=seed)
    if apps.is_apps(name):
        unused = {"rate": rate, "duration": duration_s, "format": format, "block_size": block_tokens, "time_unit": time_unit}
        _need_unset(name, **unused)
        places = {"search_path": search_path, "cache_dir": cache_dir, "offline": offline, "progress": progress}
        number = {} if count is None else {"count": count}
        return apps.load(name, seed=seed, raw_arrivals=raw_arrivals, **number, **places)
    if is_longdoc(name) or name == TIDAL:
        if name == TIDAL:
            _need_unset(name, count=count)
        _need_unset(name, rate=rate, duration=duration_s, format=format, block_size=block_tokens, time_unit=time_unit)
        return longdoc(name, requests=count, seed=seed) if is_longdoc(name) else tidal(seed=seed)
    _need_unset(name, count=count, duration=duration_s)
    options = ReadOptions(block_tokens, time_unit, rate, seed)
    info = catalog.resolve(name)
    if info is None:
        return _load_file(_existing(name), format, options, raw_arrivals)
    _need_unset(name, rate=rate, format=format, block_size=block_tokens, time_unit=time_unit)
    try:
        path = fetch(
            name, search_path=search_path, cache_dir=cache_dir, offline=offline, progress=progress
        )
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
        return w if raw_arrivals else spread_ticks(w, seed)
    w = _load_file(path, info.format, options, raw_arrivals)
    return replace(w, provenance=replace(w.provenance, name=info.name))


def _need_unset(name: str, **settings) -> None:
    for what, value in settings.items():
        if value is not None:
            raise WorkloadError(
                f"trace '{name}' does not take {what} ({value}): leave it out"
                + ("; --rate-scale changes a recorded trace's rate" if what == "rate" else "")
            )


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # a name too long or with a null character
        raise catalog.unknown(name[:80].replace("\0", "?")) from None
    if is_file:
        return path
    if is_folder:
        raise WorkloadError(f"{name}: a folder, not a trace file: give a file in it")
    if os.sep in name or path.suffix in (".jsonl", ".json", ".csv"):
        raise WorkloadError(f"{name}: no such file: check the path")
    raise catalog.unknown(name)


def _load_file(
    path: Path, format: str | None, options: ReadOptions, raw_arrivals: bool
) -> Workload:
    w = read_file(path, format, options)
    known = w.known_arrivals_s
    if len(known) and known[0] >= CALENDAR_S:
        w = transform.rebase(w)
    # A trace that we wrote is replayed as it was run: nothing is spread twice.
    if raw_arrivals or load_sidecar(path) is not None:
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
        if apps.is_apps(name):
            raise WorkloadError(f"'{name}' is generated: fetch {apps.ARRIVALS}, whose arrivals it takes")
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


def list_traces(search_path: SearchPath = None, cache_dir: str | Path | None = None) -> list[dict]:
    """One dict a name, with everything in TraceInfo that a list shows, aliases and kind.

    `where` is the local file's path, "replica", "download", "generated", or "unusable: WHY".
    """
    folders, cache = search_folders(search_path), cache_folder(cache_dir)
    out = []
    for info in catalog.BY_NAME.values():
        out.append(
            {
                "name": info.name,
                "aliases": [a for a, full in catalog.ALIASES.items() if full == info.name],
                "kind": "recorded",
                "description": info.description,
                "rows": info.rows,
                "licence": info.licence,
                "cite": info.cite,
                "url": info.url,
                "sha256": info.sha256,
                "replica": info.replica,
                "where": _where(info, folders, cache),
            }
        )
    for name, description in catalog.SYNTHETIC.items():
        row = dict.fromkeys(("rows", "licence", "cite", "url", "sha256"))
        made = {"name": name, "aliases": [], "kind": "generated", "description": description}
        out.append({**made, **row, "replica": False, "where": "generated"})
    return out


def _where(info: TraceInfo, folders: list[Path], cache: Path) -> str:
    try:
        path = find_local(info, folders, cache)
    except WorkloadError as e:
        return f"unusable: {e}"
    return str(path) if path is not None else "replica" if info.replica else "download"


def describe(w: Workload) -> str:
    """One line for a person: rows, rate, span, lengths, block size, and whether it is a replica."""
    known, span = w.known_arrivals_s, w.span_s
    rate = f"{len(known) / span:.3g}/s over {span:,.0f} s" if span > 0 else "all at once"
    parts = [
        f"{w.provenance.name}{' (replica)' if w.provenance.replica else ''}: {len(w):,} requests",
        rate,
        f"prompt mean {w.prompt_tokens.mean():,.0f}",
        f"output mean {w.output_tokens.mean():,.0f} tokens",
        f"prefix blocks of {w.prefix.block_tokens} tokens" if w.prefix else "no prefix blocks",
    ]
    if len(known) < len(w):
        parts.append(f"{len(w) - len(known):,} rows in closed loops")
    if w.pool is not None:
        parts.append(f"best-effort pool of {w.pool.batch}")
    return ", ".join(parts)


def describe_file(path: str | Path, format: str | None = None) -> str:
    """The units a file is read in: its format, time unit and block size. OSError if it cannot be read."""
    with open(path, "rb") as file:
        name = format or detect_format(file.read(1 << 20), str(path))
    unit, block = UNITS[name]
    meta = load_sidecar(path) if name == "mooncake" else None
    if meta is not None:
        unit, block = meta.time_unit, meta.block_size
    size = f"{block}-token blocks" if block else "no prefix blocks"
    return f"{path}: {name} format, timestamps: {unit}, {size}"


def inspect(w: Workload) -> dict:
    """What `trace inspect` shows: the line of `describe`, provenance, ticks left, statistics."""
    p = w.provenance
    return {
        "summary": describe(w),
        "name": p.name,
        "path": p.path,
        "sha256": p.sha256,
        "replica": p.replica,
        "transforms": list(p.transforms),
        "notices": list(p.notices),
        "tick_s": find_tick(w.arrival_s),
        **statistics(w),
    }


def convert(src: str | Path, dst: str | Path, *, overwrite: bool = False, **load_options) -> Workload:
    """Writes a trace, by name or path, as Mooncake+ JSONL with its sidecar; returns the workload.

    `load_options` are those of load_trace; raw_arrivals=True keeps ticks as recorded. Another file is
    replaced only with `overwrite`, the trace that is read never: WorkloadError.
    """
    check_target(dst, overwrite, src)
    w = load_trace(src, **load_options)
    check_target(dst, overwrite, w.provenance.path)  # a name stands for a file too
    origin = w.provenance.sha256
    w = replace(w, provenance=w.provenance.then(f"convert({origin or w.provenance.name})"))
    write_trace(w, dst)
    return w


__all__ = [
    "convert",
    "describe",
    "describe_file",
    "fetch",
    "inspect",
    "list_traces",
    "load_trace",
    "statistics",
    "write_trace",
]
