"""What the scheduler counts, among vLLM's own metrics (`GET /metrics`). The scheduler is in the
engine's process and vLLM's metrics in the server's, so they go by the file of `stats_path`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# counts that only rise; the others are as of now
_COUNTERS = {
    "steps": "steps that the policy planned",
    "drift": "steps in which the engine did something else than planned",
    "restarts": "requests that the policy got anew after a drift",
    "refused": "requests that the policy cannot serve",
    "preempted": "requests that lost their memory to others",
    "predicted_requests": "finished requests whose output was predicted at arrival",
    "predicted_output_tokens": "output tokens of these requests",
    "predicted_missed_tokens": "total error of these predictions in output tokens",
}
_GAUGES = {
    "decision_mean_s": ("decision_mean_seconds", "seconds that the policy takes for a step"),
    "decision_p99_s": ("decision_p99_seconds", "the same, 99th percentile of the last 10,000"),
}


class PolicyMetrics:
    """A collector for prometheus_client: reads `path` (`ServingStats.write`) on demand. Empty if
    the file is missing or of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def collect(self) -> Iterator[Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        # what stood at this path before the server's first words may be anything
        if isinstance(values, dict) and values.keys() >= {*_COUNTERS, *_GAUGES, "waiting"}:
            yield from _families(values)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _families(values: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, meaning in _COUNTERS.items():
        yield CounterMetricFamily(f"twinserve_{name}", meaning, value=values[name])
    for key, (name, meaning) in _GAUGES.items():
        yield GaugeMetricFamily(f"twinserve_{name}", meaning, value=values[key])
    queue = GaugeMetricFamily(
        "twinserve_waiting", "requests that wait for memory or a seat", labels=["class"]
    )
    for service_class, count in values["waiting"].items():
        queue.add_metric([service_class], count)
    yield queue
