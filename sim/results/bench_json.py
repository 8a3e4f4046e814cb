"""A run as `vllm bench serve --save-result --save-detailed` writes one (vLLM 0.32.0:
`vllm/benchmarks/serve.py`), for tools that read its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.sim.results.files import RunResult, dump_json, plain
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.traces.write import write_together

SWEEP = "summary.json"  # what `vllm bench sweep` calls its list of results


def write_bench(path: Path, results: Mapping[str, RunResult]) -> None:
    """One object; a list of one a policy where there are several, or where the file's name is that
    of a sweep. Whole or not at all."""
    found = [plain(bench_result(label, result)) for label, result in results.items()]
    one = len(found) == 1 and path.name != SWEEP
    write_together([(path, dump_json(found[0] if one else found).encode())])


def bench_result(label: str, result: RunResult) -> dict[str, Any]:
    """The metrics of the summary, which have vLLM's names already, and each request.

    Gaps between tokens are kept for all requests together, so that those of one request are even
    here. A request that was not served has no times, and says how it ended. Times of sending are
    seconds of the run.
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
