"""Which GPUs, and how many, keep the objectives at the peak of a trace at the least cost: step 1 of
Echo's toolkit (Sec. 5.4), over kinds of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.memory import EXACT
from twinserve.sim.plan.apart import Apart, smallest_split, splits
from twinserve.sim.plan.candidates import Candidate, LeftOut, candidates
from twinserve.sim.plan.closer import (
    Sized,
    drawn,
    farthest,
    most_decodes,
    rate_of_one,
    sized,
    surely,
    with_error,
)
from twinserve.sim.plan.day import Day, plan_day
from twinserve.sim.plan.peaks import Peak, find_peak
from twinserve.sim.plan.prices import Prices
from twinserve.sim.plan.question import Question, check_question
from twinserve.sim.plan.savings import Needed, Saving, savings
from twinserve.sim.plan.sizes import Size
from twinserve.sim.plan.trial import can_deal
from twinserve.sim.plan.verdicts import Attained
from twinserve.sim.plan.waves import Search, Task, Waves, drive, drive_all
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.objectives import parse_objectives


@dataclass(frozen=True)
class Row:
    """The result of a candidate.

    status      "enough": `sized` is the smallest that keeps the objectives as recorded; "dearer":
                given up, at least `at_least` replicas; "never": `reason`; "too few": not even
                `at_least`, the most allowed
    monotone    whether more replicas were always better among those tried
    usd_per_hour  of `sized`, None: no price
    binds       the objectives that break with one replica less
    closer      of those that are enough: what is known beyond the recorded draw
    """

    candidate: Candidate
    status: str
    at_least: int
    sized: Sized | None = None
    monotone: bool = True
    reason: str = ""
    tried: tuple[int, ...] = ()
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    binds: tuple[Objective, ...] = ()
    closer: Closer | None = None

    @property
    def replicas(self) -> int | None:
        return None if self.sized is None else self.sized.replicas

    @property
    def gpus(self) -> int | None:
        return None if self.sized is None else self.sized.replicas * self.candidate.tp


@dataclass(frozen=True)
class Closer:
    """What is known of a sufficient candidate beyond its row.

    sizes       from the smallest on, up to the first that surely meets the objectives
    below       one replica less; None: there is none
    fast, slow  smallest numbers where steps take less, and longer, by what is expected of the
                profile; None: not even `farthest` are enough
    errors      what is expected of it
    rate_of_one the rate that one replica keeps, as a share of the peak's; None: next to nothing, or
                it is not the first row
    draws       of the peak: one where lengths cannot be dealt anew
    farthest    most replicas that were tried with longer steps
    """

    sizes: tuple[Sized, ...]
    below: Sized | None
    fast: int | None
    slow: int | None
    errors: str
    rate_of_one: float | None
    draws: int
    farthest: int

    @property
    def sure(self) -> int | None:
        """Return the smallest size tried that meets the objectives beyond doubt."""
        return next((one.replicas for one in self.sizes if one.answer == "meets"), None)


@dataclass(frozen=True)
class Plan:
    """rows: enough ones by rank, then the others. priced: rank is by dollars, else by GPUs. day:
    the cheapest with offline work; None if not asked for, or if none keeps the objectives. notices:
    of the trials of the candidates, each once. apart: of rows that are enough, in their order, if
    asked for. savings: of each policy against vllm, at the peak and then with offline work."""

    question: Question
    objectives: tuple[Objective, ...]
    peaks: tuple[Peak, ...]
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    priced: bool
    trials: int
    day: Day | None = None
    notices: tuple[str, ...] = ()
    apart: tuple[Apart, ...] = ()
    savings: tuple[Saving, ...] = ()

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        return max(peak.longest for peak in self.peaks)

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if row.status == "enough"), None)

    @property
    def closer(self) -> Closer | None:
        """Return what is known of the first row."""
        return None if self.best is None else self.best.closer

    @property
    def surest(self) -> tuple[Row, Sized] | None:
        """Return the cheapest size tried that meets the objectives beyond doubt."""

        def cost(row: Row, one: Sized) -> tuple[float, int]:
            usd, gpus = row.candidate.usd_per_hour, one.replicas * row.candidate.tp
            return (one.replicas * usd if self.priced and usd is not None else 0.0, gpus)

        found = [
            (cost(row, one), i, row, one)
            for i, row in enumerate(self.rows)
            if row.closer is not None
            for one in row.closer.sizes
            if one.answer == "meets"
        ]
        return min(found, key=lambda it: it[:2])[2:] if found else None


def plan_objectives(text: str) -> tuple[Objective, ...]:
    """Return the objectives of real-time requests, each with a percentile. Raises SettingsError."""
    objectives = parse_objectives(text)
    if not objectives:
        raise SettingsError(f"--slo {text!r}: a plan needs objectives; write 'ttft p90 < 1 s'")
    for one in objectives:
        if one.service_class != "rt":
            raise SettingsError(
                f"--slo {text!r}: {str(one)!r}: a plan is for real-time requests; drop be"
            )
        if one.share is None:
            raise SettingsError(
                f"--slo {text!r}: {str(one)!r}: say how many requests must keep it: write a "
                f"percentile, '{one.metric} p90 < ...'"
            )
    return objectives


def make_plan(
    question: Question,
    prices: Prices,
    workers: Executor,
    report: Callable[[int, int], None] = lambda trials, left: None,
) -> Plan:
    """Return the plan. report(trials so far, candidates under way) is called during the search.
    Raises SettingsError, ProfileError or WorkloadError in one line, and what a trial raises."""
    objectives = plan_objectives(question.slo)
    check_question(question)
    peaks = tuple(
        find_peak(
            trace,
            question.grow,
            question.peak_s,
            question.lead_s,
            question.trouble,
            question.rate,
            {name: question.settings.get(name) for name in ("format", "columns")},
        )
        for trace in question.traces
    )
    base = SimulationConfig(
        **question.settings, policy=question.policies, slo=question.slo, rate_scale=question.grow
    )
    longest = max(peak.longest for peak in peaks)
    found, left_out = candidates(
        base, question.model, question.gpus, question.tp, question.routers, prices, longest
    )
    if not found:
        raise SettingsError(
            f"no candidate holds {question.model} and the longest request: {left_out[0].gpu} "
            f"tp{left_out[0].tp}: {left_out[0].reason}; give other --gpus or --tp"
        )
    priced = all(one.usd_per_hour is not None for one in found)
    sizes = [Size.of(one, peaks, objectives, question.most_gpus // one.tp) for one in found]
    trials = _search(sizes, priced, question.all_sizes, workers, report)
    rows = _ranked(sizes, objectives, peaks, priced)
    day = None
    beside: list[Needed] = []
    apart: list[Apart] = []
    if any(row.status == "enough" for row in rows):
        draws = question.draws if all(can_deal(peak.judged) for peak in peaks) else 1
        others: list[Waves] = []
        if question.pool:
            others = [plan_day(sizes, lambda s, n: s.cost(n, priced), objectives, question.pool)]
        rows, days, more = _closer(rows, sizes, objectives, draws, others, workers, report)
        day, beside = days[0] if days else (None, [])
        trials += more
        if question.prefill_decode:
            apart, more = _apart(rows, sizes, objectives, draws, workers, report)
            trials += more
    else:
        rows, more = _how_far(rows, sizes, objectives, workers, report)
        trials += more
    said = (n for s in sizes for tried in s.trials.values() for t in tried for n in t.notices)
    notices = tuple(n for n in dict.fromkeys(said) if not n.endswith(EXACT))  # rows have ranges
    return Plan(
        question,
        objectives,
        peaks,
        tuple(rows),
        tuple(left_out),
        priced,
        trials,
        day,
        notices,
        tuple(apart),
        _savings(base.policy, rows, beside, question.pool),
    )


def _savings(
    policies: Sequence[str], rows: Sequence[Row], beside: Sequence[Needed], pool: int
) -> tuple[Saving, ...]:
    """Return the other policies' savings against vllm, at the peak and with offline work."""
    alone = [
        Needed(row.candidate, row.sized.replicas, row.sized.answer)
        for row in rows
        if row.status == "enough" and row.sized is not None
    ]
    return savings(policies, alone, 0) + (savings(policies, beside, pool) if pool else ())


def _of(sizes: Sequence[Size], row: Row) -> Size:
    return next(size for size in sizes if size.candidate is row.candidate)


def _search(
    sizes: Sequence[Size],
    priced: bool,
    all_sizes: bool,
    workers: Executor,
    report: Callable[[int, int], None],
) -> int:
    """Search every candidate's smallest number, or until it must cost more than another one of its
    policy: so policies can be compared."""

    def cheapest(policy: str) -> tuple[float, int] | None:
        of_policy = [s for s in sizes if s.candidate.policy == policy]
        known = [s.cost(n, priced) for s in of_policy if (n := s.at_most) is not None]
        return min(known, default=None)

    def rank(size: Size) -> tuple[float, int] | None:
        least, best = size.cost(size.at_least, priced), cheapest(size.candidate.policy)
        return None if not all_sizes and best is not None and least > best else least

    tasks = [
        Task(size.search(above=False), lambda size=size: rank(size))  # type: ignore[misc]
        for size in sizes
        if size.hopeless is None
    ]
    return drive(tasks, workers, report)


def _ranked(
    sizes: Sequence[Size], objectives: Sequence[Objective], peaks: Sequence[Peak], priced: bool
) -> list[Row]:
    rows = [(size, _row(size, objectives, peaks)) for size in sizes]
    order = {"enough": 0, "dearer": 1, "too few": 2, "never": 3}

    def key(pair: tuple[Size, Row]):
        size, row = pair
        n = row.replicas or row.at_least
        return order[row.status], size.cost(n, priced)

    return [row for _, row in sorted(rows, key=key)]


def _row(size: Size, objectives: Sequence[Objective], peaks: Sequence[Peak]) -> Row:
    candidate, tried = size.candidate, tuple(sorted(size.trials))
    if size.hopeless is not None:
        return Row(candidate, "never", size.least, reason=size.hopeless)
    n = size.number
    if n is None and size.found is not None:
        return Row(candidate, "too few", size.most, tried=tried)
    if n is None:
        return Row(candidate, "dearer", size.at_least, tried=tried)
    usd = size.usd_per_hour(n)
    tokens = max(peak.tokens_per_s for peak in peaks)
    below = size.trials.get(n - 1, ())
    missed = {i for trial in below for i in trial.missed}
    if 0 < n - 1 <= max(peak.crashes for peak in peaks):  # none would stay up
        missed = set(range(len(objectives)))
    return Row(
        candidate,
        "enough",
        n,
        _as_recorded(n, size, objectives),
        size.monotone,
        tried=tried,
        usd_per_hour=usd,
        usd_per_million_tokens=None if usd is None else usd / (3600 * tokens) * 1e6,
        binds=tuple(o for i, o in enumerate(objectives) if i in missed),
    )


def _as_recorded(n: int, size: Size, objectives: Sequence[Objective]) -> Sized:
    return sized(n, objectives, [size.trials[n]])


def _closer(
    rows: Sequence[Row],
    sizes: Sequence[Size],
    objectives: Sequence[Objective],
    draws: int,
    others: Sequence[Waves],
    workers: Executor,
    report: Callable[[int, int], None],
) -> tuple[list[Row], list, int]:
    """The rows, those that are enough with a closer look at each; what `others` found, which run at
    the same time; and the trials that took."""
    looks: dict[int, dict[str, Search]] = {}
    for place, row in enumerate(rows):
        if row.status == "enough":
            size, n = _of(sizes, row), row.at_least
            searches = {
                "sizes": surely(size, objectives, n, draws),
                "fast": with_error(size, n, -1),
                "slow": with_error(size, n, 1),
            }
            if not looks:  # the first row
                failed = max(peak.crashes for peak in size.peaks)
                searches["rate_of_one"] = rate_of_one(size, n - failed)
            if n > 1:
                searches["below"] = drawn(size, objectives, n - 1, draws)
            looks[place] = searches
    every = [search for look in looks.values() for search in look.values()]
    results, trials = drive_all([*others, *every], workers, report)
    each = iter(results[len(others) :])
    found = list(rows)
    for place, look in looks.items():
        row = rows[place]
        size = _of(sizes, row)
        ends = {name: next(each) for name in look}
        profile = row.candidate.hardware.profile
        errors = str(expected_errors(profile, decodes=most_decodes(size, row.at_least)))
        closer = Closer(
            sizes=tuple(ends["sizes"]),
            below=ends.get("below"),
            fast=ends["fast"],
            slow=ends["slow"],
            errors=errors,
            rate_of_one=ends.get("rate_of_one"),
            draws=draws,
            farthest=farthest(size, row.at_least),
        )
        found[place] = replace(
            row,
            sized=closer.sizes[0],
            monotone=size.monotone,
            tried=tuple(sorted(size.trials)),
            closer=closer,
        )
    return found, results[: len(others)], trials


def _apart(
    rows: Sequence[Row],
    sizes: Sequence[Size],
    objectives: Sequence[Objective],
    draws: int,
    workers: Executor,
    report: Callable[[int, int], None],
) -> tuple[list[Apart], int]:
    """Return prefill apart from decode for each row that is enough, and the trials needed."""
    looks = [
        smallest_split(_of(sizes, row), row.closer.sizes, objectives, draws)
        for row in rows
        if row.closer is not None and splits(row.candidate)
    ]
    return drive_all(looks, workers, report)


def _how_far(
    rows: Sequence[Row],
    sizes: Sequence[Size],
    objectives: Sequence[Objective],
    workers: Executor,
    report: Callable[[int, int], None],
) -> tuple[list[Row], int]:
    """If nothing is enough: what the most replicas of each candidate attain."""
    short = [row for row in rows if row.status == "too few"]
    looks = [drawn(_of(sizes, row), objectives, row.at_least, 1) for row in short]
    results, trials = drive_all(looks, workers, report)
    found = {id(row): one for row, one in zip(short, results, strict=True)}
    return [replace(row, sized=found.get(id(row), row.sized)) for row in rows], trials


def least_slack(found: Sequence[Sequence[Attained]]) -> dict[str, float]:
    """Return by metric the least distance to the bound over all peaks, as a share of it."""
    slack: dict[str, float] = {}
    for one in (one for peak in found for one in peak):
        if one.slack is not None:
            metric = one.objective.metric
            slack[metric] = min(slack.get(metric, one.slack), one.slack)
    return slack
