"""Workloads stated in a line.

    stages:2x60/5x120/10x60      requests a second x seconds, one stage after another
    ramp:from=1,to=10,duration=600
    diurnal:low=1,high=6,period=86400,duration=86400    a sine, lowest at time 0
    bursts:base=2,peak=20,every=60,length=5,duration=600
    closed:concurrency=16,requests=200     so many at once; stagger=10: the first ones over 10 s

All take `lengths=sharegpt` (or lmsys), or `input=512,output=128` in tokens; `system=1024x8`:
prompts begin with one of 8 equally likely system prompts of 1,024 tokens; and `burstiness=1` of the
gaps, as in vLLM (not of `closed`).
"""

import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import numpy as np

from twinserve.traces.generators.synth import MAX_ROWS, SHAPES, paired
from twinserve.traces.prefix import blocks_needed, dense, offsets_of
from twinserve.traces.readers.columns import MAX_SECONDS
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload, WorkloadError


class Options:
    """The options of one workload. What a kind reads is marked as known; `done` refuses the rest.

    bare    option whose name may be left out: stages:2x60 is stages:rates=2x60

    Each getter raises WorkloadError for a value that cannot be.
    """

    def __init__(self, name: str, bare: str | None = None) -> None:
        self.name = name
        self.kind, _, text = name.partition(":")
        self.given: dict[str, str] = {}
        self.known: list[str] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            if not equals and bare is not None and bare not in self.given:
                key, equals, value = bare, "=", part
            key = key.strip().lstrip("-").replace("-", "_")
            if not equals or not value.strip():
                self.fail(f"'{part}' is no option: write option=value")
            if key in self.given:
                self.fail(f"{key} is given twice: keep one")
            self.given[key] = value.strip()

    def fail(self, problem: str) -> None:
        raise WorkloadError(f"trace '{self.name[:80]}': {problem}")

    def text(self, key: str, default: str | None = None) -> str | None:
        self.known.append(key)
        return self.given.get(key, default)

    def number(
        self, key: str, default: float | None, low: float = 0.0, *, above: bool = False
    ) -> float | None:
        """Return a number of at least `low`, or above it; `inf` only if the default is infinite."""
        text = self.text(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        endless = default is not None and math.isinf(default)
        fits = value > low if above else value >= low
        if not fits or not (math.isfinite(value) or (endless and value == math.inf)):
            than = "above" if above else "from"
            self.fail(f"{key}={text} is no number {than} {low:g}: change it")
        return value

    def needed(self, key: str, low: float = 0.0) -> float:
        value = self.number(key, None, low, above=True)
        if value is None:
            self.fail(f"{key} is missing: add {key}=NUMBER")
        assert value is not None
        return value

    def whole(self, key: str, default: int | None, low: int = 1) -> int | None:
        text = self.text(key)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < low:
            self.fail(f"{key}={text} is no whole number from {low}: change it")
        return int(text)

    def one_of(self, key: str, choices: Mapping | tuple, default: str) -> str:
        text = self.text(key, default)
        assert text is not None
        if text not in choices:
            self.fail(f"{key}={text} is unknown: choose from {', '.join(choices)}")
        return text

    def done(self) -> None:
        """Raises WorkloadError for an option that the kind does not know."""
        for key in self.given:
            if key not in self.known:
                near = get_close_matches(key, self.known, 1)
                hint = f"did you mean {near[0]}" if near else f"there is {', '.join(self.known)}"
                self.fail(f"{key} is no option of {self.kind}: {hint}")


BLOCK_TOKENS = 16  # the KV block of vLLM


def with_shared_text(
    prompt_tokens: np.ndarray,
    group: np.ndarray,
    shared_tokens: np.ndarray,
    block_tokens: int = BLOCK_TOKENS,
) -> PrefixBlocks:
    """Blocks of prompts of which row i begins with `shared_tokens[i]` tokens of text `group[i]`
    (int64[rows] each; rows of one group may share more or less of it). A block with both shared and
    own text is the row's own.
    """
    counts = blocks_needed(prompt_tokens, block_tokens)
    offsets = offsets_of(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(offsets[-1]) - offsets[row]
    common = place < (np.minimum(shared_tokens, prompt_tokens) // block_tokens)[row]
    most = int(counts.max(initial=0)) + 1
    keys = np.where(common, group[row] * most + place, 0)
    own = int(keys.max(initial=0)) + 1
    keys = np.where(common, keys, own + np.arange(len(keys)))
    return PrefixBlocks(dense(keys), offsets, block_tokens)


STEPS_A_PERIOD = 288  # straight lines that stand for a sine: five minutes of a day
# The rate of requests: moments (seconds) and the rate at each, straight lines between them.
Rate = tuple[np.ndarray, np.ndarray]


def stated(name: str, seed: int = 0) -> Workload:
    """Return the workload of a name: equal for equal name and seed. Raises WorkloadError."""
    options = Options(name, "rates" if name.startswith("stages:") else None)
    limit = None
    gaps, sizes, groups = (
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x57, k))) for k in range(3)
    )
    marks: tuple[float, ...] = ()
    if options.kind == CLOSED:
        at, limit = _closed(options)
    else:
        rate = RATES[options.kind](options)
        at = arrivals(options, rate, gaps)
        if options.kind == "stages":
            marks = (*map(float, np.round(rate[0][::2], 9)), float(rate[0][-1]))
    prompt, output = _lengths(options, len(at), sizes)
    prompt, prefix = _system(options, prompt, groups)
    options.done()
    made = f"{options.kind}({name}, seed={seed})"
    return Workload.build(
        at,
        prompt,
        output,
        prefix=prefix,
        concurrency=limit,
        stages_s=marks,
        provenance=Provenance(name, transforms=(made,)),
    )


def arrivals(options: Options, rate: Rate, rng: np.random.Generator) -> np.ndarray:
    """float64[n], seconds: a process with that rate. Its gaps, counted in requests that the rate
    lets expect, are gamma with mean 1 and shape `burstiness`; 1: Poisson."""
    burstiness = options.number("burstiness", 1.0, above=True)
    times, rates = rate
    if times[-1] > MAX_SECONDS:
        options.fail(f"ends after {MAX_SECONDS:.3g} s: shorten it")
    expected = np.concatenate([[0.0], np.cumsum(np.diff(times) * (rates[1:] + rates[:-1]) / 2)])
    total = float(expected[-1])
    if not 0 < total <= MAX_ROWS:
        options.fail(f"asks for {total:.6g} requests: change rates or times")
    most = math.ceil(total + 10 * math.sqrt(total / min(burstiness, 1.0)) + 20)
    counted = np.cumsum(rng.gamma(burstiness, 1 / burstiness, most))
    counted = counted[counted < total]
    if not len(counted):
        options.fail("no request arrives: raise rates or times")
    return _when(counted, times, rates, expected)


def _when(counted, times, rates, expected) -> np.ndarray:
    """Return when so many requests are expected: the inverse of the rate's integral."""
    piece = np.clip(np.searchsorted(expected, counted, side="right") - 1, 0, len(times) - 2)
    width = times[piece + 1] - times[piece]
    rest, first = counted - expected[piece], rates[piece]
    slope = (rates[piece + 1] - first) / width
    root = np.sqrt(np.maximum(first * first + 2 * slope * rest, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        into = 2 * rest / (first + root)  # of a constant rate: rest / rate
    return times[piece] + np.clip(np.nan_to_num(into), 0.0, width)


def _stages(options: Options) -> Rate:
    text = options.text("rates")
    if text is None:
        options.fail("has no stages: write stages:RATExSECONDS/RATExSECONDS")
    assert text is not None
    times, rates, now = [], [], 0.0
    for part in text.split("/"):
        rate, _, seconds = part.partition("x")
        try:
            r, s = float(rate), float(seconds)
        except ValueError:
            r = s = math.nan
        if not (0 <= r < math.inf and 0 < s < math.inf):
            options.fail(f"'{part}' is no stage: write RATExSECONDS, as 2x60/5x120")
        times += [now, now + s]
        rates += [r, r]
        now += s
    return _without_width(np.array(times), np.array(rates))


def _without_width(times: np.ndarray, rates: np.ndarray) -> Rate:
    """Jumps as lines too short to hold a request, so that time always goes on."""
    jump = np.flatnonzero(np.diff(times) == 0) + 1
    times = times.copy()
    times[jump] = np.nextafter(times[jump], np.inf)
    return times, rates


def _ramp(options: Options) -> Rate:
    first, last = options.number("from", 0.0), options.needed("to")
    return np.array([0.0, options.needed("duration")]), np.array([first, last])


def _diurnal(options: Options) -> Rate:
    low, high = options.number("low", 0.0), options.needed("high")
    period = options.number("period", 86_400.0, above=True)
    duration = options.number("duration", period, above=True)
    if duration / period > 1000:
        options.fail("has over 1,000 periods: lengthen the period")
    steps = math.ceil(duration / period * STEPS_A_PERIOD)
    times = np.linspace(0.0, duration, steps + 1)
    return times, low + (high - low) * (1 - np.cos(2 * np.pi * times / period)) / 2


def _bursts(options: Options) -> Rate:
    base, peak = options.number("base", 0.0), options.needed("peak")
    every, length = options.needed("every"), options.needed("length")
    duration = options.needed("duration")
    if length >= every:
        options.fail(f"length={length:g} is not below every={every:g}: shorten the bursts")
    if duration / every > 1_000_000:
        options.fail("has over a million bursts: shorten it")
    starts = np.arange(0.0, duration, every)
    # a burst ends each period, so that the first one meets a server at work
    times = np.stack([starts, starts + every - length, starts + every - length, starts + every])
    rates = np.tile(np.array([[base], [base], [peak], [peak]]), (1, len(starts)))
    times = np.minimum(times.T.ravel(), duration)
    keep = np.concatenate([[True], (np.diff(times) > 0) | (times[1:] < duration)])
    return _without_width(times[keep], rates.T.ravel()[keep])


def _closed(options: Options) -> tuple[np.ndarray, int]:
    """Return arrivals and the limit: all requests wait from time 0 on. With stagger the first ones
    come one by one, and the others wait for them."""
    limit, n = options.whole("concurrency", None), options.whole("requests", None)
    if limit is None or n is None:
        options.fail("concurrency and requests are needed: add concurrency=16,requests=200")
    assert limit is not None and n is not None
    stagger = options.number("stagger", 0.0)
    return np.minimum(np.arange(n), limit - 1) * (stagger / limit), limit


CLOSED = "closed"
RATES: dict[str, Callable[[Options], Rate]] = {
    "stages": _stages,
    "ramp": _ramp,
    "diurnal": _diurnal,
    "bursts": _bursts,
}
KINDS = (*RATES, CLOSED)


def _lengths(options: Options, n: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output tokens of n requests."""
    prompt, output = options.whole("input", None), options.whole("output", None)
    if (prompt is None) != (output is None):
        options.fail("input and output belong together: give both")
    if prompt is not None and "lengths" in options.given:
        options.fail("lengths and input both say how long prompts are: drop one")
    shape = options.one_of("lengths", SHAPES, "sharegpt")
    if prompt is not None:
        return np.full(n, prompt), np.full(n, output)
    return paired(SHAPES[shape], n, rng)


def _system(options: Options, prompt: np.ndarray, rng) -> tuple[np.ndarray, PrefixBlocks | None]:
    """Prompts with a system prompt in front, and what they share."""
    text = options.text("system")
    if text is None:
        return prompt, None
    said = re.fullmatch(r"(?a)(\d+)(?:x(\d+))?", text)
    if said and max(map(len, said.groups("1"))) > 7:
        options.fail(f"system={text} is too much: lower it")
    tokens, groups = map(int, said.groups("1")) if said else (0, 0)
    if not tokens or not groups:
        options.fail(f"system={text} is not understood: write TOKENSxGROUPS, as 1024x8")
    group = rng.integers(0, groups, len(prompt))
    longer = prompt + tokens
    return longer, with_shared_text(longer, group, np.full(len(prompt), tokens))
