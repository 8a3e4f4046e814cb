"""Plots of runs, drawn as `twinserve report` draws them."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from twinserve.sim.report.chart import Chart
from twinserve.sim.report.static import drawn, png
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.write import write_atomically

_METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2el_s"}
_CLASSES = ("rt", "be")


class Plot:
    """A figure that a notebook shows. `figure` is matplotlib's, for changes of one's own; `alt`
    says in words what is seen."""

    def __init__(self, figure: Figure, alt: str = "") -> None:
        self.figure = figure
        self.alt = alt

    def __repr__(self) -> str:
        return f"<Plot: {self.alt}>"

    def _repr_png_(self) -> bytes:
        return png(self.figure)

    def save(self, file: str | os.PathLike) -> Path:
        """Write it as .png, .svg or .pdf. Raises SettingsError for another kind of file."""
        path = Path(file)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in ("png", "svg", "pdf"):
            raise SettingsError(
                f"{path}: plots are written as .png, .svg or .pdf; name such a file"
            )
        sink = io.BytesIO()
        self.figure.savefig(sink, format=kind)
        write_atomically(path, sink.getvalue())
        return path


class Plots:
    """The plots of one or several runs, by name: `plot()` is the distribution of TTFT, and
    `plot.chart(key)` any chart of the report."""

    def __init__(self, charts: Callable[[], Sequence[Chart]]) -> None:
        self._read = charts
        self._charts: dict[str, Chart] = {}

    def __call__(self, metric: str = "ttft", service_class: str | None = None) -> Plot:
        return self.cdf(metric, service_class)

    @property
    def keys(self) -> list[str]:
        """Of all charts that these runs have."""
        return list(self._all())

    def _all(self) -> dict[str, Chart]:
        if not self._charts:
            self._charts = {chart.key: chart for chart in self._read()}
        return self._charts

    def chart(self, key: str) -> Plot:
        """Raises SettingsError for a chart that these runs do not have."""
        if key not in self._all():
            raise SettingsError(f"no chart {key!r} of these runs; there are {', '.join(self.keys)}")
        found = self._all()[key]
        return Plot(drawn(found), found.alt)

    def cdf(self, metric: str = "ttft", service_class: str | None = None) -> Plot:
        """Distribution of a latency: ttft, tpot or e2el, of class rt (real-time) or be
        (best-effort); by default of the first one that there is."""
        if metric not in _METRICS:
            raise SettingsError(f"no metric {metric!r} has a distribution; take ttft, tpot or e2el")
        classes = _CLASSES if service_class is None else (service_class,)
        wanted = [f"cdf-{name}-{_METRICS[metric]}" for name in classes]
        there = [key for key in wanted if key in self._all()]
        return self.chart(there[0] if there else wanted[0])

    def queue(self) -> Plot:
        """Requests that wait, over time."""
        return self.chart("time-queue")

    def kv(self) -> Plot:
        """KV memory that requests hold, over time."""
        return self.chart("time-kv")

    def batch(self) -> Plot:
        """Requests that decode in a step, over time."""
        return self.chart("time-decodes")

    def throughput(self) -> Plot:
        """p99 TTFT over throughput, a point a run; of several runs."""
        return self.chart("throughput-ttft")
