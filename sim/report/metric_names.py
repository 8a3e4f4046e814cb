"""Names of metrics for readers: in charts, on pages, next to measurements."""

import re

from twinserve.formats import shipped_rows

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
# Last part of a dotted name -> what it is, and its unit.
_NAMED = {
    row["last"]: (row["name"], row["unit"]) for row in shipped_rows(__package__, "metric_names.csv")
}
_UNITS = {"ms": "ms", "s": "s", "bytes": "bytes", "tokens": "tokens"}
_LATENCY = re.compile(r"(mean|median|std|p[\d.]+)_(engine_)?([a-z0-9]+)_(ms|s)$")


def label(path: str) -> tuple[str, str]:
    """Return (name, unit) of a number by its dotted name in a summary; the unit may be "": ("p99
    TTFT, real-time", "ms") of classes.rt.p99_ttft_ms."""
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
