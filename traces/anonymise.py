"""A trace that can be shown: it no longer has which client asked what, and when exactly. It keeps
how much was asked, how often, and what prompts share.

Gone: names of requests, sessions and applications, texts, kinds of applications, the trace's
source, the time of day, and with `jitter_s` the exact moments. Block ids are renamed in an order
drawn from the salt. Kept: lengths in tokens, classes, priorities, objectives, which rows share
which blocks, gaps between arrivals (with jitter: nearly).
"""

import hashlib
import math
import secrets
from dataclasses import replace

import numpy as np

from twinserve.traces.stats import statistics
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import (
    ApplicationInfo,
    Prefix,
    PrefixBlocks,
    Provenance,
    Workload,
    WorkloadError,
)

NAME = "anonymised"


def anonymise(w: Workload, *, salt: str | None = None, jitter_s: float = 0.0) -> Workload:
    """Return the workload without what identifies its clients; see the module's docstring.

    salt      same salt and workload, same result; None: a secret that is thrown away
    jitter_s  each arrival and delay moves by up to so many seconds, either way, evenly drawn

    Raises WorkloadError for a jitter that cannot be.
    """
    if not 0 <= jitter_s < math.inf:
        raise WorkloadError(f"jitter {jitter_s} s: give a finite number, 0 or more")
    key = secrets.token_bytes(32) if salt is None else salt.encode("utf-8", "surrogatepass")
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(key, digest_size=32).digest()))
    moved = _moved(w, jitter_s, rng)
    kinds = dict.fromkeys(info.kind for info in moved.applications.values())
    renamed = {kind: f"kind{i}" for i, kind in enumerate(kinds)}
    return replace(
        moved,
        ids=[f"r{i}" for i in range(len(moved))],
        group_names=[f"g{i}" for i in range(len(moved.group_names))],
        applications={
            group: ApplicationInfo(renamed[info.kind]) for group, info in moved.applications.items()
        },
        prefix=None if moved.prefix is None else _renamed(moved.prefix, rng),
        provenance=Provenance(NAME, transforms=(f"anonymise(jitter={jitter_s:g}s)",)),
    )


def _moved(w: Workload, jitter_s: float, rng: np.random.Generator) -> Workload:
    """From the first arrival on, moved by the jitter, and sorted again."""
    known = ~np.isnan(w.arrival_s)
    arrival, delay = w.arrival_s.copy(), w.delay_s.copy()
    if jitter_s:
        arrival += rng.uniform(-jitter_s, jitter_s, len(w))
        delay += np.where(delay > 0, rng.uniform(-jitter_s, jitter_s, len(w)), 0.0)
        delay = np.maximum(delay, 0.0)
    first = float(np.nanmin(arrival)) if known.any() else 0.0
    stages = tuple(moment - first for moment in w.stages_s)
    order = np.argsort(arrival, kind="stable")
    moved = replace(w, arrival_s=arrival - first, delay_s=delay, stages_s=stages)
    return take_rows(moved, order)


def _renamed(prefix: Prefix, rng: np.random.Generator) -> PrefixBlocks:
    names = rng.permutation(prefix.distinct).astype(np.int64)
    return PrefixBlocks(names[prefix.ids], prefix.offsets, prefix.block_tokens)


def kept(before: Workload, after: Workload) -> list[tuple[str, float, float]]:
    """Return name, value before and value after of each statistic; nested ones by a path."""
    flat = [dict(_flat(statistics(w))) for w in (before, after)]
    return [(name, flat[0][name], flat[1][name]) for name in flat[0] if name in flat[1]]


def _flat(found: dict, path: str = ""):
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name} ")
        elif value is not None:
            yield f"{path}{name}", float(value)
