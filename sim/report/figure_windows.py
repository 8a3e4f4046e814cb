"""The figure of a run's windows (`--metrics-every`): what came and went, who was there, how long
they took, whether that was in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from twinserve.sim.report.axes import from_zero, nested_width, run_colours
from twinserve.sim.report.windows import any_real_time, of_interest

Windows = Mapping[str, list[dict]]  # by run


def draw_windows(figure: Figure, windows: Windows) -> None:
    """Four panels over time, a curve a run, drawn as steps: a value holds for its window.

    Of real-time requests, where a run has such (`windows.of_interest`). Arrivals are dotted beside
    what was served. A gap in a curve is a window without such requests.
    """
    whose = "Real-time requests: served" if any(map(any_real_time, windows.values())) else "Served"
    windows = {label: of_interest(of_run) for label, of_run in windows.items()}
    flow, inside, latency, attained = axes = figure.subplots(4, 1, sharex=True)
    pairs = zip(run_colours(windows), windows.values(), strict=True)
    for i, (colour, of_run) in enumerate(pairs):
        if not of_run:
            continue  # it was not asked for windows, or had no requests
        width = nested_width(i, len(windows))
        edges = [w["start_s"] for w in of_run] + [w["end_s"] for w in of_run[-1:]]
        arrived = _heights(of_run, lambda w: w["arrivals_per_s"])
        flow.stairs(arrived, edges, baseline=None, color=colour, linestyle=(0, (1, 2)))
        for ax, value in zip(axes, _PANELS, strict=True):
            ax.stairs(_heights(of_run, value), edges, baseline=None, color=colour, linewidth=width)
    flow.set_title(f"{whose}, and dotted what arrived")
    flow.set_ylabel("requests/s")
    inside.set_title("In the system at the end of each window")
    inside.set_ylabel("requests")
    inside.yaxis.set_major_locator(MaxNLocator(integer=True))
    latency.set_title("p99 TTFT of those that arrived")
    latency.set_ylabel("s")
    attained.set_title("Within their objectives")
    attained.yaxis.set_major_formatter(PercentFormatter(1.0))
    attained.set_ylim(0, 1.05)
    for ax, top in ((flow, 0.0), (inside, 1.0), (latency, 0.0)):
        from_zero(ax, top)
    attained.set_xlabel("simulated time (s)")


def _heights(windows: list[dict], value: Callable[[dict], float | None]) -> np.ndarray:
    """float64[n]; NaN: none."""
    return np.array([value(window) for window in windows], np.float64)


def _p99_ttft_s(window: dict) -> float | None:
    milliseconds = window["p99_ttft_ms"]
    return None if milliseconds is None else milliseconds / 1000


_PANELS: tuple[Callable[[dict], float | None], ...] = (
    lambda window: window["served_per_s"],
    lambda window: window["in_system"],
    _p99_ttft_s,
    lambda window: window.get("slo_attainment"),
)
