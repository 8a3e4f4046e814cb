"""Workloads that are stated in a line, KIND:option=value,...: which kinds there are.

Agents: sessions that call a model, wait for a tool, and call again with all that was said.

    agents:sessions=50,rate=0.5,turns=8,system=2000,input=300,output=150,tool=2.0

sessions   number of them; they start as a Poisson process at `rate` a second
turns      mean calls of a session, geometric, at least one; fixed=yes: the same for all
system     tokens of the instructions, the same text for all sessions; groups=4: of four kinds
input      mean new tokens before each call (the task, then tool results), geometric
output     mean tokens of an answer, geometric
tool       mean seconds of a tool between an answer and the next call, exponential

A call's prompt is the one before, its answer and the new tokens, so it shares all of that text.
These shapes are ours: no data of agents stands behind them.

The load of `vllm bench serve`, drawn as vLLM draws it: vllm:request_rate=4,random_input_len=512.

Options have the names of its flags, with their defaults; --seed is the seed of the workload.

    num_prompts=1000  request_rate=inf  burstiness=1  max_concurrency
    ramp_up_strategy=linear|exponential  ramp_up_start_rps  ramp_up_end_rps
    dataset_name=random             random_input_len=1024  random_output_len=128
                                    random_range_ratio=0   random_prefix_len=0
    dataset_name=prefix_repetition  prefix_repetition_prefix_len=256  ..._suffix_len=256
                                    ..._num_prefixes=10  ..._output_len=128
    special_tokens=0   tokens that the tokenizer puts around a prompt (vLLM draws fewer by these)

Source: `get_request` of vllm/benchmarks/serve.py, RandomDataset, PrefixRepetitionRandomDataset and
get_sampling_params of vllm/benchmarks/datasets, vLLM 0.32.0. Arrivals and lengths are the same
draws from the same generators. Not the same: texts, what re-tokenising them changes of a length
(vLLM says how many tokens that is), and send times of a client that is late.
"""

import math
import random
from collections.abc import Callable

import numpy as np

from twinserve.traces.generators.stated import BLOCK_TOKENS, Options, stated, with_shared_text
from twinserve.traces.generators.stated import KINDS as STATED
from twinserve.traces.generators.synth import MAX_ROWS
from twinserve.traces.prefix import blocks_needed, dense, offsets_of, take
from twinserve.traces.readers.columns import MAX_TOKENS
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload, WorkloadError


def agents(name: str, seed: int = 0) -> Workload:
    """The workload of a name that begins with `agents:`. Raises WorkloadError."""
    options = Options(name)
    sessions, kinds = options.whole("sessions", 50), options.whole("groups", 1)
    system = options.whole("system", 1000, 0)
    assert sessions is not None and kinds is not None and system is not None
    rate = options.number("rate", 1.0, above=True)
    means = {
        key: options.number(key, default, 1.0)
        for key, default in (("turns", 6.0), ("input", 300.0), ("output", 150.0))
    }
    tool = options.number("tool", 2.0)
    fixed = options.one_of("fixed", ("yes", "no"), "no") == "yes"
    options.done()
    if sessions * means["turns"] > MAX_ROWS:
        options.fail("asks for too many calls: lower sessions or turns")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0xA6,)))
    starts = np.cumsum(rng.exponential(1 / rate, sessions))
    turns = _geometric(rng, means["turns"], sessions)
    if fixed:
        turns = np.full(sessions, round(means["turns"]))
    group = np.repeat(np.arange(sessions), turns)
    stage = np.arange(len(group)) - np.repeat(np.cumsum(turns) - turns, turns)
    added, output = (_geometric(rng, means[key], len(group)) for key in ("input", "output"))
    kind = rng.integers(0, kinds, sessions)[group]
    delay = np.where(stage > 0, rng.exponential(tool, len(group)) if tool else 0.0, 0.0)
    prompt = system + _grown(added, output, stage)
    if prompt.max() > MAX_TOKENS:
        options.fail("prompts grow beyond all bounds: lower turns, input or output")
    arrival = np.where(stage == 0, starts[group], np.nan)
    order = np.argsort(arrival, kind="stable")
    shared = _blocks(prompt, kind, group, system)
    return Workload.build(
        arrival[order],
        prompt[order],
        output[order],
        group=group[order],
        stage=stage[order],
        delay_s=delay[order],
        group_names=[f"agent{i}" for i in range(sessions)],
        prefix=take(shared, order),
        provenance=Provenance(name, transforms=(f"agents({name}, seed={seed})",)),
    )


def _geometric(rng: np.random.Generator, mean: float, n: int) -> np.ndarray:
    return rng.geometric(1 / mean, n)


def _grown(added: np.ndarray, output: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """int64[rows]: what was said in the session up to each call: all new tokens, its own too, and
    all answers before it. Rows stand by session and turn."""
    said = np.cumsum(added + output)
    first = np.flatnonzero(stage == 0)
    before = (said - added - output)[first]
    return said - output - np.repeat(before, np.diff(np.append(first, len(stage))))


def _blocks(prompt: np.ndarray, kind: np.ndarray, group: np.ndarray, system: int) -> PrefixBlocks:
    """Return blocks of rows by session and turn. Instructions are shared by kind, all other full
    blocks within the session, and a partial last block is the row's own."""
    counts = blocks_needed(prompt, BLOCK_TOKENS)
    offsets = offsets_of(counts)
    row = np.repeat(np.arange(len(prompt)), counts)
    place = np.arange(offsets[-1]) - offsets[row]
    most = int(counts.max()) + 1
    common = place < system // BLOCK_TOKENS
    full = place < (prompt // BLOCK_TOKENS)[row]
    kinds = int(kind.max()) + 1
    keys = np.where(common, kind[row], kinds + group[row]) * most + place
    own = int(keys.max()) + 1
    return PrefixBlocks(
        dense(np.where(full | common, keys, own + np.arange(len(keys)))), offsets, BLOCK_TOKENS
    )


DATASETS = ("random", "prefix_repetition")
RAMPS = ("none", "linear", "exponential")
Lengths = tuple[np.ndarray, np.ndarray, PrefixBlocks | None]


def vllm_random(name: str, seed: int = 0) -> Workload:
    """The workload of a name that begins with `vllm:`. Raises WorkloadError."""
    options = Options(name)
    n = options.whole("num_prompts", 1000)
    assert n is not None
    dataset = options.one_of("dataset_name", DATASETS, "random")
    prompt, output, prefix = _DATASETS[dataset](options, n, seed)
    arrival = arrivals(options, len(prompt), seed)
    limit = options.whole("max_concurrency", None)
    options.done()
    made = Provenance(name, transforms=(f"vllm-bench-serve({name}, seed={seed})",))
    return Workload.build(
        arrival, prompt, output, prefix=prefix, concurrency=limit, provenance=made
    )


def arrivals(options: Options, n: int, seed: int) -> np.ndarray:
    """float64[n]: seconds, by vLLM's `get_request` after np.random.seed(seed)."""
    burstiness = options.number("burstiness", math.inf, above=True)
    if "burstiness" not in options.given:
        burstiness = 1.0
    assert burstiness is not None
    ramp = options.one_of("ramp_up_strategy", RAMPS, "none")
    rates = _rates(options, ramp, n)
    if np.isinf(rates).all():
        return np.zeros(n)
    if math.isinf(burstiness):
        gaps = 1.0 / rates
    else:
        gaps = np.random.RandomState(seed).gamma(burstiness, 1.0 / (rates * burstiness))
    at = np.cumsum(gaps)
    # At a fixed rate vLLM stretches the arrivals so that the last one comes at n / rate.
    return at * (n / rates[0] / at[-1]) if ramp == "none" else at


def _rates(options: Options, ramp: str, n: int) -> np.ndarray:
    """float64[n]: the rate before each request."""
    rate = options.number("request_rate", math.inf, above=True)
    ends = [options.whole(f"ramp_up_{end}_rps", None, 0) for end in ("start", "end")]
    if ramp == "none":
        if ends != [None, None]:
            options.fail("ramp_up_start_rps and ramp_up_end_rps are for ramp_up_strategy: add it")
        return np.full(n, rate)
    first, last = ends
    if first is None or last is None or first > last:
        options.fail("a ramp goes up from ramp_up_start_rps to ramp_up_end_rps: give both")
    assert first is not None and last is not None
    if first == 0:
        options.fail("vLLM refuses a rate of 0 at the first request: raise ramp_up_start_rps")
    if "request_rate" in options.given:
        options.fail("request_rate and a ramp both set the rate: drop one")
    progress = np.arange(n) / max(n - 1, 1)
    if ramp == "linear":
        return first + (last - first) * progress
    return first * (last / first) ** progress


def _random(options: Options, n: int, seed: int) -> Lengths:
    """RandomDataset: lengths uniform around the given ones; all prompts share one prefix."""
    wanted = options.whole("random_input_len", 1024)
    tokens = options.whole("random_output_len", 128)
    prefix_len = options.whole("random_prefix_len", 0, 0)
    special = options.whole("special_tokens", 0, 0)
    ratio = options.number("random_range_ratio", 0.0)
    assert None not in (wanted, tokens, prefix_len, special, ratio)
    if ratio >= 1:
        options.fail(f"random_range_ratio={ratio:g} is not below 1: lower it")
    real = max(0, wanted - special)
    low, high = math.floor(real * (1 - ratio)), math.ceil(real * (1 + ratio))
    if prefix_len + low < 1:
        options.fail("the shortest prompt would have no token: raise random_input_len")
    least, most = max(math.floor(tokens * (1 - ratio)), 1), max(math.ceil(tokens * (1 + ratio)), 1)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(low, high + 1, size=n) + prefix_len + special
    output = rng.integers(least, most + 1, size=n)
    if not prefix_len:
        return prompt, output, None
    shared = np.full(n, prefix_len)
    return prompt, output, with_shared_text(prompt, np.zeros(n, np.int64), shared)


def _prefix_repetition(options: Options, n: int, seed: int) -> Lengths:
    """PrefixRepetitionRandomDataset: prefixes in equal numbers, the requests then shuffled."""
    names = {"prefix_len": 256, "suffix_len": 256, "num_prefixes": 10, "output_len": 128}
    own = {key: options.whole(f"prefix_repetition_{key}", value) for key, value in names.items()}
    prefix_len, suffix_len, prefixes, tokens = own.values()
    assert None not in (prefix_len, suffix_len, prefixes, tokens)
    each = n // prefixes
    if each == 0:
        options.fail(f"num_prompts={n} is below the {prefixes} prefixes: raise it")
    group = [prefix for prefix in range(prefixes) for _ in range(each)]
    random.Random(seed).shuffle(group)
    rows = len(group)
    prompt = np.full(rows, prefix_len + suffix_len)
    shared = with_shared_text(prompt, np.array(group), np.full(rows, prefix_len))
    return prompt, np.full(rows, tokens), shared


_DATASETS = {"random": _random, "prefix_repetition": _prefix_repetition}


KINDS: dict[str, Callable[[str, int], Workload]] = {
    "vllm": vllm_random,
    **dict.fromkeys(STATED, stated),
    "agents": agents,
}
DESCRIPTIONS = {
    "vllm:request_rate=4,...": "the random load of vllm bench serve, with its options and draws",
    "stages:2x60/5x120,...": "requests a second x seconds, one stage after another",
    "ramp:from=1,to=10,duration=600,...": "a rate that grows, or falls",
    "diurnal:low=1,high=6,...": "a rate that goes up and down with the day",
    "bursts:base=2,peak=20,every=60,length=5,duration=600,...": "a rate with bursts",
    "closed:concurrency=16,requests=200,...": "a fixed number of requests at once",
    "agents:sessions=50,rate=0.5,...": "sessions that wait for tools between calls",
}


def is_in_a_line(name: str) -> bool:
    return name.partition(":")[0] in KINDS and ":" in name


def in_a_line(name: str, seed: int = 0) -> Workload:
    """Return the workload of such a name. Raises WorkloadError."""
    if seed < 0 or seed >= 2**32:
        raise WorkloadError(f"seed {seed} is not within 0 .. 4294967295: change it")
    return KINDS[name.partition(":")[0]](name, seed)
