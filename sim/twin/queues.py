"""Whether the measured server kept up with its load, by the test of simulated runs
(`sim/results/saturation.py`), and the stretch before its queue grew."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from twinserve.sim.results.saturation import saturation
from twinserve.traces.measurement import Measurement

OVERLOADED = ("saturated", "sheds")
KNOWN_SHARE = 0.9  # of the served requests: fewer known ends say nothing about a queue
STRETCHES = np.arange(0.9, 0.15, -0.1)  # of the time in which requests arrive, longest first


def queue_of(found: Measurement, until_s: float = np.inf) -> dict | None:
    """The verdict on a measured queue, with the fields of `Saturation`.

    until_s  only requests that arrived up to here count, in seconds from the first one

    A failed request leaves when it comes. Where the file has no time in the queue, a request's
    service begins with its arrival. Return None if the question has no answer: a client that
    limits its own concurrency, requests all at once, or arrivals or ends that are not known.
    """
    served, arrival = found.served, found.arrival_s
    if found.concurrency is not None or not len(found) or not served.any():
        return None
    failed = np.array([bool(error) for error in found.errors])
    end = np.where(failed, arrival, arrival + found.e2el_s)
    known = ~np.isnan(end) & (arrival <= until_s)
    if (~np.isnan(end) & served).sum() < KNOWN_SHARE * served.sum():
        return None
    scheduled = np.where(failed, np.nan, arrival + np.nan_to_num(found.queued_s))
    return saturation(arrival[known], scheduled[known], end[known], failed[known])


def steady_stretch(found: Measurement) -> float | None:
    """Seconds from the first request on during which the server kept up: the longest of STRETCHES
    that the test calls steady. None: there is none."""
    known = found.arrival_s[~np.isnan(found.arrival_s)]
    for share in STRETCHES.tolist():
        until = share * float(known.max(initial=0.0))
        verdict = queue_of(found, until)
        if verdict is not None and verdict["verdict"] == "keeps up":
            return until
    return None


def queue_words(found: Mapping | None) -> str:
    """A verdict in words."""
    if found is None:
        return "whether the queue grew cannot be said"
    if found["verdict"] == "saturated":
        return (
            f"saturated: {found['arrived_per_s']:.3g} requests arrive a second, the queue grows by "
            f"{found['growth_per_s']:.3g} ± {found['growth_range_per_s']:.2g} a second"
        )
    return f"{found['verdict']}: {found['reason']}"


def run_queue(summary: Mapping) -> dict | None:
    """The verdict of a run's summary: that of its real-time requests, or of the only class."""
    classes = summary.get("classes", {})
    of_class = classes.get("rt") or next(iter(classes.values()), {})
    return of_class.get("saturation")


def overload(
    measured: Sequence[tuple[str, dict | None]], runs: Sequence[tuple[str, dict | None]]
) -> Iterator[str]:
    """Lines about overload, before any error is read; none if no side is overloaded."""
    over = [verdict is not None and verdict["verdict"] in OVERLOADED for _, verdict in measured]
    overs = [verdict is not None and verdict["verdict"] in OVERLOADED for _, verdict in runs]
    if not any(over) and not any(overs):
        return
    for side, found in (("measured", measured), ("simulated", runs)):
        for name, verdict in found:
            yield f"{side} {name}: {queue_words(verdict)}"
    for (name, verdict), overloaded in zip(runs, overs, strict=True):
        if all(over) and overloaded:
            yield (
                f"{name}: both sides are overloaded, so latencies depend on how long the load "
                "lasted: compare the throughput"
            )
        elif all(over):
            yield (f"{name}: only the measured server is overloaded. " + _cause("faster", verdict))
        elif overloaded and not any(over):
            yield (
                f"{name}: only the simulation is overloaded. " + _cause("slower", measured[0][1])
            )
        elif overloaded or any(over):
            yield f"{name}: some sides are overloaded and others not: compare repeats of one load"


def _cause(how: str, other: Mapping | None) -> str:
    if other is None or other["verdict"] not in ("keeps up", *OVERLOADED):
        return "The other side's queue is not clear: measure for longer"
    return (
        f"The simulation is {how} than the server: its step times, KV memory or limits are off, "
        "and errors of latencies follow from that one difference"
    )
