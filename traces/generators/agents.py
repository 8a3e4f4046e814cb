"""Agents: sessions that call a model, wait for a tool, and call again with all that was said.

    agents:sessions=50,rate=0.5,turns=8,system=2000,input=300,output=150,tool=2.0

sessions   number of them; they start as a Poisson process at `rate` a second
turns      mean calls of a session, geometric, at least one; fixed=yes: the same for all
system     tokens of the instructions, the same text for all sessions; groups=4: of four kinds
input      mean new tokens before each call (the task, then tool results), geometric
output     mean tokens of an answer, geometric
tool       mean seconds of a tool between an answer and the next call, exponential

A call's prompt is the one before, its answer and the new tokens, so it shares all of that text.
These shapes are ours: no data of agents stands behind them.
"""

from __future__ import annotations

import numpy as np

from twinserve.traces.generators.options import Options
from twinserve.traces.generators.shared import BLOCK_TOKENS
from twinserve.traces.generators.synth import MAX_ROWS
from twinserve.traces.prefix import blocks_needed, dense, offsets_of, take
from twinserve.traces.readers.columns import MAX_TOKENS
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload


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
    """Blocks of rows by session and turn: instructions are shared by kind, all other full blocks
    within the session, and a last block that is not full is its row's own."""
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
