"""Attainment of request objectives, verdicts on a run's objectives, and `--goodput ttft:500
tpot:50`: the bounds of a good request."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from twinserve.errors import TwinserveError
from twinserve.sim.results.metrics_requests import MS, RequestColumns
from twinserve.sim.results.options import Objective


def describe_attainment(
    r: RequestColumns, mine: np.ndarray, e2el_s: float | None = None
) -> dict[str, float | None]:
    """Return attainment of the requests in `mine` (bool[n]). e2el_s: end-to-end objective in
    seconds, which has no column."""
    ttft_due, tpot_due = mine & ~np.isnan(r.slo_ttft), mine & ~np.isnan(r.slo_tpot)
    due, met = due_and_met(r, mine, e2el_s)
    further = {}
    if e2el_s is not None:
        further = {"e2el_attainment": mean((r.e2el <= e2el_s)[mine])}
    later_tokens = np.maximum(r.output[tpot_due] - 1, 0).sum()
    return {
        "ttft_attainment": mean((r.ttft <= r.slo_ttft)[ttft_due]),
        "tpot_attainment": mean((r.tpot <= r.slo_tpot)[tpot_due]),
        "every_gap_attainment": mean(((r.late == 0) & ~np.isnan(r.tpot))[tpot_due]),
        "tpot_token_attainment": (
            None if later_tokens == 0 else 1 - r.late[tpot_due].sum() / later_tokens
        ),
        "slo_attainment": mean(met[due]),
        **further,
    }


def due_and_met(
    r: RequestColumns, mine: np.ndarray, e2el_s: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return bool[n] each: requests of `mine` with objectives, and those that meet all of them."""
    # Without its first token a request has missed its TTFT, without its end its TPOT: starving it
    # does not pay. (Both are NaN then, and a comparison with NaN is false.)
    ttft_due, tpot_due = mine & ~np.isnan(r.slo_ttft), mine & ~np.isnan(r.slo_tpot)
    due = ttft_due | tpot_due
    met = ((r.ttft <= r.slo_ttft) | ~ttft_due) & ((r.tpot <= r.slo_tpot) | ~tpot_due)
    met &= ~r.left  # its client no longer waited
    if e2el_s is not None:
        due, met = mine, met & (r.e2el <= e2el_s)
    return due, met


def e2el_bound(objectives: Sequence[Objective], service_class: str) -> float | None:
    """Return seconds, or None if the class has no end-to-end objective."""
    for objective in objectives:
        if (objective.service_class, objective.metric) == (service_class, "e2el"):
            return objective.bound_s
    return None


def judge(r: RequestColumns, objectives: Sequence[Objective]) -> list[dict]:
    """Return `objectives` of summary.json: the verdict on each objective with a statistic.

    class, metric, statistic, bound_s (and prefills, if the bound grows with the prompt) as given;
    share: of the requests with the objective, the share that met it; or value_s: mean of completed
    requests; met: None if no request has the objective.
    """
    return [
        {
            "class": objective.service_class,
            "metric": objective.metric,
            "statistic": objective.statistic,
            "bound_s": objective.bound_s,
            **({"prefills": objective.prefills} if objective.prefills else {}),
            **(_judge_mean if objective.share is None else _judge_share)(r, objective),
        }
        for objective in objectives
        if objective.statistic is not None
    ]


def all_met(verdicts: Sequence[dict]) -> bool | None:
    """Return whether all objectives with requests are met; None if there are none."""
    known = [verdict["met"] for verdict in verdicts if verdict["met"] is not None]
    return all(known) if known else None


def _judge_share(r: RequestColumns, objective: Objective) -> dict:
    # As each request has it: one of its trace comes before that of the settings.
    bound = {
        "ttft": r.slo_ttft,
        "tpot": r.slo_tpot,
        "e2el": np.full(len(r.e2el), objective.bound_s),
    }[objective.metric]
    due = (r.service_class == objective.service_class) & ~np.isnan(bound)
    kept = due & r.finished & (_latency(r, objective.metric) <= bound)
    n, good = int(due.sum()), int(kept.sum())
    if n == 0:
        return {"share": None, "met": None}
    needed = Fraction(str(objective.statistic)[1:])  # 99.9 % of 1,000 are 999, not a bit more
    return {"share": good / n, "met": good * 100 >= needed * n}


def _judge_mean(r: RequestColumns, objective: Objective) -> dict:
    mine = r.service_class == objective.service_class
    done = mine & r.finished
    if objective.metric == "tpot":
        done &= r.output > 1
    value = mean(_latency(r, objective.metric)[done])
    if not mine.any():
        return {"value_s": None, "met": None}
    return {"value_s": value, "met": value is not None and value <= objective.bound_s}


def _latency(r: RequestColumns, metric: str) -> np.ndarray:
    return {"ttft": r.ttft, "tpot": r.tpot, "e2el": r.e2el}[metric]


def mean(values: np.ndarray, scale: float = 1.0) -> float | None:
    """Return the mean, or None of nothing."""
    return float(np.mean(values) * scale) if len(values) else None


GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class GoodputError(TwinserveError, ValueError):
    """An unreadable goodput objective, in one line."""


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """Return {"ttft": 500.0, ...} (ms) from "ttft:500" pairs; one string may hold several.

    Raises GoodputError for no pair, an unknown or repeated name, or a value that is no number.
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
    """Return bool[n]: requests within every objective (ms). `latencies`: seconds by name,
    float64[n].

    A latency equal to the bound is good. The bound is converted to seconds first, as in vLLM.
    """
    good = np.ones(len(latencies["e2el"]), bool)
    for name, bound_ms in objectives.items():
        good &= bound_ms / MS >= latencies[name]
    return good


def _nearest(name: str) -> str:
    aliases = {"e2e": "e2el", "latency": "e2el", "itl": "tpot"}
    close = difflib.get_close_matches(name.lower(), [*GOODPUT_METRICS, *aliases], n=1, cutoff=0.4)
    return f"; did you mean {aliases.get(close[0], close[0])}?" if close else ""
