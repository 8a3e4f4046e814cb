"""Results of `vllm bench serve --save-result --save-detailed`: one JSON object, a list a field.

    {"backend": "openai", "num_prompts": 2, "request_rate": 4.0, "max_concurrency": null, ...,
     "input_lens": [1024, 1024], "output_lens": [128, 0], "start_times": [812.1, 812.4],
     "ttfts": [0.21, 0.0], "itls": [[0.01, ...], []], "latencies": [1.6, 0.0],
     "errors": ["", "Service Unavailable"], "mean_ttft_ms": 210.0, ...}

Source: `benchmark` and `main_async` of vllm/benchmarks/serve.py, vLLM 0.32.0. `start_times` are the
client's send times on a clock without a date, in seconds. With --max-concurrency the workload is a
closed loop: a request may have waited `queue_times` seconds for its turn. Earlier versions lack
`queue_times`: at a rate of inf all requests are due at once. They also lack `latencies`: the end is
then the first token and all gaps after it. Without --save-detailed a result holds no requests, only
numbers over all of them.
"""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.columns import MAX_SECONDS, Rows, shown, unused
from twinserve.traces.readers.measured.document import document, lists, numbers_of
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "vllm-bench"
COLUMNS = tuple(
    "input_lens output_lens start_times ttfts itls latencies errors queue_times".split()
)
# What is not known if a file lacks a column.
TAKEN = {"output_lens": "TPOT and throughput", "ttfts": "TTFT and TPOT", "itls": "gaps (ITL)"}
AT_ONCE = "inf"  # the request_rate of requests that are all due at once
# What describes the run rather than a request, and texts.
SETTINGS = tuple(
    (
        "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate "
        "burstiness max_concurrency ramp_up_strategy generated_texts policy rps_change_events "
        "request_goodput spec_decode_per_position_acceptance_rates"
    ).split()
)


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a result file. Raises WorkloadError."""
    content = document(data, path, "--append-result wrote them; write each into its own file")
    if "total_output_tokens" not in content:
        raise WorkloadError(
            f"{path}: field 'total_output_tokens' is missing: give the result of vllm bench serve "
            "on a model that generates text"
        )
    stated = numbers_of(content)
    if content.get("request_rate") == AT_ONCE:
        stated["request_rate"] = math.inf
    for name, value in stated.items():
        if value < 0:
            raise WorkloadError(f"{path}: field '{name}' is {value:g}, below 0: measure again")
    _check_stated(stated, path)
    notices = unused(list(content), (*COLUMNS, *SETTINGS, *stated))
    if "input_lens" not in content:
        notices.append("no single requests: run vllm bench serve with --save-detailed for them")
        return measured(NAME, Rows(path, []), stated=stated, notices=notices)
    made = content.get("backend") == "twinserve"
    if made:
        notices.append("of simulate --bench-json: gaps within a request are even there, so no ITL")
    columns, where = lists(content, path, COLUMNS, "input_lens")
    limit = _limit(content, path)
    fields = {name: Field(name, values) for name, values in columns.items()}
    if "latencies" not in fields and "ttfts" in fields and "itls" in fields:
        ends = list(map(_end, columns["ttfts"], columns["itls"]))
        fields["latencies"] = Field("itls", ends)
    found = measured(
        NAME,
        where,
        arrival_s=fields.get("start_times"),
        waited_s=fields.get("queue_times") if "start_times" in fields else None,
        concurrency=limit if "start_times" in fields else None,
        prompt_tokens=fields["input_lens"],
        output_tokens=fields.get("output_lens"),
        ttft_s=fields.get("ttfts"),
        e2el_s=fields.get("latencies"),
        gaps_s=None if made else fields.get("itls"),
        errors=[str(error or "") for error in columns.get("errors", [""] * len(where))],
        stated=stated,
        notices=notices + _told(stated.get("request_rate"), limit, columns),
    )
    sent = found.arrival_s[found.served]
    if (took := stated.get("duration", math.inf)) < np.ptp(sent):
        said = f"shorter than the {np.ptp(sent):g} s of 'start_times'"
        raise WorkloadError(f"{path}: field 'duration' is {took:g} s, {said}: measure again")
    if limit is None or "queue_times" in fields or not math.isinf(stated.get("request_rate", 0.0)):
        return found
    return replace(found, due_s=np.where(np.isnan(found.arrival_s), np.nan, 0.0))


def _check_stated(stated: dict[str, float], path: str) -> None:
    """Raise WorkloadError if percentiles do not ascend, or more requests ended than were sent."""
    ranked = re.compile(r"(?:p(\d+(?:\.\d+)?)|median)_(\w+_ms)").fullmatch
    ranks = sorted((m[2], float(m[1] or 50), m[0]) for m in map(ranked, stated) if m)
    pairs = [(low, high) for (of, _, low), (to, _, high) in pairwise(ranks) if of == to]
    for low, high in [("completed", "num_prompts"), *pairs]:
        if stated.get(low, 0.0) > stated.get(high, math.inf) * (1 + 1e-6):
            said = f"is {stated[low]:g}, above '{high}', {stated[high]:g}"
            raise WorkloadError(f"{path}: field '{low}' {said}: measure again")


def _end(ttft, gaps) -> float | None:
    """Return the end of a request by its first token and the gaps after it; None if unknown."""
    try:
        end = ttft + sum(gaps)
        return end if ttft > 0 and min(gaps, default=0) >= 0 and end < MAX_SECONDS else None
    except (TypeError, OverflowError):
        return None


def _limit(content: dict, path: str) -> int | None:
    limit = content.get("max_concurrency")
    if limit is None or (type(limit) is int and limit >= 1):
        return limit
    raise WorkloadError(
        f"{path}: field 'max_concurrency' is {shown(limit)}, no number of requests: measure again"
    )


def _told(rate: float | None, limit: int | None, columns: dict) -> list[str]:
    said = [
        f"no {name}: {what} are unknown; measure again with --save-detailed"
        for name, what in TAKEN.items()
        if name not in columns
    ]
    no_times = "start_times" not in columns
    if limit and not no_times and "queue_times" not in columns:
        if rate != math.inf:
            said.append(
                f"sent with --max-concurrency {limit}, without queue_times: arrivals are this "
                "client's send times, with at most so many requests at once"
            )
    if no_times:
        said.append("no start_times, as from older versions of vLLM: arrivals are unknown")
    return said
