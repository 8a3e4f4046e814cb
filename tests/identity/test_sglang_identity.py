"""Our router `sglang` beside SGLang's own (sglang-router 0.3.2), which runs in a process of its own
and is asked over HTTP: pick for pick, both go on from the real one's.

A prompt's KV block of 16 tokens is 16 characters there that begin with one of their own. Where
several workers are equally good the real one may take any of them; how often is counted.
"""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.identity.originals import python_with
from tests.identity.sglang_router import real_router
from tests.sim.routing import Scene, prompt
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.fleet.routers.sglang import SglangCacheAware

BLOCKS = 20  # of a prompt


@dataclass
class Found:
    """picks; ours: those of the real router that ours finds best; alone: of these, those where
    nobody else was as good; by: why it went there."""

    picks: int = 0
    ours: int = 0
    alone: int = 0
    by_load: int = 0
    by_prefix: int = 0


@dataclass(frozen=True)
class Mix:
    """texts: shared texts; most: requests under way; slow: one worker answers so much less often;
    options: of both routers."""

    workers: int
    picks: int
    texts: int = 12
    most: int = 60
    slow: float = 1.0
    balance_abs: int = 64
    balance_rel: float = 1.5
    threshold: float = 0.3


def text_of(blocks: list[int]) -> str:
    return "".join(chr(0x10000 + block) + "x" * 15 for block in blocks)


def blocks_of(rng: np.random.Generator, mix: Mix, number: int) -> list[int]:
    """The first blocks of one of the shared texts, none to all, then blocks of its own."""
    shared = int(rng.integers(BLOCKS + 1))
    text = int(rng.integers(mix.texts))
    own = (mix.texts + number) * BLOCKS
    return [*range(text * BLOCKS, text * BLOCKS + shared), *range(own, own + BLOCKS - shared)]


async def compared(mix: Mix, ours: str | SglangCacheAware, seed: int) -> Found:
    python = python_with("sglang_router")
    rng = np.random.default_rng([seed, mix.workers])
    scene, found, here = Scene(ours, mix.workers, blocks=10**6), Found(), []
    options = {
        "balance_abs_threshold": mix.balance_abs,
        "balance_rel_threshold": mix.balance_rel,
        "cache_threshold": mix.threshold,
        "eviction_interval_secs": 3600,
    }
    async with real_router(python, mix.workers, **options) as real:
        for number in range(mix.picks):
            while here and (len(here) >= mix.most or rng.random() < 0.45):
                at = int(rng.integers(len(here)))
                request, sent = here[at]
                if sent.worker == 0 and len(here) < mix.most and rng.random() > mix.slow:
                    continue
                here.pop(at)
                await real.end(sent)
                scene.end(request, sent.worker)
            blocks = blocks_of(rng, mix, number)
            request = prompt(*blocks)
            best = scene.router.candidates(request, scene.view)
            sent = await real.send(text_of(blocks))
            note(found, scene, request, best, sent.worker)
            scene.view.in_flight[sent.worker] += 1  # both go on from the real one's pick
            scene.router.on_dispatched(request, sent.worker)
            here.append((request, sent))
    return found


def note(found: Found, scene: Scene, request, best: list[int], worker: int) -> None:
    found.picks += 1
    found.ours += worker in best
    found.alone += best == [worker]
    loads = scene.view.in_flight
    options = scene.router.options
    apart = max(loads) - min(loads) > options.balance_abs
    found.by_load += apart and max(loads) > options.balance_rel * min(loads)
    found.by_prefix += loads[best[0]] > min(loads)


def text(mix: Mix) -> str:
    return (
        f"sglang:cache_threshold={mix.threshold},balance_abs={mix.balance_abs},"
        f"balance_rel={mix.balance_rel}"
    )


def run(mix: Mix, seed: int = 0, ours: SglangCacheAware | None = None) -> Found:
    return asyncio.run(compared(mix, ours or text(mix), seed))


SMALL = Mix(workers=3, picks=600, balance_abs=6, most=40, slow=0.3)


@pytest.mark.slow
def test_every_one_of_4_000_picks_is_among_our_best():
    """With the default thresholds, with small ones that loads often pass, with two workers, and
    with a higher share of a prompt."""
    mixes = [
        Mix(4, 1_600, most=400, slow=0.05, texts=3),
        replace(SMALL, workers=8, picks=1_200),
        replace(SMALL, workers=2, picks=800),
        Mix(5, 400, threshold=0.5, balance_abs=10, slow=0.2),
    ]
    found = [run(mix) for mix in mixes]
    assert sum(each.picks for each in found) == 4_000
    assert all(each.ours == each.picks for each in found)
    assert all(each.alone > each.picks / 5 for each in found)
    assert all(each.by_prefix > each.picks / 20 for each in found)
    # how many requests are under way together is the machine's: 120 to more than 500 were seen
    assert sum(each.by_load for each in found) > 40


BREAKS = {
    "a threshold of 0.35": {"cache_threshold": 0.35},
    "balancing from 8 apart": {"balance_abs": 8},
    "balancing from twice as many": {"balance_rel": 2.0},
    "a tree that forgets": {"tree_tokens": 1_600},
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", BREAKS)
def test_a_difference_from_sglang_would_be_seen(change):
    right = parse_router(text(SMALL)).build()
    wrong = SglangCacheAware(right.options.model_copy(update=BREAKS[change]))
    found = run(SMALL, seed=1, ours=wrong)
    assert found.ours < found.picks
