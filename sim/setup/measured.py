"""What `--warmup`, `--metrics-every` and `--percentiles` say."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from twinserve.sim.results.options import MetricsOptions, Warmup
from twinserve.sim.setup.config import SettingsError


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
