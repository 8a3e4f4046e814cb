"""The verbs of `twinserve trace`: what there is, what is in it, and another copy of it."""

from dataclasses import replace
from pathlib import Path

from twinserve.traces import catalog
from twinserve.traces.catalog import TraceInfo
from twinserve.traces.download import SearchPath, cache_folder, find_local, search_folders
from twinserve.traces.load import find_tick, load_trace
from twinserve.traces.stats import statistics
from twinserve.traces.workload import Workload, WorkloadError
from twinserve.traces.write import check_target, write_trace


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
    if w.concurrency is not None:
        parts.append(f"at most {w.concurrency:,} at once")
    if w.pool is not None:
        parts.append(f"best-effort pool of {w.pool.batch}")
    return ", ".join(parts)


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


def convert(
    src: str | Path, dst: str | Path, *, overwrite: bool = False, **load_options
) -> Workload:
    """Writes a trace, by name or path, as Mooncake+ JSONL with its sidecar; returns the workload.

    `load_options` are those of load_trace; raw_arrivals=True keeps ticks as recorded. Another file
    is replaced only with `overwrite`, the trace that is read never: WorkloadError.
    """
    check_target(dst, overwrite, src)
    w = load_trace(src, **load_options)
    check_target(dst, overwrite, w.provenance.path)  # a name stands for a file too
    origin = w.provenance.sha256
    w = replace(w, provenance=w.provenance.then(f"convert({origin or w.provenance.name})"))
    write_trace(w, dst)
    return w
