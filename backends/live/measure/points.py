"""Which steps a calibration measures: powers of two up to the engine's limits, some at random."""

from dataclasses import dataclass, field

import numpy as np

ROOM = 80  # tokens that held requests may grow by while they are measured
# tokens a step, and tokens a request beside ROOM, below which there is nothing to fit a table to
SMALLEST = 64
_SHORTEST = 16  # tokens, of prompts and contexts
_DRAWS = 200


@dataclass(frozen=True)
class Limits:
    """Most requests and tokens a step, tokens a request, of all KV blocks, a block."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    pool_tokens: int
    block_tokens: int

    def too_small(self) -> str:
        """Return a line that names a limit too small for a calibration, or an empty one."""
        if self.max_num_seqs < 4:
            return (
                f"a batch of {self.max_num_seqs} request(s) is too small to calibrate: "
                "--max-num-seqs 4 or more"
            )
        if self.max_step_tokens < SMALLEST:
            return (
                f"{self.max_step_tokens} tokens a step are too few: --max-step-tokens "
                f"{SMALLEST} or more"
            )
        if self.max_model_len < ROOM + SMALLEST:
            return (
                f"requests of {self.max_model_len} tokens are too short: --max-model-len "
                f"{ROOM + SMALLEST} or more"
            )
        if not self.fits([SMALLEST] * 4):
            return (
                f"the KV pool of {self.pool_tokens} tokens is too small to calibrate: more "
                "blocks (--num-blocks)"
            )
        return ""

    def fits(self, contexts: list[int]) -> bool:
        """Whether requests of these contexts can be held together, with ROOM to grow."""
        taken = sum(-(-(c + ROOM) // self.block_tokens) * self.block_tokens for c in contexts)
        return (
            taken <= 0.95 * self.pool_tokens
            and max(contexts, default=0) + ROOM <= self.max_model_len
        )


@dataclass(frozen=True)
class Point:
    """Work to be measured again and again.

    contexts  resident tokens of the decoding requests
    prefills  (new tokens, resident tokens) of the prefilling ones
    vary      new tokens are drawn anew in every round, from this share below the number: a table of
              powers of two alone would know nothing of the lengths that traffic has
    """

    kind: str
    contexts: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    vary: float = 1 / 16


@dataclass(frozen=True)
class Ladder:
    """Pure decode points that share their requests: batch sizes at one context."""

    context: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Points:
    ladders: list[Ladder] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


def choose_points(limits: Limits, seed: int = 0, quick: bool = False) -> Points:
    """Every point that the engine has room for. quick: powers of four, and fewer random steps."""
    rng = np.random.default_rng([seed, 17])
    factor = 4 if quick else 2
    budget, longest = limits.max_step_tokens, limits.max_model_len - ROOM
    lengths = _powers(_SHORTEST, min(budget, longest), factor)
    contexts = _powers(_SHORTEST, longest, factor)
    batches = _powers(1, limits.max_num_seqs, factor)
    found = Points()
    for context in contexts:
        fitting = tuple(b for b in batches if limits.fits([context] * b))
        if fitting:
            found.ladders.append(Ladder(context, fitting))
    add = found.points.append
    for length in lengths:
        add(Point("prefill", prefills=((length, 0),)))
    for count in batches[1:]:
        for length in lengths[:: 1 if quick else 2]:
            if count * length <= budget and limits.fits([length] * count):
                add(Point("prefills", prefills=((length, 0),) * count))
    for length in lengths[:: 1 if quick else 2]:
        for resident in _powers(max(4 * _SHORTEST, limits.block_tokens), longest, 4):
            # whole blocks are adopted
            resident = resident // limits.block_tokens * limits.block_tokens
            if limits.fits([length + resident]):
                add(Point("chunk", prefills=((length, resident),)))
    for batch in batches[2::2]:
        for context in contexts[1::2]:
            mean = [context] * (batch - 1)
            uneven = [max(_SHORTEST, context // 2)] * (batch - 1) + [
                min(longest, context * (batch + 1) // 2)
            ]
            if mean and limits.fits(uneven):
                add(Point("skewed", tuple(uneven)))
    for kind, count in (("mixed", 10 if quick else 32), ("check", 6 if quick else 16)):
        drawn = [_random(kind, rng, limits) for _ in range(count)]
        found.points.extend(point for point in drawn if point is not None)
    leaving = [min(4 * _SHORTEST, longest)] * min(16, limits.max_num_seqs)
    if limits.fits(leaving):
        add(Point("leaving", tuple(leaving)))
    return found


def _powers(first: int, last: int, factor: int) -> list[int]:
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return found


def _random(kind: str, rng: np.random.Generator, limits: Limits) -> Point | None:
    """Decodes and one prompt or chunk, sizes uniform on a logarithmic scale; a "check" has uneven
    contexts, and may have no decodes or no prompt, or two prompts. None if no draw fits."""
    longest = limits.max_model_len - ROOM

    def draw(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(max(low, high) + 0.999))))

    for _ in range(_DRAWS):
        check = kind == "check"
        batch = draw(1, limits.max_num_seqs - 2) if not check or rng.random() < 0.8 else 0
        middle = draw(_SHORTEST, longest // 2)
        uneven = np.exp(rng.normal(0, 0.5 if check else 0.0, batch))
        contexts = np.clip((middle * uneven).astype(int), _SHORTEST, longest).tolist()
        count = int(rng.choice([0, 1, 2])) if check and batch else 1
        prefills = []
        for _ in range(count):
            new = draw(_SHORTEST, min(longest, limits.max_step_tokens) // 2)
            resident = draw(_SHORTEST, longest) if rng.random() < 0.4 else 0
            prefills.append((new, resident // limits.block_tokens * limits.block_tokens))
        tokens = batch + sum(new for new, _ in prefills)
        if tokens <= limits.max_step_tokens and limits.fits(
            contexts + [new + resident for new, resident in prefills]
        ):
            return Point(kind, tuple(contexts), tuple(prefills))
    return None
