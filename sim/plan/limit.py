"""The largest load at which one server keeps its objectives: requests a second, or clients at once.
Every load has the same requests. Another rate draws their arrivals out or presses them together, so
two loads differ in nothing else. Rates lie on one grid of 2 % steps, so limits of several settings
compare. A load is kept if enough of the judged requests keep every objective and the queue does not
grow. The first tenth of the requests fills the server and is not judged.

Every load has the same requests: at another rate their arrivals are drawn out or pressed together.
So two loads, or two settings, differ in nothing but what is asked. Rates lie on one grid of steps
of 2 %, so that limits of several settings compare. A load is kept if enough of the judged requests
keep every objective and the queue does not grow. The first tenth of the requests fills the server
and is not judged.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from twinserve.sim.plan.planner import plan_objectives
from twinserve.sim.plan.search import smallest
from twinserve.sim.plan.trial import SOURCES, Trial, can_deal, dealt, judged, needed
from twinserve.sim.plan.verdicts import Attained, attained, together
from twinserve.sim.plan.waves import drive_all
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.offered_load import offered_load_of
from twinserve.sim.setup.run import run_policy
from twinserve.traces.generators.synth import is_synthetic
from twinserve.traces.transform import scale_rate
from twinserve.traces.workload import REAL_TIME, Workload, WorkloadError

STEP = 0.02  # of the grid of rates
_ZERO, _MOST = 350, 900  # of the grid: where 1 request/s is, and its end; 0.001 to 54,000 a second
FILLS = 0.1  # of the requests
SECONDS = 120.0  # of load at the estimated capacity, where the number of requests is not given
FEWEST, MOST = 1000, 20_000  # requests then
A_CLIENT = 8  # requests a client has at the least
SHARES = (0.1, 0.25, 0.5, 0.7, 0.85, 1.1, 1.3)  # of the limit: further points of the curve
LOST = ("saturated", "sheds")  # verdicts of sim/results/saturation.py


@dataclass(frozen=True)
class Setting:
    """One server.

    axes      its distinguishing settings, as flags have it
    settings  of a SimulationConfig, as JSON
    guess     the start of the search, a place on the grid
    draws     1 if texts or sessions tie lengths to requests
    notices   of its words
    """

    axes: Mapping[str, Any]
    settings: Mapping[str, Any]
    gpus: int
    requests: int
    guess: int
    draws: int
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """One run. rate: requests/s; clients: requests at once, each client sending its next when the
    last has ended. One of them is None."""

    settings: Mapping[str, Any]
    rate: float | None
    clients: int | None
    draw: int = 0


@dataclass(frozen=True)
class Ran:
    """The result of a load. queue: verdict and reason, "" of a closed loop; numbers: by name."""

    trial: Trial
    queue: tuple[str, str]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """A load under all draws. numbers: means over draws: output_tokens_per_s, requests_per_s,
    median and p99 of ttft_s, tpot_s and e2el_s, tokens_per_s_user (1 / median TPOT); notices: of
    its runs, but for the rate that they began with."""

    load: float
    kept: bool
    attained: tuple[Attained, ...]
    queue: tuple[str, str]
    numbers: Mapping[str, float]
    notices: tuple[str, ...]

    @property
    def grows(self) -> bool:
        return self.queue[0] in LOST

    @property
    def answer(self) -> str:
        """Return the verdict, with doubt, as for a plan's sizes."""
        if self.grows:
            return "fails"
        found = together(self.attained)
        return "undecided" if found == "meets" and self.queue[0] == "unclear" else found


@dataclass(frozen=True)
class Limit:
    """The answer for a setting.

    load      the largest that is kept; None: not even the smallest
    low, high  the largest load that is kept beyond doubt, and the largest that does not fail beyond
              doubt (95 % intervals of the kept shares); None: as of `load`
    open      the search ended at its largest load, and that is kept
    breaks    the next larger load; None if `open`
    points    all loads that were run, ascending
    """

    setting: Setting
    load: float | None
    low: float | None
    high: float | None
    open: bool
    breaks: Point | None
    points: tuple[Point, ...]

    @property
    def point(self) -> Point | None:
        return next((p for p in self.points if p.load == self.load), None)

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the notices of the server's words and of the run at the limit."""
        return _said((*self.setting.notices, *(self.point or self.points[0]).notices))


@dataclass(frozen=True)
class Limits:
    objectives: tuple[Objective, ...]
    closed: bool
    limits: tuple[Limit, ...]
    runs: int = field(compare=False)


def find_limits(
    configs: Sequence[tuple[Mapping[str, Any], SimulationConfig]],
    draws: int,
    closed: bool,
    workers: Executor,
    report: Callable[[int, int], None],
) -> Limits:
    """Return the limit of each server. configs: axes and settings of each server. draws: of the
    requests, for the intervals. closed: clients at once instead of a rate. Raises SettingsError,
    WorkloadError, ProfileError."""
    objectives = plan_objectives(configs[0][1].slo or "")
    sized = [_sized(config) for _, config in configs]
    count = max(n for _, n in sized)
    settings = tuple(
        _setting(axes, config, count, draws, closed, rate)
        for (axes, config), (rate, _) in zip(configs, sized, strict=True)
    )
    found: list[dict[int, Point]] = [{} for _ in settings]
    searches = [
        _search(s, objectives, closed, known, max(s.requests // A_CLIENT, 1) if closed else _MOST)
        for s, known in zip(settings, found, strict=True)
    ]
    limits, first = drive_all(searches, workers, report, run_load)
    further = [
        _point(s, objectives, closed, known, place)
        for s, known, limit in zip(settings, found, limits, strict=True)
        for place in _further(limit, known, closed)
    ]
    _, second = drive_all(further, workers, lambda n, left: report(first + n, left), run_load)
    whole = tuple(
        replace(limit, points=tuple(known[k] for k in sorted(known)))
        for limit, known in zip(limits, found, strict=True)
    )
    return Limits(objectives, closed, whole, first + second)


# -- the loads -------------------------------------------------------------------------------------
def run_load(load: Load) -> Ran:
    """Run one load. Raises what `resolve` does."""
    inputs = _at(resolve(SimulationConfig(**load.settings), sources=SOURCES), load)
    result = run_policy(inputs, inputs.policies[0])
    r = RequestColumns.of(result.rows.requests)
    arrival = np.sort(r.arrival)
    since = float(arrival[int(FILLS * len(arrival))])
    objectives = plan_objectives(inputs.config.slo or "")
    trial = judged(result.rows, objectives, since, inputs)
    queue = result.summary["classes"]["rt"].get("saturation") if load.rate else None
    said = ("", "") if queue is None else (queue["verdict"], queue["reason"])
    return Ran(trial, said, _numbers(r, since, float(arrival[-1])))


def _at(inputs: Inputs, load: Load) -> Inputs:
    workload = inputs.workload
    if load.draw:
        workload = dealt(workload, 0.0, load.draw)
    if load.clients is not None:
        at_once = np.where(np.isnan(workload.arrival_s), np.nan, 0.0)
        workload = replace(workload, arrival_s=at_once, concurrency=load.clients)
    else:
        workload = scale_rate(workload, (load.rate or 0.0) / rate_of(workload))
    return replace(inputs, workload=workload)


def rate_of(workload: Workload) -> float:
    """Return requests/s. Raises WorkloadError if all arrive at once."""
    if not workload.span_s > 0:
        raise WorkloadError(
            f"{workload.provenance.name}: all requests arrive at once, so there is no rate to "
            "change; search the number of clients instead (--concurrency)"
        )
    return len(workload) / workload.span_s


def _numbers(r: RequestColumns, since_s: float, until_s: float) -> dict[str, float]:
    mine = (r.arrival >= since_s) & r.finished & (r.service_class == "rt")
    ended = (r.last >= since_s) & (r.last <= until_s) & r.finished
    span = max(until_s - since_s, 1e-9)
    found = {
        "output_tokens_per_s": float(r.output[ended].sum()) / span,
        "requests_per_s": float(ended.sum()) / span,
    }
    several = mine & (r.output > 1)
    for name, values in (("ttft", r.ttft[mine]), ("tpot", r.tpot[several]), ("e2el", r.e2el[mine])):
        for word, q in (("median", 50), ("p99", 99)):
            found[f"{word}_{name}_s"] = float(np.percentile(values, q)) if len(values) else np.nan
    tpot = found["median_tpot_s"]
    found["tokens_per_s_user"] = 1 / tpot if tpot > 0 else np.nan
    return found


def place_of(load: float, closed: bool) -> int:
    """Return the nearest place on the grid."""
    if closed:
        return max(round(load), 1)
    place = _ZERO + round(float(np.log(load) / np.log1p(STEP)))
    return min(max(place, 1), _MOST)


def load_at(place: int, closed: bool) -> float:
    """Return clients, or requests/s in three digits, so that a printed rate can be given again."""
    return place if closed else float(f"{(1 + STEP) ** (place - _ZERO):.3g}")


# -- settings --------------------------------------------------------------------------------------
def _sized(config: SimulationConfig) -> tuple[float, int]:
    """(estimated capacity, requests/s; requests to run). Raises SettingsError."""
    if config.load is not None:
        raise SettingsError("--load sets the rate, which is searched here; drop it")
    if config.pool:
        raise SettingsError("--pool: offline requests have no rate to search; drop it")
    given = any(x is not None for x in (config.requests, config.duration, config.window))
    few = config if given else config.model_copy(update={"requests": FEWEST})
    inputs = resolve(few, sources=SOURCES)
    workload = inputs.workload
    if not (workload.service_class == REAL_TIME).all():
        raise WorkloadError(
            f"{config.trace}: holds best-effort requests, which have no objectives; give the "
            "online ones alone"
        )
    if inputs.hand_over is not None or not workload.span_s > 0:
        return 1.0, len(workload)  # how much they can serve is not known beforehand
    load = offered_load_of(workload, inputs.machines) or 1.0
    capacity = rate_of(workload) / load
    wanted = len(workload) if given else int(min(max(SECONDS * capacity, FEWEST), MOST))
    return capacity, wanted


def _setting(
    axes: Mapping[str, Any],
    config: SimulationConfig,
    count: int,
    draws: int,
    closed: bool,
    capacity: float,
) -> Setting:
    if config.duration is None and config.window is None:
        config = config.model_copy(update={"requests": count})
    inputs = resolve(config, sources=SOURCES)
    workload = inputs.workload
    if not closed:
        rate_of(workload)
    elif (workload.group >= 0).any():
        raise WorkloadError(f"{config.trace}: its sessions set the arrivals; drop --concurrency")
    redrawn = is_synthetic(config.trace) or can_deal(workload)
    gpus = sum(n * hardware.profile.gpus for hardware, n in inputs.machines)
    guess = 16 if closed else place_of(0.8 * capacity, closed)
    settings = config.model_dump(mode="json")
    draws = draws if redrawn else 1
    notices = _said(inputs.notices)
    return Setting(axes, settings, gpus, len(workload), guess, draws, notices)


def _said(notices: Iterable[str]) -> tuple[str, ...]:
    """Not of the rate that a run began with."""
    return tuple(dict.fromkeys(n for n in notices if not n.startswith("rate ")))


# -- the search ------------------------------------------------------------------------------------
Points = Generator[list[Load], list[Ran], Any]


def _point(
    setting: Setting,
    objectives: Sequence[Objective],
    closed: bool,
    known: dict[int, Point],
    place: int,
) -> Points:
    """The point at a place of the grid, run if it is not known."""
    if place not in known:
        load = load_at(place, closed)
        made = is_synthetic(setting.settings["trace"])  # another seed makes others
        rate, clients = (None, place) if closed else (load, None)
        seed = setting.settings["seed"]
        drawn = [{**setting.settings, "seed": seed + i * made} for i in range(setting.draws)]
        ran = yield [Load(one, rate, clients, i * (not made)) for i, one in enumerate(drawn)]
        known[place] = _of_draws(load, objectives, ran)
    return known[place]


def _of_draws(load: float, objectives: Sequence[Objective], ran: Sequence[Ran]) -> Point:
    trials = [one.trial for one in ran]
    kept = True
    for i, objective in enumerate(objectives):
        due = sum(t.objectives[i].due for t in trials)
        kept &= sum(t.objectives[i].kept for t in trials) >= needed(objective, due)
    queue = next((one.queue for one in ran if one.queue[0] in LOST), ran[0].queue)
    numbers = {name: float(np.mean([one.numbers[name] for one in ran])) for name in ran[0].numbers}
    found = attained(objectives, trials)
    notices = _said(n for t in trials for n in t.notices)
    return Point(load, kept and queue[0] not in LOST, found, queue, numbers, notices)


def _search(
    setting: Setting,
    objectives: Sequence[Objective],
    closed: bool,
    known: dict[int, Point],
    most: int,
) -> Points:
    """Returns a Limit without its points."""

    def last(good: Callable[[Point], bool], guess: int, stride: int) -> Points:
        """The place before the first that is not good; None: all are."""
        numbers = smallest(min(guess, most), 1, most, above=False, stride=stride)
        try:
            place = next(numbers)
            while True:
                point = yield from _point(setting, objectives, closed, known, place)
                place = numbers.send(not good(point))
        except StopIteration as end:
            return None if end.value.number is None else end.value.number - 1

    place = yield from last(lambda p: p.kept, setting.guess, 8)
    near = most if place is None else max(place, 1)
    low = yield from last(lambda p: p.answer == "meets", near, 2)
    high = yield from last(lambda p: p.answer != "fails", near, 2)
    ends = [most if end is None else end for end in (low, place, high)]
    ends = [min(ends[0], ends[1]), ends[1], max(ends[1:])]
    at = [load_at(end, closed) if end else None for end in ends]
    breaks = None if place is None else known[place + 1]
    return Limit(setting, at[1], at[0], at[2], place is None, breaks, ())


def _further(limit: Limit, known: Mapping[int, Point], closed: bool) -> list[int]:
    """Places of the curve that were not run yet; none near one that was."""
    if limit.load is None:
        return []
    places = {place_of(share * limit.load, closed) for share in SHARES}
    return [
        k
        for k in sorted(places)
        if all(abs(load_at(j, closed) / load_at(k, closed) - 1) > 0.04 for j in known)
    ]
