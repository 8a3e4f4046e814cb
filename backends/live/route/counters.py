"""What the front counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinserve.backends.live.route.admission import Admission
from twinserve.backends.live.route.fleet import RoutedFleet

if TYPE_CHECKING:  # its library is needed for it alone
    from twinserve.backends.live.route.kv_events import KvEvents

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "twinserve_route"
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 25, 50, 100, 250),
)


class Counters:
    """requests   by path and status of the answer; 499: the client left first
    picks         by worker
    retries       sent again before a byte of the answer; migrations: after
    errors        by kind
    first_byte_s, total_s, waited_s  from a request's arrival; the wait for a worker
    tokenize_s    until a worker said which tokens a text has
    kv_gaps       of KV events, by worker and outcome (`kv_blocks.Gap`)
    """

    def __init__(self, urls: list[str], fleet: RoutedFleet, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests", "path", "status")
        self.picks = self._counter("picks", "Requests sent to a worker", "worker")
        self.retries = self._counter("retries", "Sent again before any answer", "worker")
        self.migrations = self._counter("migrations", "Answers continued elsewhere", "worker")
        self.errors = self._counter("errors", "Errors by kind", "kind")
        self.first_byte_s = self._histogram("first_byte", "Arrival to first byte of the answer")
        self.total_s = self._histogram("request", "Arrival to end of the answer")
        self.waited_s = self._histogram("queue", "Wait for a worker")
        self.tokenize_s = self._histogram("tokenize", "Wait for a prompt's token ids")
        self.kv_gaps = self._counter("kv_gaps", "Missing KV events", "worker", "outcome")
        for url in urls:
            self.picks.labels(url), self.retries.labels(url), self.migrations.labels(url)
        self._gauges = _Gauges(urls, fleet, admission)
        self._registry.register(self._gauges)

    def hear(self, events: KvEvents) -> None:
        """Also count what workers publish."""
        self._gauges.events = events

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", said, labels, registry=self._registry)

    def _histogram(self, name: str, said: str) -> Histogram:
        what = f"{_PREFIX}_{name}_seconds"
        return Histogram(what, said, buckets=_SECONDS, registry=self._registry)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _Gauges(Collector):
    """What is read when it is asked for."""

    def __init__(self, urls: list[str], fleet: RoutedFleet, admission: Admission) -> None:
        self._urls, self._fleet, self._admission = urls, fleet, admission
        self.events: KvEvents | None = None

    def collect(self) -> Iterable[Metric]:
        fleet = self._fleet
        workers = {
            "worker_up": ("Whether a worker takes requests", lambda i: float(fleet.is_up(i))),
            "in_flight": ("Requests at a worker", lambda i: float(fleet.at(i))),
            "poll_age_seconds": ("Age of what is known of a worker", fleet.age_s),
        }
        for name, (said, value) in workers.items():
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", said, labels=["worker"])
            for i, url in enumerate(self._urls):
                found = value(i)
                if found is not None:
                    family.add_metric([url], found)
            yield family
        if self.events is not None:
            yield from self._of_events(self.events)
        waiting = float(self._admission.waiting)
        yield GaugeMetricFamily(f"{_PREFIX}_waiting", "Requests that wait for a worker", waiting)

    def _of_events(self, events: KvEvents) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            f"{_PREFIX}_kv_blocks", "KV blocks that a worker has cached", labels=["worker"]
        )
        batches = CounterMetricFamily(
            f"{_PREFIX}_kv_batches", "Batches of KV events", labels=["worker"]
        )
        unnamed = CounterMetricFamily(
            f"{_PREFIX}_kv_unnamed_blocks", "Stored blocks of unknown text", labels=["worker"]
        )
        for i, url in enumerate(self._urls):
            if (blocks := events.held(i)) is not None:
                held.add_metric([url], float(blocks))
            batches.add_metric([url], float(events.batches[i]))
            unnamed.add_metric([url], float(events.unnamed[i]))
        yield from (held, batches, unnamed)
