"""Writes the requests of a run as a trace that replays it: same arrivals, closed loops as closed loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..traces.workload import BEST_EFFORT, Provenance, Workload
from ..traces.write import write_trace
from .inputs import Inputs
from .results import POOL_GROUP, RunResult


def export_requests(result: RunResult, inputs: Inputs, path: Path) -> Path:
    """The submitted requests as Mooncake+ with its sidecar. Raises WorkloadError where `path` cannot be written.

    Batches of the best-effort pool become stages of one group: the first is there from the start, each later one comes
    when the one before it has ended, as in the run.
    """
    return write_trace(as_workload(result, inputs), path)


def as_workload(result: RunResult, inputs: Inputs) -> Workload:
    """The request list with the pool's requests in it, in order of submission where they arrived together."""
    listed, requests = inputs.workload, result.rows.requests
    pool = requests[requests["group"] == POOL_GROUP]
    if not len(pool):
        return listed
    n = len(pool)
    stage = pool["stage"].to_numpy(np.int64)
    columns = {
        "arrival_s": np.where(stage == 0, 0.0, np.nan),
        "prompt_tokens": pool["prompt_tokens"].to_numpy(np.int64),
        "output_tokens": pool["output_tokens"].to_numpy(np.int64),
        "klass": np.full(n, BEST_EFFORT, np.int8),
        "priority": np.zeros(n, np.int64),
        "slo_ttft_s": np.full(n, np.nan),
        "slo_tpot_s": np.full(n, np.nan),
        "group": np.full(n, len(listed.group_names), np.int64),
        "stage": stage,
        "delay_s": np.zeros(n),
    }
    merged = {name: np.concatenate([getattr(listed, name), column]) for name, column in columns.items()}
    prefix = listed.prefix
    if prefix is not None:
        prefix = _without_sharing(prefix, columns["prompt_tokens"])
    return Workload(
        **merged,
        ids=[*listed.ids, *pool["request_id"]],
        group_names=[*listed.group_names, POOL_GROUP],
        prefix=prefix,
        provenance=Provenance(
            **{**vars(listed.provenance), "transforms": (*listed.provenance.transforms, "with the best-effort pool of a run")}
        ),
    )


def _without_sharing(prefix, prompts: np.ndarray):
    """Prefix blocks for requests that share nothing: ids of their own."""
    counts = -(-prompts // prefix.block_tokens)
    own = prefix.distinct + np.arange(int(counts.sum()))
    offsets = np.concatenate([prefix.offsets, prefix.offsets[-1] + np.cumsum(counts)])
    return type(prefix)(np.concatenate([prefix.ids, own]), offsets, prefix.block_tokens)
