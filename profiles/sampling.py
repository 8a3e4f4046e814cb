"""Steps to fit an estimator on: lengths and batch sizes at powers of two, as BROS Sec. IV-A samples
them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from twinserve.profiles.composition import StepComposition

MAX_PREFILL_TOKENS = 16384
MAX_REQUESTS = 256
MAX_CONTEXT_TOKENS = 131072
# Of a batch whose requests share a prefix, which is in memory once.
MAX_SHARED_TOKENS = 1 << 20


def powers_of_two(last: int, first: int = 1) -> list[int]:
    """first, 2 first, 4 first, ... up to `last`."""
    found = []
    while first <= last:
        found.append(first)
        first *= 2
    return found


def prefill_steps() -> Iterator[StepComposition]:
    """Batches of equal fresh prompts of 16 tokens and more, MAX_PREFILL_TOKENS together at most."""
    for count in powers_of_two(16):
        for length in powers_of_two(MAX_PREFILL_TOKENS // count, first=16):
            yield StepComposition(
                prefill_new=np.full(count, length, np.int64),
                prefill_resident=np.zeros(count, np.int64),
            )


def decode_steps(
    skewed: bool = False, longest: int = MAX_CONTEXT_TOKENS, together: int = MAX_CONTEXT_TOKENS
) -> Iterator[StepComposition]:
    """Decode batches of equal contexts, of 16 tokens and more; at most `longest` resident tokens of
    a request, `together` of all.

    `skewed` adds, for each, a batch in which one request holds half of the tokens, or `longest`.
    """
    for count in powers_of_two(MAX_REQUESTS):
        for length in powers_of_two(min(longest, together // count), first=16):
            yield StepComposition(count, count * length, length)
            if skewed and count > 2:
                yield StepComposition(count, count * length, min(longest, count * length // 2))


def mixed_steps(
    decodes: Iterable[StepComposition], longest: int = MAX_CONTEXT_TOKENS
) -> Iterator[StepComposition]:
    """Yield each of the batches with a chunk of 64 to 4,096 tokens: a fresh one, and one that ends
    a prompt of MAX_PREFILL_TOKENS tokens, or `longest`."""
    for work in decodes:
        for length in powers_of_two(4096, first=64):
            for resident in (0, max(0, min(longest, MAX_PREFILL_TOKENS) - length)):
                yield replace(
                    work,
                    prefill_new=np.array([length], np.int64),
                    prefill_resident=np.array([resident], np.int64),
                )


def relative_nnls(features: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative coefficients (float64[k]) for features (float64[m, k]), and their mean absolute
    relative error.

    Rows are divided by the measured time, so that a 10 ms step counts as much as a 10 s one. With
    absolute errors the largest samples would decide alone.
    """
    from scipy.optimize import nnls  # half a second to import, and few runs fit anything

    scaled = features / seconds[:, None]
    # Columns differ by ten orders of magnitude (tokens squared against ones): equal norms keep nnls
    # accurate.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0.0] = 1.0
    solution, _ = nnls(scaled / norms, np.ones(len(seconds)))
    coefficients = solution / norms
    return coefficients, float(np.abs(scaled @ coefficients - 1.0).mean())
