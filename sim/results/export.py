"""Writes the requests of a run as a trace that replays it: same arrivals, closed loops as closed
loops."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from twinserve.sim.results.files import POOL_GROUP, RunResult, pool_request_id
from twinserve.traces.prefix import take
from twinserve.traces.workload import BEST_EFFORT, Prefix, PrefixBlocks, Workload, WorkloadError
from twinserve.traces.write import check_target, write_trace


def export_requests(result: RunResult, workload: Workload, path: Path) -> Path:
    """The submitted requests as Mooncake+ with its sidecar. Raises WorkloadError where `path`
    cannot be written.

    Batches of the best-effort pool become stages of one group: the first is there from the start,
    each later one comes when the one before it has ended, as in the run.
    """
    return write_trace(as_workload(result, workload), path)


def check_export(path: Path, workload: Workload, overwrite: bool = False) -> None:
    """Find out before a run whether its requests can be written to `path`. Raises WorkloadError: a
    folder, no permission, the trace that the run reads, or another file without `overwrite`."""
    if not path.name or path.is_dir():
        raise WorkloadError(f"--export {path}: is a folder; name a .jsonl file in it")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise WorkloadError(f"--export {path}: cannot be written below {parent}; name another file")
    try:
        check_target(path, overwrite, workload.provenance.path)
    except WorkloadError as error:
        raise WorkloadError(f"--export {error}") from None


def as_workload(result: RunResult, listed: Workload) -> Workload:
    """The request list of a run with the batches of the pool that were submitted in it, sorted as a
    workload is. At equal times the list's own rows come first, as in the run."""
    pool = listed.pool
    if pool is None:
        return listed
    # some of the list may never have been sent
    sent = result.rows.requests[result.rows.requests["group"] == POOL_GROUP]
    n = len(sent)
    size = pool.batch
    batches = [pool.draw(k) for k in range(n // size)]
    stage = np.repeat(np.arange(len(batches)), size)
    columns = {
        "arrival_s": np.where(stage == 0, 0.0, np.nan),
        "prompt_tokens": np.concatenate([prompts for prompts, _ in batches]),
        "output_tokens": np.concatenate([outputs for _, outputs in batches]),
        "service_class": np.full(n, BEST_EFFORT, np.int8),
        "priority": np.zeros(n, np.int64),
        # all of them have the same
        "slo_ttft_s": np.full(n, sent["slo_ttft_s"].iloc[0] if n else np.nan),
        "slo_tpot_s": np.full(n, sent["slo_tpot_s"].iloc[0] if n else np.nan),
        "group": np.full(n, len(listed.group_names), np.int64),
        "stage": stage,
        "delay_s": np.zeros(n),
    }
    merged = {
        name: np.concatenate([getattr(listed, name), column]) for name, column in columns.items()
    }
    order = np.argsort(merged["arrival_s"], kind="stable")  # NaN, the closed-loop rows, last
    ids = [*listed.ids, *(pool_request_id(k, i) for k in range(len(batches)) for i in range(size))]
    prefix = listed.prefix
    if prefix is not None:
        prefix = take(_without_sharing(prefix, columns["prompt_tokens"]), order)
    return Workload(
        **{name: column[order] for name, column in merged.items()},
        ids=[ids[i] for i in order],
        group_names=[*listed.group_names, POOL_GROUP],
        applications=listed.applications,
        prefix=prefix,
        provenance=listed.provenance.then("with the best-effort pool of a run"),
    )


def _without_sharing(prefix: Prefix, prompts: np.ndarray) -> PrefixBlocks:
    """`prefix` with the blocks of further requests, which share nothing: ids of their own."""
    counts = -(-prompts // prefix.block_tokens)
    own = prefix.distinct + np.arange(int(counts.sum()))
    offsets = np.concatenate([prefix.offsets, prefix.offsets[-1] + np.cumsum(counts)])
    return PrefixBlocks(np.concatenate([prefix.ids, own]), offsets, prefix.block_tokens)
