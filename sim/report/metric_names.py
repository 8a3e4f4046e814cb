"""What metrics are called where a person reads them: in charts, on pages, beside measurements."""

from __future__ import annotations

import re

METRIC_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2E latency",
    "queued": "queueing",
    "prompt": "prompt tokens",
    "output": "output tokens",
    "throughput": "throughput",
}
SECONDS = ("ttft", "tpot", "itl", "e2el", "queued")  # of these, the ones that are times
CLASS_NAMES = {"rt": "real-time", "be": "best-effort"}
_TOKENS, _REQUESTS = "tokens a second", "requests a second"
# Last part of a dotted name -> what it is, and its unit.
_NAMED = {
    "slo_attainment": ("objectives kept", "share"),
    "ttft_attainment": ("TTFT objective kept", "share"),
    "tpot_attainment": ("TPOT objective kept", "share"),
    "e2el_attainment": ("E2E objective kept", "share"),
    "output_throughput": ("output throughput", _TOKENS),
    "total_token_throughput": ("throughput, prompt and output", _TOKENS),
    "window_total_token_throughput": ("throughput, prompt and output", _TOKENS),
    "window_output_throughput": ("output throughput", _TOKENS),
    "request_throughput": ("requests served", _REQUESTS),
    "window_request_throughput": ("requests served", _REQUESTS),
    "request_goodput": ("goodput", _REQUESTS),
    "normalized_latency_ms": ("normalized latency", "ms a token"),
    "peak_use": ("KV memory, highest", "share of KV blocks"),
    "prefix_hit_rate": ("prefix hit rate", "share"),
    "host_hit_rate": ("found on the host", "share"),
    "mean_batch": ("mean batch", "requests a step"),
    "mean_waiting": ("mean queue", "requests waiting"),
    "gpu_hours": ("GPU time", "GPU-hours"),
    "duration": ("simulated time", "s"),
}
_UNITS = {"ms": "ms", "s": "s", "bytes": "bytes", "tokens": "tokens"}
_LATENCY = re.compile(r"(mean|median|std|p[\d.]+)_(engine_)?([a-z0-9]+)_(ms|s)$")


def label(path: str) -> tuple[str, str]:
    """(what it is, unit) of a number by its dotted name in a summary; the unit is "" where it has
    none: ("p99 TTFT, real-time", "ms") of classes.rt.p99_ttft_ms."""
    found = re.fullmatch(r"(?:classes\.(\w+)\.)?(.*)", path)
    whose = CLASS_NAMES.get((found and found[1]) or "", "")
    rest = path.split(".", 2)[2] if whose else path
    latency, last = _LATENCY.search(rest), rest.rpartition(".")[2]
    if latency:
        statistic, engine, metric, unit = latency.groups()
        name = f"{statistic} {'engine ' if engine else ''}{METRIC_NAMES.get(metric, metric)}"
    elif last in _NAMED:
        name, unit = _NAMED[last]
    else:
        words, _, end = rest.rpartition("_")
        unit = _UNITS.get(end, "") if words else ""
        name = (words if unit else rest).replace("_", " ").replace(".", ": ")
    return name + (f", {whose}" if whose else ""), unit
