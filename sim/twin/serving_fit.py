"""Fit a few terms of step times to a server's measurements, until the simulated requests have the
measured latencies.

The terms are factors on decodes and on what prompts add; seconds of the host, for a step and for a
request in it; and seconds of the front end for a request. They are fitted to means over blocks of
requests, by least squares of log(simulated / measured). A term that does not help on blocks outside
the fit stays as in the profile: serving data mix all terms and separate few of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit  # scipy.stats takes a second

from twinserve.profiles.host import HostTime
from twinserve.profiles.profile import Profile
from twinserve.sim.twin.served import Served

BLOCKS = 4  # of a file, one after another; the fewest that a spread can be told from
GAPS = (25, 50, 90)  # percentiles
LEAST = 5  # requests of a block whose mean counts
NEEDED = 1.02  # a term is needed where the error on unseen blocks grows beyond this without it
WORTH = 0.95  # of that error as the profile was, which a fit must get below
FARTHEST = 6.9  # factors from 1/1000 to 1000, as of profiles
SMALLEST = 1e-3  # singular value, of the largest, along which terms are told apart
# Of a difference to each side. Simulations jump where a request joins another batch, by more than
# a small change of step times moves a mean.
STEP = 0.2
# Of a step to what fits without a block. Terms that are hardly told apart make whole steps long,
# and means do not follow a straight line so far.
PARTS = (1.0, 0.5, 0.25, 0.1)
# Between the ends of a term's interval: if they are further apart the data tell that the term is
# needed beside the others, and not how large it is.
SURE = 3.0
INSIDE = 0.02  # the bounds, where a fit starts
MOST_TRIES = 30  # steps of one fit


@dataclass(frozen=True)
class Terms:
    """decode, prefill   factors, as of `Profile.scaled`
    host_step_s, host_request_s   seconds that a step takes longer, and for each request in it
    request_s   seconds between a client's sending and the engine's queue
    """

    decode: float = 1.0
    prefill: float = 1.0
    host_step_s: float = 0.0
    host_request_s: float = 0.0
    request_s: float = 0.0

    def on(self, profile: Profile) -> Profile:
        """`profile` with these step times."""
        added = profile.with_host_time(HostTime(self.host_step_s, self.host_request_s))
        return added.scaled(decode=self.decode, prefill=self.prefill)


AS_IT_IS = Terms()
FACTORS = ("decode", "prefill")
NAMES = tuple(term.name for term in fields(Terms))


@dataclass(frozen=True)
class Load:
    """One measured file. simulate: its requests with these terms."""

    measured: Served
    simulate: Callable[[Terms], Served]


@dataclass(frozen=True)
class Fitted:
    """terms       all of them; those that are not `told` are the profile's
    told        term -> lowest and highest value of a 95 % interval (jackknife over blocks)
    before, after   mean absolute relative error of the blocks' means: with the original profile;
                with terms that were fitted without the block in question
    simulations   the number needed"""

    terms: Terms
    told: dict[str, tuple[float, float]]
    before: float
    after: float
    simulations: int

    @property
    def worth(self) -> bool:
        return bool(self.told) and self.after < WORTH * self.before


class TooFewRequestsError(ValueError):
    """The measurements have not enough requests for blocks."""


def fit(
    loads: Sequence[Load], names: Sequence[str], report: Callable[[int], None] = lambda n: None
) -> Fitted:
    """names: terms to fit. report: called with simulations so far. Raises TooFewRequestsError."""
    problem = _Problem(loads, report)
    before = float(np.abs(np.expm1(problem.residuals(AS_IT_IS))).mean())
    active = tuple(names)
    best = problem.held_out(active, problem.solve(active, problem.start(active)))
    while active:
        weakest = min(active, key=best.certainty)
        fewer = tuple(name for name in active if name != weakest)
        other = problem.held_out(fewer, problem.solve(fewer, best.terms))
        if other.error > NEEDED * best.error:
            break
        active, best = fewer, other
    told = {name: best.interval(name) for name in active}
    return Fitted(best.terms, told, before, best.error, len(problem.known))


@dataclass(frozen=True)
class _HeldOut:
    """terms: fitted to all blocks; without: to all but each group of them, if means were linear in
    them; error: on that group, of terms that were chosen without it. idle: terms that move no
    latency."""

    terms: Terms
    without: list[Terms]
    error: float
    idle: frozenset[str]

    def spread(self, name: str) -> tuple[float, float]:
        """A term's value and its standard error (jackknife); of a factor, those of its log."""
        values = np.array([_plain(name, getattr(terms, name)) for terms in self.without])
        n = len(values)
        error = float(np.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum()))
        return _plain(name, getattr(self.terms, name)), error

    def certainty(self, name: str) -> float:
        """How many standard errors it is away from what changes nothing."""
        value, error = self.spread(name)
        if name in self.idle or not value:
            return 0.0
        return abs(value) / error if error else np.inf

    def interval(self, name: str) -> tuple[float, float]:
        value, error = self.spread(name)
        half = error * float(stdtrit(len(self.without) - 1, 0.975))
        if name in FACTORS:
            return float(np.exp(value - half)), float(np.exp(value + half))
        return max(value - half, 0.0), value + half


def _plain(name: str, value: float) -> float:
    """On a scale where 0 changes nothing."""
    return float(np.log(value)) if name in FACTORS else value


class _Problem:
    def __init__(self, loads: Sequence[Load], report: Callable[[int], None]) -> None:
        self.loads = loads
        self.known: dict[Terms, np.ndarray] = {}
        self._report = report
        self._measured = [_numbers(load.measured, load.measured) for load in loads]
        # of several files one is left out, of one file a block; gaps are of no block, and stay
        groups = [_groups(number if len(loads) > 1 else None) for number in range(len(loads))]
        measured = np.concatenate(self._measured)
        self._kept = ~np.isnan(measured) & (measured > 0)
        self._group = np.concatenate(groups)[self._kept]
        if len(np.unique(self._group[self._group >= 0])) < 2:
            raise TooFewRequestsError
        self._tpot_s = _median(loads, "tpot")
        self._ttft_s = _median(loads, "ttft")

    def residuals(self, terms: Terms) -> np.ndarray:
        """log(simulated / measured) of each mean that was measured."""
        if terms not in self.known:
            found = [_numbers(load.simulate(terms), load.measured) for load in self.loads]
            with np.errstate(divide="ignore", invalid="ignore"):
                off = np.log(np.concatenate(found) / np.concatenate(self._measured))
            self.known[terms] = np.nan_to_num(off[self._kept], posinf=0.0, neginf=0.0)
            self._report(len(self.known))
        return self.known[terms]

    # -- as numbers of order one -------------------------------------------------------------------
    def _unit(self, name: str) -> float:
        return {
            "host_step_s": self._tpot_s,
            "host_request_s": self._tpot_s / 8,
            "request_s": self._ttft_s,
        }.get(name, 1.0)

    def _vector(self, active: Sequence[str], terms: Terms) -> np.ndarray:
        return np.array([_plain(n, getattr(terms, n)) / self._unit(n) for n in active])

    def _terms(self, active: Sequence[str], x: np.ndarray) -> Terms:
        values = {
            name: float(np.exp(v)) if name in FACTORS else float(v) * self._unit(name)
            for name, v in zip(active, x, strict=True)
        }
        return replace(AS_IT_IS, **values)

    def start(self, active: Sequence[str]) -> Terms:
        """Return the nearest: the profile, its steps longer as tokens were, or with host time."""
        ratio = float(np.exp(-np.median(self.residuals(AS_IT_IS))))
        found = [AS_IT_IS, Terms(decode=ratio, prefill=ratio)]
        if "host_step_s" in active:
            found.append(Terms(prefill=ratio, host_step_s=0.7 * self._tpot_s))
        found = [self._terms(active, self._inside(active, self._vector(active, t))) for t in found]
        return min(found, key=lambda terms: float(np.abs(self.residuals(terms)).sum()))

    def _bounds(self, active: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        low = np.array([-FARTHEST if name in FACTORS else 0.0 for name in active])
        high = np.array([FARTHEST if name in FACTORS else 50.0 for name in active])
        return low, high

    def _inside(self, active: Sequence[str], x: np.ndarray) -> np.ndarray:
        """Strictly: a fit does not start on a bound."""
        low, high = self._bounds(active)
        return np.clip(x, low + INSIDE, high - INSIDE)

    def _slopes(self, active: Sequence[str], x: np.ndarray) -> np.ndarray:
        """float64[means, terms]: of the residuals, over wide steps to both sides."""
        low, high = self._bounds(active)
        columns = []
        for step in STEP * np.eye(len(x)):
            ends = [np.clip(x + sign * step, low, high) for sign in (1, -1)]
            above, below = (self.residuals(self._terms(active, end)) for end in ends)
            columns.append((above - below) / np.abs(ends[0] - ends[1]).sum())
        return np.stack(columns, axis=1)

    def solve(self, active: Sequence[str], start: Terms) -> Terms:
        """The terms of least squares over all blocks."""
        if not active:
            return AS_IT_IS
        found = least_squares(
            lambda x: self.residuals(self._terms(active, x)),
            self._inside(active, self._vector(active, start)),
            lambda x: self._slopes(active, x),
            self._bounds(active),
            loss="soft_l1",
            f_scale=0.1,
            xtol=1e-3,
            ftol=1e-3,
            max_nfev=MOST_TRIES,
        )
        return self._terms(active, found.x)

    def held_out(self, active: Sequence[str], terms: Terms) -> _HeldOut:
        """Without a group of blocks the terms are about one step of Gauss and Newton away; what the
        best part of that step does to the group is simulated."""
        x, off = self._vector(active, terms), self.residuals(terms)
        slopes = self._slopes(active, x) if active else np.zeros((len(off), 0))
        low, high = self._bounds(active)
        errors, without = [], []
        for group in np.unique(self._group[self._group >= 0]).tolist():
            seen = self._group != group
            step = np.linalg.lstsq(slopes[seen], off[seen], rcond=SMALLEST)[0]
            tried = [self._terms(active, np.clip(x - part * step, low, high)) for part in PARTS]
            without.append(tried[0])
            nearest = min(tried, key=lambda t: float((self.residuals(t)[seen] ** 2).sum()))
            errors.append(np.abs(np.expm1(self.residuals(nearest)[~seen])))
        idle = frozenset(n for n, column in zip(active, slopes.T, strict=True) if not column.any())
        return _HeldOut(terms, without, float(np.concatenate(errors).mean()), idle)


def blocks(served: Served, measured: Served) -> np.ndarray:
    """Return float64[BLOCKS, 5], seconds: means over requests in order of arrival, NaN of too few.
    The columns are TTFT of prompts up to the measured median and of longer ones; TPOT of the half
    with fewer requests at arrival, and of the other half; and E2E latency."""
    order = np.argsort(served.arrival_s, kind="stable")
    longer = served.prompt_tokens > np.median(measured.prompt_tokens)
    ttft, tpot = served.latencies["ttft"], served.latencies["tpot"]
    beside = _beside(served)
    busy = beside > np.median(beside)
    columns = [
        np.where(longer, np.nan, ttft),
        np.where(longer, ttft, np.nan),
        np.where(busy, np.nan, tpot),
        np.where(busy, tpot, np.nan),
        served.latencies["e2el"],
    ]
    return np.array(
        [[_mean(column[part]) for column in columns] for part in np.array_split(order, BLOCKS)]
    )


def _beside(served: Served) -> np.ndarray:
    """int64[n]: requests that came before it and had not ended."""
    ends = served.arrival_s + served.latencies["e2el"]
    came = np.searchsorted(np.sort(served.arrival_s), served.arrival_s)
    return came - np.searchsorted(np.sort(ends[~np.isnan(ends)]), served.arrival_s)


def _numbers(served: Served, measured: Served) -> np.ndarray:
    """Those of `blocks`, and percentiles of the gaps between tokens: steps of decodes alone are
    short, those that compute prompts long."""
    gaps, counts = served.values("itl")
    found = np.full(len(GAPS), np.nan)
    if counts.sum():
        at = np.searchsorted(np.cumsum(counts), np.array(GAPS) / 100 * counts.sum())
        found = gaps[np.minimum(at, len(gaps) - 1)]
    return np.concatenate([blocks(served, measured).ravel(), found])


def _groups(number: int | None) -> np.ndarray:
    """Of each of `_numbers`: the file's number, or of one file the block's, and -1 of none."""
    if number is not None:
        return np.full(BLOCKS * 5 + len(GAPS), number)
    return np.concatenate([np.repeat(np.arange(BLOCKS), 5), np.full(len(GAPS), -1)])


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) >= LEAST else np.nan


def _median(loads: Sequence[Load], metric: str) -> float:
    values = np.concatenate([load.measured.latencies[metric] for load in loads])
    return float(np.nanmedian(values)) if not np.isnan(values).all() else 1.0


def shown(fitted: Fitted) -> list[str]:
    """What was found, a line a term, and what was not."""
    said = {
        "decode": ("decodes", "x {:.3g}", 1.0),
        "prefill": ("prompts", "x {:.3g}", 1.0),
        "host_step_s": ("host, a step", "{:.3g} ms", 1e3),
        "host_request_s": ("host, a request in it", "{:.3g} us", 1e6),
        "request_s": ("front end, a request", "{:.3g} ms", 1e3),
    }
    lines, values = [], asdict(fitted.terms)
    for name, (low, high) in fitted.told.items():
        what, form, unit = said[name]
        value, *ends = (form.format(v * unit) for v in (values[name], low, high))
        sure = low > 0 and high < SURE * low
        lines.append(
            f"{what:>22}  {value} "
            + (f"(95 %: {ends[0]} to {ends[1]})" if sure else "(needed; its own size is unknown)")
        )
    left = [said[name][0] for name in NAMES if name not in fitted.told]
    if left:
        lines.append(f"{'as in the profile':>22}  {', '.join(left)}: not needed, or not separable")
    lines.append(
        f"{'error':>22}  {fitted.after:.1%} over means of requests that the fit had not seen, "
        f"{fitted.before:.1%} with the profile as it was"
    )
    return lines
