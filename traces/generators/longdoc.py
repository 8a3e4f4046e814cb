"""Offline pools of questions on long shared documents, submitted at once: Echo's offline load.

Prompts and shares are those that the Echo paper quotes (Table 1, from Preble); the number of
LooGLE's documents is that of its short-dependency set (105 for 1,951 questions). Everything else
(spread of lengths, questions per document of the other sets, output lengths) is in neither paper
and ours, so it is an argument.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from twinserve.traces.generators.synth import LengthShape, parameters
from twinserve.traces.prefix import offsets_of
from twinserve.traces.ranges import PrefixRanges
from twinserve.traces.workload import BEST_EFFORT, Provenance, Workload, WorkloadError

ORDERS = ("shuffled", "by-document")


@dataclass(frozen=True)
class DocumentShape:
    """A pool of questions on documents.

    requests      questions
    documents     texts that they are on; each has at least one question
    prompt        tokens of document and question together: mean, deviation, smallest, largest
    shared        share of prompt tokens that is text of a document
    output        tokens of an answer
    """

    requests: int
    documents: int
    prompt: LengthShape
    shared: float
    output: LengthShape


SHAPES = {
    "loogle-short": DocumentShape(
        1951, 105, LengthShape(23_474, 8_000, 2_048, 65_536), 0.91, LengthShape(32, 24, 1, 256)
    ),
    "loogle-long": DocumentShape(
        1101, 140, LengthShape(23_474, 12_000, 2_048, 98_304), 0.91, LengthShape(96, 72, 1, 512)
    ),
    "toolbench": DocumentShape(
        2_000, 200, LengthShape(1_835, 700, 256, 8_192), 0.85, LengthShape(96, 72, 1, 512)
    ),
    "next-qa": DocumentShape(
        1_000, 120, LengthShape(9_865, 3_000, 1_024, 32_768), 0.88, LengthShape(32, 24, 1, 256)
    ),
}
PREFIX = "longdoc:"
NAMES = tuple(PREFIX + name for name in SHAPES)


def is_longdoc(name: str) -> bool:
    return name in NAMES


def longdoc(
    shape: str | DocumentShape = "loogle-short",
    *,
    requests: int | None = None,
    documents: int | None = None,
    order: str = "shuffled",
    block_tokens: int = 16,
    seed: int = 0,
) -> Workload:
    """An offline pool: best-effort requests, all at time 0, without objectives.

    shape         a name of SHAPES, or one of your own
    requests      instead of the shape's number; documents in proportion unless given
    order         in which they are submitted: `shuffled`, or `by-document` as data sets list them
    block_tokens  tokens a prefix block covers; shared text ends at a whole block

    Same arguments, same workload. Raises WorkloadError.
    """
    name = shape if isinstance(shape, str) else "own shape"
    if isinstance(shape, str):
        if shape.removeprefix(PREFIX) not in SHAPES:
            raise WorkloadError(f"unknown pool '{shape}': choose from {', '.join(SHAPES)}")
        shape = SHAPES[shape.removeprefix(PREFIX)]
    if requests is not None:
        if requests < 1:
            raise WorkloadError(f"{requests} requests are below 1: give a number of requests")
        in_proportion = math.ceil(shape.documents * requests / shape.requests)
        shape = replace(shape, requests=requests, documents=min(in_proportion, requests))
    if documents is not None:
        shape = replace(shape, documents=documents)
    _check(shape, order, block_tokens, seed)
    lengths, assigned, orders = (
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x1D, k))) for k in range(3)
    )
    document = _draw(shape.prompt, shape.documents, lengths) * shape.shared
    shared = np.maximum(np.rint(document / block_tokens).astype(np.int64), 1)
    of = np.sort(
        np.concatenate(
            [
                np.arange(shape.documents),
                assigned.integers(shape.documents, size=shape.requests - shape.documents),
            ]
        )
    )
    # The rest of a prompt scales with its document, and varies by a third around that.
    own_mean = shared[of] * block_tokens * (1 / shape.shared - 1)
    own = np.rint(own_mean * assigned.uniform(2 / 3, 4 / 3, shape.requests)).astype(np.int64)
    prompt = shared[of] * block_tokens + np.maximum(own, 1)
    output = np.rint(_draw(shape.output, shape.requests, lengths)).astype(np.int64)
    if order == "shuffled":
        at = orders.permutation(shape.requests)
        of, prompt, output = of[at], prompt[at], output[at]
    said = (
        f"longdoc({name}, requests={shape.requests}, documents={shape.documents}, order={order}, "
        f"block_tokens={block_tokens}, seed={seed})"
    )
    # ids sort as requests were submitted: vLLM breaks ties of arrival by them
    digits = len(str(shape.requests - 1))
    return Workload.build(
        np.zeros(shape.requests),
        prompt,
        output,
        service_class=np.full(shape.requests, BEST_EFFORT, np.int8),
        ids=[f"q{q:0{digits}}-doc{d}" for q, d in enumerate(of.tolist())],
        prefix=_blocks(of, shared, prompt, block_tokens),
        provenance=Provenance(PREFIX + name, transforms=(said,)),
    )


def _check(shape: DocumentShape, order: str, block_tokens: int, seed: int) -> None:
    if seed < 0:
        raise WorkloadError(f"seed {seed} is below 0: give a whole number from 0 up")
    if order not in ORDERS:
        raise WorkloadError(f"unknown order '{order}': choose from {', '.join(ORDERS)}")
    if block_tokens < 1:
        raise WorkloadError(f"blocks of {block_tokens} tokens are impossible: give 1 or more")
    if not 1 <= shape.documents <= shape.requests:
        raise WorkloadError(
            f"{shape.documents} documents for {shape.requests} requests: give 1 to {shape.requests}"
        )
    if not 0 < shape.shared < 1:
        raise WorkloadError(f"a shared part of {shape.shared} is not between 0 and 1: give a share")


def _draw(shape: LengthShape, n: int, rng: np.random.Generator) -> np.ndarray:
    """float64[n]: tokens."""
    mu, sigma = parameters(shape)
    return np.clip(np.exp(mu + sigma * rng.standard_normal(n)), shape.low, shape.high)


def _blocks(of: np.ndarray, shared: np.ndarray, prompt: np.ndarray, size: int) -> PrefixRanges:
    """Ids of each prompt's blocks: the document's first, then the question's own.

    of       int64[n]: document of each request;  shared: int64[documents], blocks of each document
    """
    counts = -(-prompt // size)
    first_of_document = offsets_of(shared)[:-1]
    first_own = int(shared.sum()) + offsets_of(counts - shared[of])[:-1]
    return PrefixRanges(first_of_document[of], shared[of], first_own, offsets_of(counts), size)
