"""What metrics are called where runs and measurements are compared."""

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
