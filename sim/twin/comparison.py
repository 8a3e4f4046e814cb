"""Runs and measurements, brought together: what `twinserve compare` finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twinserve.sim.results.files import RunResult
from twinserve.sim.results.folders import ResultsError
from twinserve.sim.twin.compare import Row, table, windows
from twinserve.sim.twin.compare_report import Comparison
from twinserve.sim.twin.compare_terms import rerun as run_again
from twinserve.sim.twin.queues import queue_of, run_queue
from twinserve.sim.twin.served import METRICS, from_server, of_measurement, of_run
from twinserve.traces.measurement import Measurement


def compared(
    results: Mapping[str, RunResult],
    found: Sequence[Measurement],
    every_s: float | None = None,
    rerun: bool = False,
    begin: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Compare simulated runs, by name, with repeats of one measured load.

    every_s  seconds of a window in which they may differ; None: a tenth of the measurement
    rerun    simulate again with one term changed after another; begin(what) before each

    Raises ResultsError if the two sides have nothing in common.
    """
    server = _server(found)
    measured = [of_measurement(one) for one in found]
    runs = [of_run(name, result, server) for name, result in results.items()]
    rows = table(measured, runs)
    _need_common(rows, found)
    again = [list(run_again(r, measured, server, begin)) for r in results.values() if rerun]
    notices = dict.fromkeys(f"{one.path}: {line}" for one in found for line in one.notices)
    return Comparison(
        measured,
        runs,
        rows,
        windows(measured, runs, every_s),
        again,
        tuple(notices),
        [queue_of(one) for one in found],
        [run_queue(result.summary) for result in results.values()],
    )


def _server(found: Sequence[Measurement]) -> bool:
    """Whether they were measured in the server. Raises ResultsError if some were and some not,
    or some have no single requests."""
    sides = {from_server(one) for one in found}
    kinds = {bool(one.histograms) for one in found}
    if len(sides) > 1 or len(kinds) > 1:
        raise ResultsError(
            "measurements of clients, of servers and of histograms cannot be repeats of each "
            "other: compare them one by one"
        )
    return sides.pop()


def _need_common(rows: Sequence[Row], found: Sequence[Measurement]) -> None:
    """Raises ResultsError unless there are latencies, or lengths of histograms."""
    if any(row.metric in METRICS for row in rows) or (rows and found[0].histograms):
        return
    why = "".join(f"; {one.path}: {line}" for one in found for line in one.notices)
    raise ResultsError(
        "the two sides share no metric: give measurements with latencies of single requests, as "
        f"vllm bench serve --save-detailed writes, or histograms{why}"
    )
