"""Output lengths as LayerKV predicts them: not a number but a range, one class of several (Sec.
3.1)."""

import math
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import RequestPredictor, Truth
from twinserve.policies.errors import PolicyError
from twinserve.policies.parts.predictors import ORACLE
from twinserve.policies.parts.queues import room_for
from twinserve.policies.requests import FIRST_ROWS, RequestTable

_ENOUGH = 8  # outputs, before anything is concluded from them


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Tokens. median: of what falls into the range; inf where nothing is known."""

    lower: float = 1.0
    median: float = math.inf
    upper: float = math.inf

    def left(self, past: int) -> float:
        """Tokens that a request which has generated `past` is expected to generate yet: up to the
        median, then up to the upper bound; beyond it the prediction was wrong and says nothing."""
        if past < self.median:
            return self.median - past
        return self.upper - past if past < self.upper else math.inf


class LengthRanges:
    """What was predicted of requests, by row: `lower`, `median` and `upper` as columns, so that a
    step asks for those of hundreds of rows at once."""

    def __init__(self) -> None:
        self.lower, self.median, self.upper = (np.zeros(FIRST_ROWS) for _ in range(3))
        self._known: set[int] = set()  # only asked

    def __contains__(self, row: int) -> bool:
        return row in self._known

    def put(self, row: int, expected: LengthRange) -> None:
        for name in ("lower", "median", "upper"):
            column = room_for(getattr(self, name), row)
            column[row] = getattr(expected, name)
            setattr(self, name, column)
        self._known.add(row)

    def forget(self, row: int) -> None:
        self._known.discard(row)

    def left(self, rows: np.ndarray, past: np.ndarray) -> np.ndarray:
        """`LengthRange.left` of each row, float64[n]."""
        return kernels.expected_left(self.median, self.upper, rows, past)


class LengthPredictor(RequestPredictor, Protocol):
    def predict(self, row: int, requests: RequestTable) -> LengthRange: ...

    def expected_output(
        self, row: int, requests: RequestTable, kind: str | None = None
    ) -> float | None:
        median = self.predict(row, requests).median
        return median if median < math.inf else None

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request ended."""
        ...


class HistoryPredictor(LengthPredictor):
    """Learns from the requests that ended: the last `history` of them, divided at percentiles into
    `classes` classes.

    A request is put into the class that most outputs of prompts of about its length (within a
    factor of two) fell into. If they do not agree, that is if less than half of them are in one
    class, its range is all that they cover.
    """

    def __init__(self, classes: int = 4, history: int = 512) -> None:
        self._classes = classes
        self._seen: deque[tuple[int, int]] = deque(maxlen=history)

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        self._seen.append((prompt_tokens.bit_length(), output_tokens))

    def predict(self, row: int, requests: RequestTable) -> LengthRange:
        return self._of(int(requests.prompt_tokens[row]).bit_length())

    def _of(self, size: int) -> LengthRange:
        """Of outputs of prompts of so many bits."""
        seen = np.array(self._seen, np.int64).reshape(-1, 2)
        return self._among(seen[:, 0] == size, seen[:, 1])

    def _among(self, same: np.ndarray, outputs: np.ndarray) -> LengthRange:
        """`same`: (n,) bool, whose prompts are of the size that is asked about; `outputs`: (n,)
        tokens."""
        if len(outputs) < _ENOUGH:
            return LengthRange()
        alike = outputs[same]
        if len(alike) < _ENOUGH:
            alike = outputs
        edges = np.quantile(outputs, np.arange(1, self._classes) / self._classes)
        members = np.searchsorted(edges, alike, side="left")
        counts = np.bincount(members, minlength=self._classes)
        best = int(counts.argmax())
        if 2 * counts[best] >= len(alike):
            alike = alike[members == best]
        return LengthRange(float(alike.min()), float(np.median(alike)), float(alike.max()))


class TrainedPredictor(HistoryPredictor):
    """`HistoryPredictor` on a sample of other requests, learned before the first one comes; nothing
    is added to it. With no sample it learns from requests that end."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes)
        # The caller's arrays, not copies: every replica of a fleet learns from the same sample.
        self._sample: tuple[np.ndarray, np.ndarray] | None = None
        self._known: dict[int, LengthRange] = {}  # by bits of the prompt's length

    def learn(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        self._sample = (prompt_tokens, output_tokens)

    def _of(self, size: int) -> LengthRange:
        if self._sample is None:
            return super()._of(size)
        if size not in self._known:
            prompts, outputs = self._sample
            same = np.frexp(prompts)[1] == size  # the exponent of a whole number is its bits
            self._known[size] = self._among(same, outputs)
        return self._known[size]

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        if self._sample is None:
            super().observe(prompt_tokens, output_tokens)


class TrueClass(LengthPredictor):
    """Knows the length class of a request, a range from one power of two to the next, with
    probability `accuracy`. Otherwise it names a neighbouring class. It stands for a trained
    classifier."""

    needs_truth = True

    def __init__(self, accuracy: float = 1.0) -> None:
        self._accuracy = accuracy

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def predict(self, row: int, requests: RequestTable) -> LengthRange:
        length = _told("perfect", self.truth, row, requests)
        if length is None:
            return LengthRange()
        draw = zlib.crc32(requests.ids[row].encode()) / 2**32  # every policy errs in the same way
        right = int(length).bit_length() - 1
        if draw >= self._accuracy:
            right = max(0, right + (1 if 2 * (draw - self._accuracy) < 1 - self._accuracy else -1))
        lower = 1 << right
        return LengthRange(lower, 1.5 * lower, 2 * lower)


class TrueLength(LengthPredictor):
    """Knows the length itself: a bound on what a predictor can be worth."""

    needs_truth = True

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def predict(self, row: int, requests: RequestTable) -> LengthRange:
        length = _told(ORACLE, self.truth, row, requests)
        return LengthRange() if length is None else LengthRange(length, length, length)


def _told(name: str, truth: Truth | None, row: int, requests: RequestTable) -> int | None:
    """What an engine that knows the future says; None about a request that it does not know."""
    if truth is None:
        raise PolicyError(
            f"policy 'layerkv': predictor={name}: this engine does not know how long outputs "
            "will be; choose trained or history"
        )
    return truth.output_tokens(requests.ids[row])
