"""The part of a trace that a plan is made for: its recorded peak, with the time before it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from twinserve.sim.plan.trial import SOURCES
from twinserve.sim.setup.config import GENERATED_RATE, SettingsError, SimulationConfig
from twinserve.traces.generators.synth import as_stages, is_synthetic
from twinserve.traces.generators.tidal import DAY_S
from twinserve.traces.transform import scale_rate, take_rows, window
from twinserve.traces.workload import REAL_TIME, Workload, WorkloadError

_LOADS = 120  # parts of the recording whose load is shown


@dataclass(frozen=True)
class Peak:
    """trace     name or file
    window_s     (start, end) of what is simulated, seconds of the recording
    since_s      arrivals from here on are judged, seconds of the run
    judged       their requests, without objectives
    longest      tokens of the longest request of the whole trace
    tokens_per_s of the whole trace on the mean, prompt and output, as grown
    requests_per_s   of the peak, as grown
    trouble      what fails at its beginning; None: nothing
    load         `at_s` and `tokens_per_s`: tokens that arrive in parts of the recording, as grown
    day          float64[1440]: tokens that arrive in each minute of its first day, as a share of
                 those of a minute of the peak, smoothed over a quarter of an hour; None: it is
                 shorter
    """

    trace: str
    window_s: tuple[float, float]
    since_s: float
    judged: Workload
    longest: int
    tokens_per_s: float
    requests_per_s: float
    load: dict[str, list[float]]
    day: np.ndarray | None = None
    trouble: Trouble | None = None

    @property
    def crashes(self) -> int:
        """Return how many replicas fail at its beginning."""
        return 0 if self.trouble is None else self.trouble.crashes

    def settings(self, replicas: int, speed: float = 1.0, fails: bool = True) -> dict:
        """Return settings with so many replicas. speed: factor on the rate; fails: failures
        happen."""
        found = {"trace": self.trace, "window": self.window_s, "replicas": replicas}
        if fails and self.trouble is not None:
            found |= self.trouble.settings(replicas, self.since_s / speed)
        return found


@dataclass(frozen=True)
class Trouble:
    """Replicas that fail together when the judged part begins, and stay down in it.

    crashes  how many
    on_failure, detection_s  as --on-failure and --detection have it
    """

    crashes: int
    on_failure: str = "error"
    detection_s: float = 0.0

    def settings(self, replicas: int, at_s: float) -> dict:
        rows = [{"replica": i, "at_s": at_s} for i in range(min(self.crashes, replicas))]
        return {
            "failures": json.dumps(rows),
            "on_failure": self.on_failure,
            "detection": self.detection_s,
        }


def find_peak(
    trace: str,
    grow: float,
    peak_s: float,
    lead_s: float,
    trouble: Trouble | None = None,
    rate: float | None = None,
    read: Mapping[str, str | None] = MappingProxyType({}),
) -> Peak:
    """Return the peak of a trace. peak_s: seconds of the run, so a trace that grows by 1.5 gives
    1.5 times as many seconds of its recording; lead_s: seconds of the run before the peak. rate:
    requests/s of a generated trace, whose peak is all that follows the lead. read: `format` and
    `columns` of a file. Raises SettingsError, WorkloadError."""
    generated = is_synthetic(trace)
    if rate is not None and not generated:
        raise SettingsError(
            f"--rate is for generated traces; {trace!r} has its own arrivals: use --grow"
        )
    if generated:
        trace = as_stages(trace, rate or GENERATED_RATE, (lead_s + peak_s) * grow)
    whole = _load(trace, {} if generated else read)
    if not (whole.service_class == REAL_TIME).all():
        raise WorkloadError(
            f"--trace {trace}: holds best-effort requests, which have no objectives; give the "
            "online ones alone"
        )
    start, end = peak_window(whole, peak_s * grow)
    if generated:
        start, end = lead_s * grow, (lead_s + peak_s) * grow
    end = min(end, float(np.nextafter(whole.last_arrival_s, np.inf)))
    lead = min(lead_s * grow, start)
    ran = scale_rate(window(whole, start - lead, end), grow)
    since = max(lead / grow - 1e-6, 0.0)  # where subtractions have rounded
    judged = take_rows(ran, np.flatnonzero(~(ran.arrival_s < since)))
    if not judged.span_s:
        raise WorkloadError(
            f"--trace {trace}: all requests of its peak arrive at once; give a trace with times of "
            "arrival"
        )
    tokens = float((whole.prompt_tokens + whole.output_tokens).sum())
    return Peak(
        trace,
        (start - lead, end),
        since,
        replace(judged, arrival_s=judged.arrival_s - since),
        whole.longest,
        tokens / whole.span_s * grow,
        len(judged) / judged.span_s,
        _load_of(whole, grow),
        _day(whole, end - start, start),
        trouble,
    )


def _load_of(whole: Workload, grow: float) -> dict[str, list[float]]:
    known = ~np.isnan(whole.arrival_s)
    tokens = (whole.prompt_tokens + whole.output_tokens)[known]
    sums, edges = np.histogram(whole.arrival_s[known], _LOADS, weights=tokens)
    rates = sums / np.diff(edges) * grow
    return {"at_s": edges[:-1].round(3).tolist(), "tokens_per_s": rates.round(3).tolist()}


def _day(whole: Workload, peak_s: float, start_s: float) -> np.ndarray | None:
    if whole.span_s < DAY_S:
        return None
    known = ~np.isnan(whole.arrival_s)
    at = whole.arrival_s[known]
    at, tokens = at - at.min(), (whole.prompt_tokens + whole.output_tokens)[known]
    a_minute = np.bincount((at[at < DAY_S] // 60).astype(int), tokens[at < DAY_S], minlength=1440)
    smooth = np.convolve(np.concatenate([a_minute[-7:], a_minute, a_minute[:7]]), np.ones(15) / 15)
    inside = (whole.arrival_s >= start_s) & (whole.arrival_s < start_s + peak_s)
    at_peak = (whole.prompt_tokens + whole.output_tokens)[inside].sum() * 60 / peak_s
    return smooth[14:-14] / at_peak


def _load(trace: str, read: Mapping[str, str | None]) -> Workload:
    """What trials of this process will find read already."""
    return SOURCES.recorded(SimulationConfig(trace=trace, **read))


def peak_window(online: Workload, seconds: float) -> tuple[float, float]:
    """Return (start, end) of the `seconds` in which most prompt and output tokens arrive; the
    earliest such window. A shorter trace is taken whole. Later stages of sessions do not count,
    since their times depend on the run. Raises SettingsError if `seconds` is not above 0 and
    finite, WorkloadError if no request has an arrival time.

    Raises SettingsError if `seconds` is not above 0 and finite, WorkloadError if no request
    has an arrival time.
    """
    if not 0 < seconds < np.inf:
        raise SettingsError(f"a peak of {seconds} s is empty: give a number of seconds above 0")
    known = ~np.isnan(online.arrival_s)
    at = online.arrival_s[known]
    tokens = (online.prompt_tokens + online.output_tokens)[known]
    if not len(at):
        raise WorkloadError(
            f"{online.provenance.name}: no request has an arrival time; give a trace that has"
        )
    total = np.concatenate([[0], np.cumsum(tokens)])
    arriving = total[np.searchsorted(at, at + seconds, side="left")] - total[:-1]
    start = float(at[int(arriving.argmax())])
    return start, start + seconds
