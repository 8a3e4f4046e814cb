"""Changes to a workload. Each returns a new one and records itself in provenance.transforms."""

import math
from dataclasses import replace
from itertools import count

import numpy as np

from twinserve.traces import prefix as blocks
from twinserve.traces.readers.columns import MAX_SECONDS
from twinserve.traces.workload import (
    CLASS_NAMES,
    BestEffortPool,
    Provenance,
    Workload,
    WorkloadError,
)

ROW_COLUMNS = (
    *("arrival_s", "prompt_tokens", "output_tokens", "service_class", "priority", "slo_ttft_s"),
    *("slo_tpot_s", "group", "stage", "delay_s"),
)


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise WorkloadError(message)


def take_rows(w: Workload, rows: np.ndarray) -> Workload:
    """The rows of a workload at some indices, in that order; groups without rows disappear."""
    group = w.group[rows]
    kept = np.unique(group[group >= 0])
    columns = {name: getattr(w, name)[rows] for name in ROW_COLUMNS}
    columns["group"] = np.where(group >= 0, np.searchsorted(kept, group), -1)
    return replace(
        w,
        **columns,
        ids=[w.ids[i] for i in rows],
        group_names=[w.group_names[g] for g in kept],
        applications={
            i: w.applications[g] for i, g in enumerate(kept.tolist()) if g in w.applications
        },
        prefix=None if w.prefix is None else blocks.take(w.prefix, rows),
    )


def _keep(w: Workload, wanted: np.ndarray) -> np.ndarray:
    """Indices of the wanted rows: groups stay whole, by the fate of their first stage (all of it
    must be wanted).
    """
    if not len(w.group_names):
        return np.flatnonzero(wanted)
    first = (w.group >= 0) & (w.stage == 0)
    lost = np.zeros(len(w.group_names) + 1, bool)  # the extra entry is for group -1
    np.logical_or.at(lost, w.group[first], ~wanted[first])
    return np.flatnonzero(np.where(w.group >= 0, ~lost[w.group], wanted))


def scale_rate(w: Workload, factor: float) -> Workload:
    """Arrivals `factor` times as fast. Think times (delays) of sessions stay as they are."""
    _need(0 < factor < math.inf, f"rate factor {factor} is not a finite number above 0: give one")
    # Beyond this, seconds since the start leave no digits for the length of a step.
    _need(
        w.last_arrival_s / factor <= MAX_SECONDS,
        f"rate factor {factor:g} puts the last arrival later than {MAX_SECONDS:g} s: give a "
        "larger one",
    )
    return replace(
        w,
        arrival_s=w.arrival_s / factor,
        stages_s=tuple(moment / factor for moment in w.stages_s),
        provenance=w.provenance.then(f"scale-rate({factor:g})"),
    )


def rebase(w: Workload) -> Workload:
    """Arrivals counted from the first one."""
    known = w.known_arrivals_s
    start = float(known[0]) if len(known) else 0.0
    done = w.provenance.then(f"rebase(start={start!r}s)")
    return replace(w, arrival_s=w.arrival_s - start, stages_s=_shifted(w, start), provenance=done)


def _shifted(w: Workload, start_s: float) -> tuple[float, ...]:
    return tuple(moment - start_s for moment in w.stages_s)


def window(w: Workload, start_s: float, end_s: float) -> Workload:
    """Rows that arrive within [start_s, end_s), their arrivals counted from start_s."""
    ok = 0 <= start_s < end_s
    _need(ok, f"window {start_s} .. {end_s} s is empty: give 0 <= start < end")
    inside = (w.arrival_s >= start_s) & (w.arrival_s < end_s)
    _need(
        bool(inside.any()),
        f"no request arrives from {start_s:g} to {end_s:g} s: "
        f"the trace ends at {w.last_arrival_s:g} s",
    )
    cut = take_rows(w, _keep(w, inside))
    done = cut.provenance.then(f"window({start_s:g}s, {end_s:g}s)")
    stages = _shifted(cut, start_s)
    return replace(cut, arrival_s=cut.arrival_s - start_s, stages_s=stages, provenance=done)


def head(w: Workload, n: int) -> Workload:
    """The first n arrivals, and the later turns of sessions among them."""
    _need(n >= 1, f"head {n} is below 1: give a number of requests")
    cut = take_rows(w, _keep(w, np.arange(len(w)) < n))
    _need(
        len(cut) > 0,
        f"the first {n} rows do not hold a whole first stage of an application: take more",
    )
    return replace(cut, provenance=cut.provenance.then(f"head({n})"))


def cap_length(w: Workload, max_total_tokens: int) -> Workload:
    """Limit prompt and output of every row to a total, e.g. a model's context.

    An over-long row keeps its output up to half of the total, or more if its prompt leaves room.
    The prompt is cut at its end to the rest, its prefix blocks with it. Prefix sharing before the
    cut is kept.
    """
    limit = min(max_total_tokens, 2**32)  # no row is longer; larger numbers would not fit int64
    _need(
        limit >= 2, f"length cap {limit} is below 2: a request needs a prompt and an output token"
    )
    prompt, output = w.prompt_tokens, w.output_tokens
    over = prompt + output > limit
    most = np.maximum(limit // 2, limit - prompt)
    new_output = np.where(over, np.minimum(output, most), output)
    new_prompt = np.where(over, np.minimum(prompt, limit - new_output), prompt)
    prefix = None if w.prefix is None else blocks.truncate(w.prefix, prompt, new_prompt)
    return replace(
        w,
        prompt_tokens=new_prompt,
        output_tokens=new_output,
        prefix=prefix,
        provenance=w.provenance.then(f"cap-length({limit}: {int(over.sum())} rows cut)"),
    )


def check_fits(w: Workload, max_total_tokens: int) -> None:
    """Raises WorkloadError naming the first row longer than the total, and how many there are."""
    name, limit, pool = w.provenance.name, max_total_tokens, w.pool
    over = w.prompt_tokens + w.output_tokens > limit
    if over.any():
        row = int(over.argmax())
        raise WorkloadError(
            f"{name}: {int(over.sum())} of {len(w)} rows are over the limit of {limit} tokens, "
            f"first request {w.ids[row]} (row {row + 1}) of {w.prompt_tokens[row]} prompt and "
            f"{w.output_tokens[row]} output tokens: cut them with --cap-length {limit}"
        )
    if pool is not None and pool.longest > limit:
        raise WorkloadError(
            f"{name}: the best-effort pool draws up to {pool.prompt_tokens[1]} prompt + "
            f"{pool.output_tokens[1]} output tokens, over the limit of {limit}: "
            "give the pool shorter lengths"
        )


def _class_number(name: str | int) -> int:
    if name in (0, 1):
        return int(name)
    _need(name in CLASS_NAMES, f"unknown class '{name}': choose from {', '.join(CLASS_NAMES)}")
    return CLASS_NAMES.index(name)


def set_slo(
    w: Workload,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    *,
    service_class: str | int | None = None,
) -> Workload:
    """Constant objectives in seconds, for all rows or one class; None leaves one as it is."""
    changed, said = {}, []
    where = (
        np.ones(len(w), bool)
        if service_class is None
        else w.service_class == _class_number(service_class)
    )
    for column, value in (("slo_ttft_s", ttft_s), ("slo_tpot_s", tpot_s)):
        if value is not None:
            _need(0 < value < math.inf, f"SLO {value} s is not above 0: give seconds")
            changed[column] = np.where(where, float(value), getattr(w, column))
            said.append(f"{column[4:8]}={value:g}s")
    if service_class is not None:
        said.append(f"class={CLASS_NAMES[_class_number(service_class)]}")
    return replace(w, **changed, provenance=w.provenance.then(f"set-slo({', '.join(said)})"))


def set_class(w: Workload, service_class: str | int) -> Workload:
    """All rows of one class, `rt` or `be`."""
    number = _class_number(service_class)
    done = w.provenance.then(f"set-class({CLASS_NAMES[number]})")
    return replace(w, service_class=np.full(len(w), number, np.int8), provenance=done)


def set_priority(w: Workload, priority: int) -> Workload:
    """All rows of one priority; smaller is more urgent."""
    done = w.provenance.then(f"set-priority({priority})")
    return replace(w, priority=np.full(len(w), priority, np.int64), provenance=done)


def with_pool(w: Workload, pool: BestEffortPool) -> Workload:
    """Add a closed-loop best-effort pool to the workload (in place of one that it has)."""
    _need(pool.batch >= 1, f"best-effort batch {pool.batch} is below 1: give a number of requests")
    for what, (low, high) in (("prompt", pool.prompt_tokens), ("output", pool.output_tokens)):
        _need(
            1 <= low <= high, f"best-effort {what} lengths {low} .. {high}: need 1 <= low <= high"
        )
    said = (
        f"with-pool(batch={pool.batch}, prompt={pool.prompt_tokens[0]}-{pool.prompt_tokens[1]}, "
        f"output={pool.output_tokens[0]}-{pool.output_tokens[1]}, seed={pool.seed})"
    )
    return replace(w, pool=pool, provenance=w.provenance.then(said))


def merge(a: Workload, b: Workload) -> Workload:
    """Both workloads at once, e.g. real-time rows and best-effort rows of another trace.

    Rows of b whose ids a has get the first free of `ID.b1`, `ID.b2`, ...; groups likewise. Prompts
    of a and b share no prefix. Equal arrivals put a's rows first.
    """
    _need(a.pool is None or b.pool is None, "both workloads have a best-effort pool: drop one")
    _need(
        a.concurrency is None and b.concurrency is None,
        "a closed loop limits all requests of its list: run the workloads one by one",
    )
    prefix = None
    if a.prefix is not None or b.prefix is not None:
        size = (a.prefix or b.prefix).block_tokens
        pa = a.prefix or blocks.unshared(a.prompt_tokens, size)
        pb = b.prefix or blocks.unshared(b.prompt_tokens, size)
        _need(
            pa.block_tokens == pb.block_tokens,
            f"prefix blocks of {pa.block_tokens} and {pb.block_tokens} tokens cannot be merged: "
            "drop the ids of one trace",
        )
        prefix = blocks.join(pa, pb)
    columns = {n: np.concatenate([getattr(a, n), getattr(b, n)]) for n in ROW_COLUMNS}
    columns["group"][len(a) :] += np.where(b.group >= 0, len(a.group_names), 0)
    p, q = a.provenance, b.provenance
    both = replace(
        a,
        **columns,
        ids=a.ids + _renamed(b.ids, a.ids),
        group_names=a.group_names + _renamed(b.group_names, a.group_names),
        applications={
            **a.applications,
            **{len(a.group_names) + g: info for g, info in b.applications.items()},
        },
        prefix=prefix,
        pool=a.pool or b.pool,
        provenance=Provenance(
            f"{p.name}+{q.name}",
            path=p.path,
            sha256=p.sha256,
            replica=p.replica or q.replica,
            transforms=(*p.transforms, f"merge({_origin(q)})"),
            notices=(*p.notices, *q.notices),
        ),
    )
    return take_rows(both, np.argsort(both.arrival_s, kind="stable"))


def _origin(p: Provenance) -> str:
    return "; ".join([p.name, *([f"sha256={p.sha256}"] if p.sha256 else []), *p.transforms])


def _renamed(names: list[str], taken: list[str]) -> list[str]:
    """Names, those that are taken replaced by NAME.b1, or .b2 if that is in use too, and so on."""
    clash, used, out = set(taken), set(taken) | set(names), []
    for name in names:
        new = name
        if name in clash:
            new = next(n for k in count(1) if (n := f"{name}.b{k}") not in used)
            used.add(new)
        out.append(new)
    return out
