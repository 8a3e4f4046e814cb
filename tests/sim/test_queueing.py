"""The engine against queueing theory: artificial step times turn it into queues whose means are
known.

Means over independent seeds, theory inside their 99 % t-interval; and wrong formulas fall outside
it.
"""

from dataclasses import dataclass
from functools import cache
from math import factorial

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.sim.harness import simulate
from twinserve.policies.base import EngineLimits
from twinserve.profiles.composition import StepTimeModel
from twinserve.traces.workload import Workload

TOKEN_S = 1e-3
SEEDS = range(8)
TELLING = 0.4  # an interval wider than this share of its expectation would let anything pass


@dataclass(frozen=True)
class PerPromptToken(StepTimeModel):
    """A request's whole service is its prefill: one step, as long as its prompt."""

    def step_seconds(self, work) -> float:
        return float(work.prefill_new.sum()) * TOKEN_S

    def decode_run_seconds(self, n, context, context_max, steps) -> np.ndarray:
        return np.zeros(steps)


@dataclass(frozen=True)
class Constant(StepTimeModel):
    """Every step takes the same time, whoever is in it: seats are servers that do not disturb each
    other."""

    seconds: float

    def step_seconds(self, work) -> float:
        return self.seconds

    def decode_run_seconds(self, n, context, context_max, steps) -> np.ndarray:
        return np.full(steps, self.seconds)


@dataclass(frozen=True)
class PerRequest(StepTimeModel):
    """A step takes `seconds` a request in it: together they share one server equally."""

    seconds: float

    def step_seconds(self, work) -> float:
        return self.seconds * (work.decode_requests + len(work.prefill_new))

    def decode_run_seconds(self, n, context, context_max, steps) -> np.ndarray:
        return np.full(steps, self.seconds * n)


def run(model, arrival, prompt, output, seats):
    limits = EngineLimits(max_num_seqs=seats, max_num_batched_tokens=1 << 30, max_model_len=1 << 30)
    blocks = seats * (-(-int((prompt + output).max()) // 1024)) + seats
    workload = Workload.build(arrival, prompt, output)
    return simulate(
        workload, model=model, limits=limits, blocks=blocks, block_tokens=1024, caching=False,
        audit=False, estimator=False,
    )  # fmt: skip


def poisson(rng, rate, n):
    """Arrival times, seconds: a Poisson process in which n happened to arrive in n / rate seconds.

    Given the count, times are independent and uniform. Together with `spread` this takes most of
    the luck of a seed out: how much work came at all.
    """
    return np.sort(rng.uniform(0, n / rate, n))


def spread(rng, n, quantile):
    """n draws by inversion, one from each n-th of the distribution, in random order. quantile: (0,
    1) -> tokens."""
    return rng.permutation(quantile((np.arange(n) + rng.random(n)) / n)).astype(np.int64)


def geometric(mean):
    """Quantiles of the discretised exponential: 1, 2, ... with this mean."""
    return lambda u: np.ceil(np.log1p(-u) / np.log1p(-1 / mean)).clip(1)


def constant(value):
    return lambda u: np.full(len(u), value)


def two_point(low, high, share):
    return lambda u: np.where(u < 1 - share, low, high)


def settled(values, share=0.1):
    """Without the start, when the system was still empty."""
    return float(values[int(share * len(values)) :].mean())


def interval(samples) -> tuple[float, float]:
    from scipy import stats  # a second to import

    low, high = stats.t.interval(0.99, len(samples) - 1, np.mean(samples), stats.sem(samples))
    return float(low), float(high)


# -- M/G/1: one seat, first come first served ------------------------------------------------------
MEAN = 100  # tokens
SERVICES = {  # (quantiles, second moment in tokens^2)
    "deterministic": (constant(MEAN), MEAN**2),
    "exponential": (geometric(MEAN), (2 - 1 / MEAN) * MEAN**2),
    "two-point": (two_point(50, 550, 0.1), 0.1 * 550**2 + 0.9 * 50**2),
}
LOAD = 0.5


def pollaczek_khinchine(service: str) -> float:
    """Mean wait, seconds: rate E[S^2] / (2 (1 - rho))."""
    rate, second_moment = LOAD / (MEAN * TOKEN_S), SERVICES[service][1] * TOKEN_S**2
    return rate * second_moment / (2 * (1 - LOAD))


@cache
def one_seat_waits(service: str) -> list[float]:
    waits = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        n = 1000
        prompt = spread(rng, n, SERVICES[service][0])
        arrival = poisson(rng, LOAD / (MEAN * TOKEN_S), n)
        requests = run(PerPromptToken(), arrival, prompt, np.ones(n, int), seats=1).requests
        waits.append(settled(requests.first_scheduled_s - requests.arrival_s))
    return waits


@pytest.mark.slow
@pytest.mark.parametrize("service", mostly_nightly(SERVICES, "exponential"))
def test_one_seat_is_an_mg1_queue(service):
    low, high = interval(one_seat_waits(service))
    expected = pollaczek_khinchine(service)
    assert low <= expected <= high
    assert high - low < TELLING * expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "wrong"),
    mostly_nightly(
        [("deterministic", "exponential"), ("exponential", "two-point")],
        ("exponential", "two-point"),
    ),
)
def test_the_formula_of_another_service_distribution_falls_outside(service, wrong):
    low, high = interval(one_seat_waits(service))
    assert not low <= pollaczek_khinchine(wrong) <= high


# -- M/M/c: c seats, many short steps --------------------------------------------------------------
SEATS, RHO, SERVICE_S = 3, 0.6, 1.0


def erlang_c_wait() -> float:
    """Mean wait, seconds, of M/M/c with `SEATS` servers, load RHO a server, mean service
    SERVICE_S."""
    offered = SEATS * RHO
    last = offered**SEATS / factorial(SEATS) / (1 - RHO)
    busy = last / (sum(offered**k / factorial(k) for k in range(SEATS)) + last)
    return busy * SERVICE_S / (SEATS * (1 - RHO))


def seat_waits(steps_per_service: int, n: int, seeds: int) -> list[float]:
    """Waits with geometric numbers of tokens, `steps_per_service` on average, one step each."""
    waits = []
    for seed in range(seeds):
        rng = np.random.default_rng(100 + seed)
        output = spread(rng, n, geometric(steps_per_service))
        arrival = poisson(rng, SEATS * RHO / SERVICE_S, n)
        model = Constant(SERVICE_S / steps_per_service)
        requests = run(model, arrival, np.ones(n, int), output, SEATS).requests
        waits.append(settled(requests.first_scheduled_s - requests.arrival_s))
    return waits


@pytest.mark.nightly
def test_seats_are_an_mmc_queue_as_steps_shrink():
    fine, coarse = interval(seat_waits(100, 1000, 16)), interval(seat_waits(2, 600, 8))
    assert fine[0] <= erlang_c_wait() <= fine[1]
    assert fine[1] - fine[0] < TELLING * erlang_c_wait()
    # With steps of half a service time an arrival waits for the boundary: not that queue any more.
    assert coarse[0] > erlang_c_wait()


# -- processor sharing: a step costs its batch -----------------------------------------------------
def sharing_sojourns(quantile) -> list[float]:
    """Mean sojourn, seconds, for requests of 64 tokens on average that alone take 1 s."""
    sojourns = []
    for seed in SEEDS:
        rng = np.random.default_rng(200 + seed)
        n = 700
        output = spread(rng, n, quantile)
        arrival = poisson(rng, LOAD, n)
        requests = run(PerRequest(1 / 64), arrival, np.ones(n, int), output, seats=1024).requests
        sojourns.append(settled(requests.last_token_s - requests.arrival_s))
    return sojourns


REQUIREMENTS = {
    "deterministic": constant(64),
    "exponential": geometric(64),
    "two-point": two_point(16, 256, 0.2),
}


@pytest.mark.parametrize("requirement", mostly_nightly(REQUIREMENTS))
def test_equal_shares_are_processor_sharing_whatever_the_lengths(requirement):
    low, high = interval(sharing_sojourns(REQUIREMENTS[requirement]))
    shared = 1 / (1 - LOAD)
    assert low <= shared <= high
    assert high - low < TELLING * shared
    if requirement == "deterministic":  # first come first served would be this fast
        assert not low <= 1 + LOAD / (2 * (1 - LOAD)) <= high


# -- laws that hold on every path ------------------------------------------------------------------
@pytest.fixture(scope="module")
def busy_run():
    rng = np.random.default_rng(7)
    n = 600
    sim = run(
        PerRequest(1 / 64), poisson(rng, 1.0, n), rng.integers(1, 50, n),
        rng.geometric(1 / 40, n), seats=6,
    )  # fmt: skip
    return sim.requests, sim.steps


def test_littles_law(busy_run):
    """Requests in the system, from the step rows, against sojourns, from the request rows. A step
    row counts the requests that were there when it was planned; one that arrives during a step
    counts from the next on."""
    requests, steps = busy_run
    arrival, start, end = (
        requests.arrival_s.to_numpy(),
        steps.start_s.to_numpy(),
        steps.end_s.to_numpy(),
    )
    in_steps = float(((steps.running + steps.waiting) * (end - start)).sum())
    first_seen = start[np.searchsorted(start, arrival)]
    area = in_steps + float((first_seen - arrival).sum())
    span = end[-1]
    sojourn = (requests.last_token_s - requests.arrival_s).mean()
    rate = len(requests) / span
    assert area / span == pytest.approx(rate * sojourn, rel=1e-9)
    # arrivals during steps are not a rounding error
    assert in_steps / span < rate * sojourn * (1 - 1e-3)


def test_utilisation_law(busy_run):
    """Seats in use are arrival rate times time in a seat; the server is busy for as long as the
    work it was given."""
    requests, steps = busy_run
    seconds = (steps.end_s - steps.start_s).to_numpy()
    seated = (requests.last_token_s - requests.first_scheduled_s).to_numpy()
    assert float((steps.running * seconds).sum()) == pytest.approx(seated.sum(), rel=1e-9)
    # every output token is one step's share of 1/64 s
    assert seconds.sum() == pytest.approx(requests.output_tokens.sum() / 64, rel=1e-9)
    assert seconds.sum() < steps.end_s.iloc[-1]  # it was idle at times
