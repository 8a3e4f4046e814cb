"""Rows of measured files, some of them odd, as files of several tools; and what each row counts as,
by the rule of docs/traces.md and by no reader."""

import json
import random
from dataclasses import dataclass

ODD_TIMES = (None, 0, 0, -20, "x", 1e300)
ODD_ARRIVALS = (None, -20, "x")
ERRORS = ("Service Unavailable", "timeout")
ODD_TOKENS = (None, -3, 2.5, "x", 10**18)


@dataclass(frozen=True)
class Sent:
    """A request as a tool saw it: milliseconds and tokens, or what stands in their place."""

    arrival: object
    prompt: object
    output: object
    ttft: object
    e2el: object
    error: str = ""


def usable(value: object, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most and value == value


def judged(rows: list[Sent]) -> list[tuple[str, float | None, float | None, float | None]]:
    """Of each row: served, failed or impossible; and TTFT, E2E latency and TPOT in ms."""
    failed = [bool(row.error) or (type(row.output) is int and row.output == 0) for row in rows]
    timed = [usable(row.arrival, 0, 1e9) for row in rows]
    some_came = any(came and not lost for came, lost in zip(timed, failed, strict=True))
    found = []
    for row, lost, came in zip(rows, failed, timed, strict=True):
        counted = all(type(n) is int and usable(n, 1, 10**12) for n in (row.prompt, row.output))
        if lost or not counted or (some_came and not came):
            found.append(("failed" if lost else "impossible", None, None, None))
            continue
        ttft = row.ttft if usable(row.ttft, 0, 1e9) else None
        e2el = row.e2el if usable(row.e2el, 0, 1e9) else None
        late = ttft is not None and e2el is not None and ttft > e2el
        whole = ttft == e2el and row.output > 1
        first = None if ttft == 0 or late or whole else ttft
        last = None if e2el == 0 or late else e2el
        gaps = row.output - 1
        known = gaps and first is not None and last is not None
        found.append(("served", first, last, (last - first) / gaps if known else None))
    return found


# -- each tool's file of these requests ------------------------------------------------------------
def scaled(value: object, unit: float) -> object:
    return value * unit if type(value) in (int, float) else value


def vllm_bench(rows: list[Sent]) -> str:
    return json.dumps(
        {
            "total_output_tokens": 1,
            "request_throughput": 1.0,
            "input_lens": [row.prompt for row in rows],
            "output_lens": [row.output for row in rows],
            "start_times": [scaled(row.arrival, 1e-3) for row in rows],
            "ttfts": [scaled(row.ttft, 1e-3) for row in rows],
            "itls": [[] for _ in rows],
            "latencies": [scaled(row.e2el, 1e-3) for row in rows],
            "errors": [row.error for row in rows],
        }
    )


def guidellm(rows: list[Sent]) -> str:
    """What failed stands in a list of its own, so that rows come in another order."""
    ends: dict[str, list] = {"successful": [], "incomplete": [], "errored": []}
    for row in rows:
        ends["errored" if row.error else "successful"].append(
            {
                "prompt_tokens": row.prompt,
                "output_tokens": row.output,
                "request_start_time": scaled(row.arrival, 1e-3),
                "request_latency": scaled(row.e2el, 1e-3),
                "time_to_first_token_ms": row.ttft,
                "info": {"error": row.error or None},
            }
        )
    return json.dumps({"metadata": {"version": 1}, "benchmarks": [{"requests": ends}]}, indent=1)


def aiperf(rows: list[Sent]) -> str:
    def record(row: Sent) -> str:
        values = {
            "input_sequence_length": (row.prompt, "tokens"),
            "output_sequence_length": (row.output, "tokens"),
            "time_to_first_token": (row.ttft, "ms"),
            "request_latency": (row.e2el, "ms"),
        }
        metrics = {
            name: {"value": value, "unit": unit}
            for name, (value, unit) in values.items()
            if value is not None
        }
        metadata = {"request_start_ns": scaled(row.arrival, 10**6), "benchmark_phase": "profiling"}
        error = {"type": row.error} if row.error else None
        return json.dumps({"metadata": metadata, "metrics": metrics, "error": error}) + "\n"

    return "".join(map(record, rows))


def csv(rows: list[Sent]) -> str:
    lines = [
        ",".join(
            "" if value is None else str(value)
            for value in (row.arrival, row.prompt, row.output, row.ttft, row.e2el, row.error)
        )
        for row in rows
    ]
    return "\n".join(["at,in,out,first,all,err", *lines]) + "\n"


TOOLS = {"vllm-bench": vllm_bench, "guidellm": guidellm, "aiperf": aiperf, "csv": csv}
COLUMNS = "arrival=at:ms,prompt=in,output=out,ttft=first:ms,e2el=all:ms,error=err"


def drawn(rng: random.Random) -> Sent:
    """A request of which about a third has an odd value."""

    def value(good: object, odd: tuple) -> object:
        return good if rng.random() < 0.9 else rng.choice(odd)

    return Sent(
        value(10 * rng.randrange(90), ODD_ARRIVALS),
        value(rng.randrange(1, 500), (*ODD_TOKENS, 0)),
        value(rng.randrange(1, 60), (*ODD_TOKENS, 0)),
        value(10 * rng.randrange(1, 9), ODD_TIMES),
        value(10 * rng.randrange(1, 90), ODD_TIMES),
        value("", ERRORS),
    )


def none_served(rows: list[Sent]) -> bool:
    return all(kind != "served" for kind, *_ in judged(rows))
