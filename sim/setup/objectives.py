"""The objectives of `--slo`, in one of two spellings (docs/metrics.md).

ttft=0.4,tpot=0.2                    seconds, of real-time requests; also with k=5, or none
rt: ttft p90 < 1 s, tpot < 50 ms     with units, classes, percentiles (or p90 ttft)
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from twinserve.profiles.host import UNITS
from twinserve.sim.results.options import MetricsOptions, Objective, Warmup, percentile_name
from twinserve.sim.setup.config import SettingsError, parse_slo

_CLASSES = {"rt": "rt", "be": "be", "real-time": "rt", "best-effort": "be"}
_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}
_NEAR = {**_METRICS, "itl": "tpot", "tbt": "tpot", "latency": "e2el"}
_LONGEST_S = 1e6
_GOODPUT = re.compile(r"\b(ttft|tpot|e2el|e2e|itl)\s*:\s*[\d.]")
_SCALED = re.compile(r"max\s*\((.*),\s*([^\s,]+)\s*x\s*prefill\s*\)")
_EXAMPLE = "rt: ttft p90 < 1 s, tpot < 50 ms"


def parse_objectives(text: str | None) -> tuple[Objective, ...]:
    """Return the objectives of `--slo`; "none": empty, None: the default. Raises SettingsError."""
    if text is not None and re.search(r"[<>:;]", text):
        return _Long(text).objectives()
    short = parse_slo(text)
    if short is None:
        return ()
    ttft, tpot, prefills = short
    return Objective("rt", "ttft", ttft, prefills), Objective("rt", "tpot", tpot)


def of_class(objectives: Sequence[Objective], service_class: str) -> dict[str, Objective]:
    """Return the objectives of one class, by metric."""
    return {o.metric: o for o in objectives if o.service_class == service_class}


def pool_objectives(objectives: Sequence[Objective]) -> tuple[float, float]:
    """Return (TTFT, TPOT) in seconds for requests of the best-effort pool; NaN: none. Raises
    SettingsError for an objective that grows with the prompt."""
    found = of_class(objectives, "be")
    for objective in found.values():
        if objective.prefills:
            raise SettingsError(
                f"--slo: {str(objective)!r} grows with the prompt, which requests of --pool cannot "
                "have; give a bound in seconds, or drop --pool"
            )
    ttft, tpot = (found[m].bound_s if m in found else math.nan for m in ("ttft", "tpot"))
    return ttft, tpot


class _Long:
    """Parser of the spelling with `<`, clause by clause."""

    def __init__(self, text: str) -> None:
        self.text = text

    def objectives(self) -> tuple[Objective, ...]:
        if found := _GOODPUT.search(self.text):
            raise self._wrong(
                found.group(),
                "NAME:MILLISECONDS is what --goodput takes; write "
                f"--goodput {''.join(found.group().split())}..., or here {_EXAMPLE!r}",
            )
        objectives: dict[tuple[str, str], Objective] = {}
        for clause in self.text.split(";"):
            name, colon, items = clause.rpartition(":")
            service_class = self._class(name.strip()) if colon else "rt"
            for item in re.split(r",(?![^(]*\))", items):
                objective = self._item(service_class, " ".join(item.split()))
                key = objective.service_class, objective.metric
                if key in objectives:
                    raise self._wrong(
                        " ".join(item.split()),
                        f"{objective.metric} of {service_class} is given twice; keep one of them",
                    )
                objectives[key] = objective
        return tuple(objectives.values())

    def _class(self, name: str) -> str:
        if "<" in name:
            raise self._wrong(name, "write ; between the objectives of two classes")
        if name.lower() not in _CLASSES:
            raise self._wrong(name, f"no class of that name{_near(name, _CLASSES)}; write rt or be")
        return _CLASSES[name.lower()]

    def _item(self, service_class: str, item: str) -> Objective:
        left, less, bound = item.partition("<")
        if not item:
            raise self._wrong(item, f"no objective is there; write {_EXAMPLE!r}")
        if not less:
            if "=" in item:
                raise self._wrong(
                    item,
                    "NAME=SECONDS and NAME < VALUE UNIT do not go together; write all with <, as "
                    f"{_EXAMPLE!r}",
                )
            raise self._wrong(item, f"has no <; write {_EXAMPLE!r}")
        words = left.lower().split()
        if not 1 <= len(words) <= 2:
            raise self._wrong(item, "write METRIC [pNN or mean] < VALUE UNIT")
        if len(words) == 2 and words[1] in _METRICS:  # p95 ttft
            words.reverse()
        if words[0] not in _METRICS:
            near = _near(words[0], _NEAR)
            raise self._wrong(item, f"no metric {words[0]!r}{near}; there are ttft, tpot, e2el")
        metric = _METRICS[words[0]]
        statistic = self._statistic(item, words[1]) if len(words) > 1 else None
        bound_s, prefills = self._bound(item, bound.removeprefix("=").strip())
        if prefills and metric != "ttft":
            raise self._wrong(item, "only ttft grows with the prompt; give a bound with its unit")
        if prefills and statistic == "mean":
            raise self._wrong(item, "a mean needs one bound for all; drop max(...) or mean")
        return Objective(service_class, metric, bound_s, prefills, statistic)

    def _statistic(self, item: str, word: str) -> str:
        if word == "mean":
            return word
        try:
            percentile = float(word[1:]) if re.fullmatch(r"p[\d.+-]+", word) else None
        except ValueError:
            percentile = None
        if percentile is None:
            hint = "; the median is p50" if word == "median" else ""
            raise self._wrong(
                item, f"no statistic {word!r}; write a percentile, p90, or mean{hint}"
            )
        if not 0 < percentile < 100:
            raise self._wrong(item, f"{word} is no percentile; it must lie between 0 and 100")
        return percentile_name(percentile)

    def _bound(self, item: str, bound: str) -> tuple[float, float]:
        """Return seconds, and the multiple of the isolated prefill."""
        if not bound.startswith("max"):
            return self._seconds(item, bound), 0.0
        scaled = _SCALED.fullmatch(bound)
        prefills = _number(scaled.group(2)) if scaled else None
        if scaled is None or prefills is None or not 0 < prefills < _LONGEST_S:
            raise self._wrong(item, "write the bound as max(0.4 s, 5 x prefill)")
        return self._seconds(item, scaled.group(1).strip()), float(prefills)

    def _seconds(self, item: str, bound: str) -> float:
        said = re.fullmatch(r"([-+.\d]+(?:e[-+]?\d+)?)\s*([^\W\d]*)", bound, re.I)
        value = _number(said.group(1)) if said else None
        if said is None or value is None:
            raise self._wrong(item, f"{bound!r} is no time; write a number and its unit, as 50 ms")
        unit = said.group(2)
        if not unit:
            raise self._wrong(item, f"{bound} has no unit; write {bound} s, ms or us")
        if unit not in UNITS:
            raise self._wrong(item, f"no unit {unit!r}; there are s, ms and us")
        seconds = float(value * UNITS[unit])
        if not 0 < seconds < _LONGEST_S:
            raise self._wrong(
                item, f"{bound} can never be kept or missed; give a time above 0, below 1e6 s"
            )
        return seconds

    def _wrong(self, part: str, why: str) -> SettingsError:
        return SettingsError(f"--slo {self.text!r}: {part!r}: {why}")


def _number(text: str) -> Decimal | None:
    """Return the value as written, so that 0.1 ms is the same float as 0.0001 s."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _near(word: str, names: dict[str, str]) -> str:
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.4)
    return f"; did you mean {names[close[0]]}?" if close else ""


def metrics_options(
    goodput: Mapping[str, float] | None = None,
    warmup: str | None = None,
    every_s: float | None = None,
    percentiles: str | None = None,
) -> MetricsOptions:
    """Return the metrics options of a command line. Raises SettingsError."""
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
    """Read `500` requests, or `60s`. Raises SettingsError."""
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
    """Read `50,90,99.9`. Raises SettingsError."""
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
