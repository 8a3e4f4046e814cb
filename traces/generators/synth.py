"""Workloads made from distributions: Poisson arrivals with lengths of a named shape."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from twinserve.traces.readers.columns import MAX_SECONDS, MAX_TOKENS
from twinserve.traces.workload import Provenance, Workload, WorkloadError

MAX_ROWS = 50_000_000
DEFAULT_DURATION_S = 600.0


@dataclass(frozen=True)
class LengthShape:
    """A log-normal cut to [low, high] tokens whose mean and standard deviation after the cut are as
    given.
    """

    mean: float
    std: float
    low: int = 1
    high: int = 2048


# Means and standard deviations of the data sets as the BROS paper gives them (Table II): prompt,
# output. 2,048 tokens is the context of the models that both were collected for.
SHAPES = {
    "sharegpt": (LengthShape(222.76, 256.36), LengthShape(234.51, 268.50)),
    "lmsys": (LengthShape(90.50, 148.52), LengthShape(237.04, 228.21)),
}
NAMES = ("poisson", *SHAPES)
# mu and sigma of these shapes, as `_solved` has them: loading what solves takes as long as a run
KNOWN = {
    SHAPES["sharegpt"][0]: (4.945261593887278, 0.9709829037308496),
    SHAPES["sharegpt"][1]: (4.996170081724962, 0.9732426946144962),
    SHAPES["lmsys"][0]: (3.799275916610951, 1.194233170963107),
    SHAPES["lmsys"][1]: (5.126607001684377, 0.8307050405678074),
}


def _moments(mu: float, sigma: float, low: float, high: float) -> tuple[float, float]:
    """Mean and standard deviation of exp(N(mu, sigma)) clipped to [low, high]."""
    cdf = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    raw = []
    for k in (1, 2):
        inside = cdf(b - k * sigma) - cdf(a - k * sigma)
        inside *= math.exp(k * mu + 0.5 * (k * sigma) ** 2)
        raw.append(low**k * cdf(a) + inside + high**k * cdf(-b))
    return raw[0], math.sqrt(max(raw[1] - raw[0] ** 2, 0.0))


def parameters(shape: LengthShape) -> tuple[float, float]:
    """mu and sigma of the log-normal whose clipped mean and deviation are the shape's."""
    return KNOWN.get(shape) or _solved(shape)


@cache
def _solved(shape: LengthShape) -> tuple[float, float]:
    from scipy.optimize import fsolve

    if shape.std**2 >= (shape.mean - shape.low) * (shape.high - shape.mean):
        raise WorkloadError(f"nothing within {shape.low} .. {shape.high} has the spread of {shape}")
    spread = math.log(1 + (shape.std / shape.mean) ** 2)
    start = (math.log(shape.mean) - spread / 2, 0.5 * math.log(spread))

    def miss(x):
        mean, std = _moments(x[0], math.exp(x[1]), shape.low, shape.high)
        return mean / shape.mean - 1, std / shape.std - 1

    mu, log_sigma = fsolve(miss, start)
    if max(map(abs, miss((mu, log_sigma)))) > 1e-6:
        raise WorkloadError(f"no log-normal within {shape.low} .. {shape.high} fits {shape}")
    return float(mu), float(math.exp(log_sigma))


def is_synthetic(name: str) -> bool:
    return name in NAMES or name.startswith("fixed:")


def as_stages(name: str, rate: float, seconds: float) -> str:
    """Such lengths at a stated rate, as a workload stated in a line (`stated.py`)."""
    lengths = "lengths={}".format("sharegpt" if name == "poisson" else name)
    if name.startswith("fixed:"):
        lengths = "input={},output={}".format(*_fixed(name))
    return f"stages:{rate:g}x{seconds:g},{lengths}"


def _fixed(name: str) -> tuple[int, int]:
    parts = name.removeprefix("fixed:").split(",")
    if len(parts) == 2 and all(p.strip().isascii() and p.strip().isdigit() for p in parts):
        prompt, output = (int(p) if len(p) < 12 else MAX_TOKENS + 1 for p in parts)
        if 1 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS:
            return prompt, output
    raise WorkloadError(
        f"'{name}' is no length pair: write fixed:PROMPT,OUTPUT in tokens, each >= 1"
    )


def synth(
    lengths: str = "sharegpt",
    *,
    rate: float = 1.0,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Workload:
    """Poisson arrivals at `rate` requests/s with lengths `sharegpt`, `lmsys`, or
    `fixed:PROMPT,OUTPUT`.

    `count` requests, or those of `duration_s` seconds (600 if neither is given); with both,
    whichever ends first. `poisson` means the lengths of sharegpt. Same arguments, same workload.
    Raises WorkloadError.
    """
    if not is_synthetic(lengths):
        known = ", ".join((*SHAPES, "fixed:PROMPT,OUTPUT"))
        raise WorkloadError(f"unknown lengths '{lengths}': choose from {known}")
    if seed < 0:
        raise WorkloadError(f"seed {seed} is below 0: give a whole number from 0 up")
    for what, value in (("rate", rate), ("count", count), ("duration", duration_s)):
        if value is not None and not 0 < value < math.inf:
            raise WorkloadError(f"{what} {value} is not a finite number above 0")
    if count is None and duration_s is None:
        duration_s = DEFAULT_DURATION_S
    n = count if duration_s is None else _upper_count(rate, duration_s, count)
    if n > MAX_ROWS:
        many = f"{n:.6g} requests" if n < 1e300 else "so many requests"
        raise WorkloadError(f"{many} are more than {MAX_ROWS}: lower rate, count or duration")
    if n / rate > MAX_SECONDS and duration_s is None:
        raise WorkloadError(
            f"{n} requests at {rate:g}/s take {n / rate:.3g} s, and a trace ends before "
            f"{MAX_SECONDS:.3g} s: raise rate"
        )
    arrivals, sizes = (
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x5A, k))) for k in (0, 1)
    )
    with np.errstate(over="ignore"):  # a gap that no float holds is beyond any duration
        at = np.cumsum(arrivals.exponential(1 / rate, n))
    if duration_s is not None:
        at = at[at < duration_s]
    if not len(at):
        raise WorkloadError(f"no request arrives in {duration_s:g} s at {rate:g}/s: raise either")
    if lengths.startswith("fixed:"):
        prompt, output = (np.full(len(at), v) for v in _fixed(lengths))
    else:
        shapes = SHAPES["sharegpt" if lengths == "poisson" else lengths]
        prompt, output = paired(shapes, len(at), sizes)
    limits = [f"rate={rate:g}"]
    limits += [f"count={count}"] if count is not None else []
    limits += [f"duration={duration_s:g}s"] if duration_s is not None else []
    made = f"synth({lengths}, {', '.join(limits)}, seed={seed})"
    return Workload.build(at, prompt, output, provenance=Provenance(lengths, transforms=(made,)))


def _upper_count(rate: float, duration_s: float, count: int | None) -> int:
    """Arrivals that surely outlast the duration: the mean plus ten standard deviations."""
    mean = min(rate * duration_s, 2.0 * MAX_ROWS)
    enough = math.ceil(mean + 10 * math.sqrt(mean) + 20)
    return enough if count is None else min(count, enough)


def paired(shapes, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths of n requests; the first k of n are those of k."""
    normal = rng.standard_normal((n, 2))
    out = []
    for column, shape in zip(normal.T, shapes, strict=True):
        mu, sigma = parameters(shape)
        drawn = np.clip(np.exp(mu + sigma * column), shape.low, shape.high)
        out.append(np.rint(drawn).astype(np.int64))
    return out[0], out[1]
