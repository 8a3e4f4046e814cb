"""What is asked of the metrics of a run beside what they always say: a warm-up to leave out,
windows, further percentiles, objectives. Nothing here changes what is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from twinserve.sim.results.command import exact

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}  # that have objectives, by name


@dataclass(frozen=True)
class Warmup:
    """Either the first requests, in order of arrival, or the first seconds since the first
    arrival."""

    requests: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.requests}" if self.seconds is None else f"{self.seconds:g}s"

    def too_long(self, there: str) -> str:
        """What is said where it leaves nothing; there: what the trace has."""
        return f"--warmup {self}: {there}, so none is left to measure; choose a shorter warm-up"


@dataclass(frozen=True)
class Objective:
    """A bound on a latency of each request of a class, and what the run as a whole owes.

    metric     "ttft", "tpot" or "e2el"
    bound_s    seconds; a value on the bound keeps it
    prefills   of ttft: the bound is at least this many times a prompt's isolated prefill
    statistic  "p90": 90 % of the requests keep the bound; "mean": the mean does; None: no verdict
    """

    service_class: str
    metric: str
    bound_s: float
    prefills: float = 0.0
    statistic: str | None = None

    @property
    def share(self) -> float | None:
        """Of the requests that must keep the bound; None if the statistic is no percentile."""
        if self.statistic is None or self.statistic == "mean":
            return None
        return float(self.statistic[1:]) / 100

    def __str__(self) -> str:
        name = LATENCIES[self.metric]
        statistic = f" {self.statistic}" if self.statistic else ""
        bound = spoken(self.bound_s)
        if self.prefills:
            bound = f"max({bound}, {self.prefills:g} x prefill)"
        return f"{self.service_class}: {name}{statistic} < {bound}"


@dataclass(frozen=True)
class MetricsOptions:
    """What `summarise` is asked for.

    goodput      objectives in ms from `parse_goodput`, by metric
    every_s      seconds of a window of `windows`
    stages_s     moments at which a window begins and the last one ends, where `every_s` is not
                 given; those of the workload
    percentiles  beside those that are always there
    objectives   of the classes; those with a statistic get a verdict
    """

    goodput: Mapping[str, float] = field(default_factory=dict)
    warmup: Warmup | None = None
    every_s: float | None = None
    stages_s: tuple[float, ...] = ()
    percentiles: tuple[float, ...] = ()
    objectives: tuple[Objective, ...] = ()

    def described(self) -> dict:
        """`metrics` of run.json; `read_options` makes the options of it again."""
        return {
            "goodput_ms": dict(self.goodput) or None,
            "warmup": None if self.warmup is None else asdict(self.warmup),
            "every_s": self.every_s,
            **({"stages_s": list(self.stages_s)} if self.stages_s else {}),
            "percentiles": list(self.percentiles),
            "objectives": [asdict(objective) for objective in self.objectives],
        }


def read_options(run: Mapping) -> MetricsOptions:
    """The options of a run whose run.json is `run`; the defaults if it says nothing of them."""
    said = run.get("metrics") or {}
    warmup = said.get("warmup")
    return MetricsOptions(
        goodput=said.get("goodput_ms") or {},
        warmup=None if warmup is None else Warmup(**warmup),
        every_s=said.get("every_s"),
        stages_s=tuple(said.get("stages_s", ())),
        percentiles=tuple(said.get("percentiles", ())),
        objectives=tuple(Objective(**objective) for objective in said.get("objectives", ())),
    )


def measured_again(said: object) -> dict[str, object]:
    """The flags that ask for these metrics again, by name. said: `metrics` of run.json or of
    sweep.json; anything else gives none."""
    asked = said if isinstance(said, Mapping) else {}
    goodput, warmup = asked.get("goodput_ms"), asked.get("warmup")
    flags: dict[str, object] = {}
    if isinstance(goodput, Mapping) and goodput:
        flags["goodput"] = ",".join(f"{name}:{exact(value)}" for name, value in goodput.items())
    if isinstance(warmup, Mapping):
        requests, seconds = warmup.get("requests"), warmup.get("seconds")
        flags["warmup"] = f"{requests}" if seconds is None else f"{exact(seconds)}s"
    flags["metrics_every"] = asked.get("every_s")
    percentiles = asked.get("percentiles")
    if isinstance(percentiles, list) and percentiles:
        flags["percentiles"] = ",".join(map(exact, percentiles))
    return flags


def percentile_name(percentile: float) -> str:
    """ "p99", "p99.9": as vLLM's benchmark names its results."""
    whole = int(percentile)
    return f"p{whole}" if whole == percentile else f"p{float(percentile)}"


def spoken(seconds: float) -> str:
    """1.5 s, 50 ms, 20 us."""
    if seconds >= 1:
        return f"{seconds:.6g} s"
    return f"{seconds * 1e3:.6g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.6g} us"
