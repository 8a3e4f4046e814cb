"""`--goodput ttft:500 tpot:50`: what makes a request count as good, in milliseconds as in vLLM."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping

import numpy as np

from twinserve.errors import TwinserveError
from twinserve.sim.results.metrics_stats import MS

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class GoodputError(TwinserveError, ValueError):
    """A goodput objective that cannot be read, as one line."""


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """{"ttft": 500.0, ...} (ms) from "ttft:500" pairs; one string may hold several.

    Raises GoodputError for no pair at all, an unknown or repeated name, or a value that is no
    number of ms.
    """
    objectives: dict[str, float] = {}
    given = " ".join(pairs)
    if "=" in given or "<" in given:
        raise GoodputError(
            f"--goodput {given}: = and < are words of --slo; write NAME:MILLISECONDS, as ttft:500"
        )
    for pair in given.replace(",", " ").split():
        name, colon, text = pair.partition(":")
        if not colon:
            raise GoodputError(f"--goodput {pair}: no value; write NAME:MILLISECONDS, as ttft:500")
        if name not in GOODPUT_METRICS:
            raise GoodputError(
                f"--goodput {pair}: no metric {name!r}{_nearest(name)}; "
                f"there are {', '.join(GOODPUT_METRICS)}"
            )
        if name in objectives:
            raise GoodputError(f"--goodput {pair}: {name} is given twice; keep one of them")
        try:
            value = float(text)
        except ValueError:
            raise GoodputError(
                f"--goodput {pair}: {text!r} is no number of milliseconds; write {name}:500"
            ) from None
        if not math.isfinite(value) or value < 0:
            raise GoodputError(f"--goodput {pair}: give a finite number of milliseconds, 0 or more")
        objectives[name] = value
    if not objectives:
        raise GoodputError("--goodput: no objective; write NAME:MILLISECONDS, as ttft:500")
    return objectives


def is_good(latencies: Mapping[str, np.ndarray], objectives: Mapping[str, float]) -> np.ndarray:
    """bool[n]: requests within every objective (ms); `latencies`: seconds by name, float64[n] each.

    A latency on the bound is good; the bound is turned into seconds first: vLLM's very comparison.
    """
    good = np.ones(len(latencies["e2el"]), bool)
    for name, bound_ms in objectives.items():
        good &= bound_ms / MS >= latencies[name]
    return good


def _nearest(name: str) -> str:
    aliases = {"e2e": "e2el", "latency": "e2el", "itl": "tpot"}
    close = difflib.get_close_matches(name.lower(), [*GOODPUT_METRICS, *aliases], n=1, cutoff=0.4)
    return f"; did you mean {aliases.get(close[0], close[0])}?" if close else ""
