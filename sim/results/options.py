"""Optional metrics of a run: a warm-up to leave out, windows, more percentiles, objectives. None of
them changes the simulation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from twinserve.sim.results.command import exact

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}  # that have objectives, by name


@dataclass(frozen=True)
class Warmup:
    """The first requests in order of arrival, or the first seconds after the first arrival."""

    requests: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.requests}" if self.seconds is None else f"{self.seconds:g}s"

    def too_long(self, there: str) -> str:
        """Return the error if no request is left. there: the trace's size, in words."""
        return f"--warmup {self}: {there}, so none is left to measure; choose a shorter warm-up"


@dataclass(frozen=True)
class Objective:
    """A bound on a latency of each request of a class, and an optional statistic for the run.

    metric     "ttft", "tpot" or "e2el"
    bound_s    seconds; a value equal to the bound meets it
    prefills   of ttft: the bound is at least this many times a prompt's isolated prefill
    statistic  "p90": 90 % of the requests meet the bound; "mean": the mean does; None: no verdict
    """

    service_class: str
    metric: str
    bound_s: float
    prefills: float = 0.0
    statistic: str | None = None

    @property
    def share(self) -> float | None:
        """The share of requests that must meet the bound; None if no percentile is given."""
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
    """Options of `summarise`.

    goodput      objectives in ms from `parse_goodput`, by metric
    every_s      seconds of a window of `windows`
    stages_s     the workload's stages: moments at which a window begins and the last one ends, if
                 `every_s` is not given
    percentiles  besides the default ones
    objectives   of the classes; those with a statistic get a verdict
    """

    goodput: Mapping[str, float] = field(default_factory=dict)
    warmup: Warmup | None = None
    every_s: float | None = None
    stages_s: tuple[float, ...] = ()
    percentiles: tuple[float, ...] = ()
    objectives: tuple[Objective, ...] = ()

    def described(self) -> dict:
        """Return `metrics` of run.json, which `read_options` reads."""
        return {
            "goodput_ms": dict(self.goodput) or None,
            "warmup": None if self.warmup is None else asdict(self.warmup),
            "every_s": self.every_s,
            **({"stages_s": list(self.stages_s)} if self.stages_s else {}),
            "percentiles": list(self.percentiles),
            "objectives": [asdict(objective) for objective in self.objectives],
        }


def read_options(run: Mapping) -> MetricsOptions:
    """Return the options of a run from its run.json; the defaults if it has none."""
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
    """Return the flags for these metrics, by name. said: `metrics` of run.json or of sweep.json;
    any other value gives none."""
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
    """Return "p99" or "p99.9", as vLLM's benchmark names its results."""
    whole = int(percentile)
    return f"p{whole}" if whole == percentile else f"p{float(percentile)}"


def spoken(seconds: float) -> str:
    """Return a time in words: 1.5 s, 50 ms, 20 us."""
    if seconds >= 1:
        return f"{seconds:.6g} s"
    return f"{seconds * 1e3:.6g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.6g} us"
