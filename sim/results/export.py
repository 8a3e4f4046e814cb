"""Write a run's requests as a trace that replays the run; a closed loop stays a closed loop."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.sim.results.files import POOL_GROUP, RunResult, dump_json, plain, pool_request_id
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.traces.prefix import take
from twinserve.traces.workload import BEST_EFFORT, Prefix, PrefixBlocks, Workload, WorkloadError
from twinserve.traces.write import check_target, write_together, write_trace


def export_requests(result: RunResult, workload: Workload, path: Path) -> Path:
    """Write the submitted requests as Mooncake+ with its sidecar. Raises WorkloadError if `path`
    cannot be written.

    Batches of the best-effort pool become stages of one group. Each stage arrives when the one
    before it has ended, as in the run.
    """
    return write_trace(as_workload(result, workload), path)


def check_export(path: Path, workload: Workload, overwrite: bool = False) -> None:
    """Check before a run that its requests can be written to `path`. Raises WorkloadError: a
    folder, no permission, the trace that the run reads, or an existing file without `overwrite`."""
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
    """Return a run's requests with the submitted batches of the pool, sorted as a workload. At
    equal times listed requests come first, as in the run."""
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
    """Append blocks of further requests to `prefix`, with ids of their own: nothing is shared."""
    counts = -(-prompts // prefix.block_tokens)
    own = prefix.distinct + np.arange(int(counts.sum()))
    offsets = np.concatenate([prefix.offsets, prefix.offsets[-1] + np.cumsum(counts)])
    return PrefixBlocks(np.concatenate([prefix.ids, own]), offsets, prefix.block_tokens)


SWEEP = "summary.json"  # what `vllm bench sweep` calls its list of results


def write_bench(path: Path, results: Mapping[str, RunResult]) -> None:
    """Write one object, or a list if there are several policies or the file has a sweep's name. The
    file is written whole or not at all."""
    found = [plain(bench_result(label, result)) for label, result in results.items()]
    one = len(found) == 1 and path.name != SWEEP
    write_together([(path, dump_json(found[0] if one else found).encode())])


def bench_result(label: str, result: RunResult) -> dict[str, Any]:
    """Return the metrics of the summary, which have vLLM's names, and each request.

    Gaps between tokens are pooled over requests, so a request's gaps are equal here. A request
    without service has no times but its end. Times of sending are seconds of the run.
    """
    r = RequestColumns.of(result.rows.requests)
    order = np.argsort(r.arrival, kind="stable")
    done, sent = r.finished[order], ~np.isnan(r.arrival[order])
    arrival = r.arrival[order]
    span = float(np.ptp(arrival[sent])) if sent.any() else 0.0
    ttft, tpot, e2el = (np.where(r.finished, v, 0.0)[order] for v in (r.ttft, r.tpot, r.e2el))
    outputs = np.where(r.finished, r.output, 0)[order].astype(int)
    ends = result.rows.requests["outcome"].to_numpy()[order]
    numbers = {
        name: value for name, value in result.summary.items() if isinstance(value, (int, float))
    }
    return {
        "backend": "twinserve",
        "label": label,
        "policy": label,
        "model_id": result.config.get("profile", {}).get("llm", {}).get("name", ""),
        "num_prompts": len(order),
        "request_rate": (int(sent.sum()) - 1) / span if span > 0 else "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        **numbers,
        "input_lens": r.prompt[order].astype(int).tolist(),
        "output_lens": outputs.tolist(),
        "start_times": np.where(sent, arrival, 0.0).tolist(),
        "ttfts": ttft.tolist(),
        "itls": [[gap] * max(n - 1, 0) for gap, n in zip(tpot.tolist(), outputs, strict=True)],
        "latencies": e2el.tolist(),
        "generated_texts": [""] * len(order),
        "errors": ["" if ok else str(how) for ok, how in zip(done, ends, strict=True)],
    }
