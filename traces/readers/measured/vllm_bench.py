"""Results of `vllm bench serve --save-result --save-detailed`: one JSON object, a list a field.

    {"backend": "openai", "num_prompts": 2, "request_rate": 4.0, "max_concurrency": null, ...,
     "input_lens": [1024, 1024], "output_lens": [128, 0], "start_times": [812.1, 812.4],
     "ttfts": [0.21, 0.0], "itls": [[0.01, ...], []], "latencies": [1.6, 0.0],
     "errors": ["", "Service Unavailable"], "mean_ttft_ms": 210.0, ...}

Source: `benchmark` and `main_async` of vllm/benchmarks/serve.py, vLLM 0.32.0. `start_times` are
seconds of a clock without a date, when the client sent the request. With --max-concurrency it may
have waited `queue_times` seconds for that, and the workload is a closed loop. Earlier versions lack
`latencies`: the end is then the first token and all gaps after it. Without --save-detailed a result
holds no requests, only numbers over all of them.
"""

from __future__ import annotations

import numpy as np

from twinserve.traces.measurement import Measurement, measured
from twinserve.traces.readers.columns import MAX_SECONDS, Rows, shown, unused
from twinserve.traces.readers.measured.document import document, lists, numbers_of
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "vllm-bench"
COLUMNS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "latencies",
    "errors",
    "queue_times",
)
# What describes the run rather than a request, and texts.
SETTINGS = (
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "ramp_up_strategy",
    "generated_texts",
    "rps_change_events",
    "request_goodput",
    "spec_decode_per_position_acceptance_rates",
)


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a result file. Raises WorkloadError."""
    content = document(data, path, "--append-result wrote them; give each a file of its own")
    if "total_output_tokens" not in content:
        raise WorkloadError(
            f"{path}: field 'total_output_tokens' is missing: give the result of vllm bench serve "
            "on a model that generates text"
        )
    stated = numbers_of(content)
    notices = unused(list(content), (*COLUMNS, *SETTINGS, *stated))
    if "input_lens" not in content:
        notices.append("no single requests: run vllm bench serve with --save-detailed for them")
        return measured(NAME, path, 0, stated=stated, notices=notices)
    columns, where = lists(content, path, COLUMNS, "input_lens")
    n = len(where)
    errors = [str(error or "") for error in columns.get("errors", [""] * n)]
    prompt = where.whole("input_lens", columns["input_lens"])
    output = None
    if "output_lens" in columns:
        output = where.whole("output_lens", columns["output_lens"])
        # a request may fail without a word: then it has no tokens
        errors = [e or ("no tokens" if not o else "") for e, o in zip(errors, output, strict=True)]
    served = np.array([not error for error in errors], bool)
    ttft = _seconds(where, columns, "ttfts", served)
    gaps = _gaps(where, columns.get("itls"))
    e2el = _seconds(where, columns, "latencies", served)
    if e2el is None and ttft is not None and gaps is not None:
        e2el = np.where(served, ttft + np.array([sum(row) for row in gaps]), np.nan)
    limit = _limit(content, path)
    arrival = _seconds(where, columns, "start_times")
    waited = _seconds(where, columns, "queue_times")
    due = None
    if limit is not None and arrival is not None and waited is not None:
        due = arrival - waited
    notices += _told(limit, columns)
    pooled = None
    if gaps is not None:
        pooled = np.array([gap for row, ok in zip(gaps, served, strict=True) if ok for gap in row])
    return measured(
        NAME,
        path,
        n,
        arrival_s=arrival,
        due_s=due,
        concurrency=None if due is None else limit,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=ttft,
        e2el_s=e2el,
        errors=errors,
        gaps_s=pooled,
        stated=stated,
        notices=notices,
    )


def _seconds(
    where: Rows, columns: dict, name: str, served: np.ndarray | None = None
) -> np.ndarray | None:
    if name not in columns:
        return None
    seconds = where.number(name, columns[name])
    return seconds if served is None else np.where(served, seconds, np.nan)


def _gaps(where: Rows, rows: list | None) -> list[list[float]] | None:
    if rows is None:
        return None
    for number, row in enumerate(rows):
        numbers = type(row) is list and all(type(gap) in (int, float) for gap in row)
        if not numbers or not all(0 <= gap < MAX_SECONDS for gap in row):
            where.fail(number, "itls", "is no list of seconds", "measure again")
    return rows


def _limit(content: dict, path: str) -> int | None:
    limit = content.get("max_concurrency")
    if limit is None or (type(limit) is int and limit >= 1):
        return limit
    raise WorkloadError(
        f"{path}: field 'max_concurrency' is {shown(limit)}, no number of requests: measure again"
    )


def _told(limit: int | None, columns: dict) -> list[str]:
    said = []
    if limit is not None and "queue_times" not in columns:
        said.append(
            f"sent with --max-concurrency {limit}: arrivals are when the client sent the requests, "
            "which depends on how fast this server was"
        )
    if "start_times" not in columns:
        said.append(
            "no start_times, as from older versions of vLLM: when requests came is not known"
        )
    return said
