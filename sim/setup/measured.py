"""What `--warmup`, `--metrics-every` and `--percentiles` say, and whether a request list has room
for it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from twinserve.sim.results.metrics_warmup import too_long
from twinserve.sim.results.options import MetricsOptions, Warmup
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.workload import Workload, WorkloadError

MOST_WINDOWS = 2_000


def metrics_options(
    goodput: Mapping[str, float] | None = None,
    warmup: str | None = None,
    every_s: float | None = None,
    percentiles: str | None = None,
) -> MetricsOptions:
    """Of what a command line says. Raises SettingsError."""
    if every_s is not None and not (math.isfinite(every_s) and every_s > 0):
        raise SettingsError(
            f"--metrics-every {every_s:g}: give the seconds of a window, more than 0"
        )
    return MetricsOptions(
        goodput=goodput or {},
        warmup=None if warmup is None else parse_warmup(warmup),
        every_s=every_s,
        percentiles=() if percentiles is None else parse_percentiles(percentiles),
    )


def parse_warmup(text: str) -> Warmup:
    """`500` requests, or `60s`. Raises SettingsError."""
    said = re.fullmatch(r"\s*([\d.]+)\s*(s?)\s*", text)
    try:
        value = float(said.group(1)) if said else 0.0
    except ValueError:
        value = 0.0
    seconds = said is not None and said.group(2) == "s"
    if not 0 < value < 1e12 or (not seconds and value != int(value)):
        raise SettingsError(
            f"--warmup {text}: write a number of requests, as 500, or seconds, as 60s; above 0"
        )
    return Warmup(seconds=value) if seconds else Warmup(requests=int(value))


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,90,99.9`. Raises SettingsError."""
    found: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise SettingsError(
                f"--percentiles {text}: {part.strip()!r} is no percentile; write numbers from 0 to "
                "100, as 50,90,99.9"
            )
        if value in found:
            raise SettingsError(f"--percentiles {text}: {part.strip()} is given twice; keep one")
        found.append(value)
    return tuple(found)


def check_options(options: MetricsOptions, workload: Workload) -> None:
    """What can be known before a run. Raises WorkloadError for a warm-up that leaves no request,
    SettingsError for more windows than anybody reads."""
    arrival = workload.arrival_s
    known = arrival[~np.isnan(arrival)]
    first, last = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if workload.pool is not None:
        first, last = 0.0, max(last, workload.pool.until_s or 0.0)
    if options.every_s is not None and (last - first) / options.every_s > MOST_WINDOWS:
        raise SettingsError(
            f"--metrics-every {options.every_s:g}: cuts {last - first:,.0f} s of arrivals into "
            f"more than {MOST_WINDOWS:,} windows; choose longer ones"
        )
    warmup = options.warmup
    if warmup is None:
        return
    if warmup.requests is not None and warmup.requests >= len(workload):
        raise WorkloadError(too_long(warmup, f"there are {len(workload):,} requests"))
    # a later turn may come at any time
    if warmup.seconds is not None and len(known) == len(arrival) and last - first < warmup.seconds:
        raise WorkloadError(too_long(warmup, f"requests arrive for {last - first:,.4g} s"))
