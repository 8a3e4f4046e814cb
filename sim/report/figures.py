"""The figures of a validation: the charts of a page as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure

from twinserve.sim.report.run_charts import courses, distributions
from twinserve.sim.report.seen import LATENCIES, Seen, look
from twinserve.sim.report.static import panels
from twinserve.sim.results.files import RunResult

Runs = Mapping[str, RunResult]


def latency_figure(
    runs: Runs, repeats: Mapping[str, Sequence[RunResult]] = MappingProxyType({})
) -> Figure | None:
    """Distributions of TTFT, TPOT and end-to-end latency: a row a class, a curve a run. repeats:
    further runs of a label, each a curve of its colour."""
    seen = [_seen(label, one) for label in runs for one in (runs[label], *repeats.get(label, ()))]
    charts = list(distributions(seen))
    rows = [charts[i : i + len(LATENCIES)] for i in range(0, len(charts), len(LATENCIES))]
    kept = [chart for row in rows if any(c.curves for c in row) for chart in row]
    return panels(kept, len(LATENCIES)) if kept else None


def load_figure(runs: Runs) -> Figure | None:
    """Requests that wait, KV memory and batches over time."""
    charts = [c for c in courses([_seen(label, run) for label, run in runs.items()]) if c.curves]
    return panels(charts, 2) if charts else None


def _seen(label: str, run: RunResult) -> Seen:
    return look(label, Path(), run)
