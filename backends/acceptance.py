"""Which drafts are right: drawn for each request and output position, so that policies, batches and
preemptions are compared on the same draws.

Rates as vLLM's synthetic rejection sampler has them (0.32, `config/speculative.py`,
`v1/spec_decode/utils.py`): the i-th is the share of drafts whose first i + 1 tokens are all right.

Which drafts an engine found, and which of them were right, by request and output position: noted
while it runs, and given again when its run is simulated.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from twinserve.errors import TwinserveError

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def rates_of_length(length: float, drafts: int) -> list[float]:
    """Rates with this mean of tokens a step, 1 to drafts + 1, and the least spread: vLLM's
    `_acceptance_length_to_rates`."""
    right = length - 1
    whole = int(right)
    return ([1.0] * whole + [right - whole] + [0.0] * (drafts - whole - 1))[:drafts]


def conditional(rates: Sequence[float]) -> list[float]:
    """Return, for each draft, the probability that it is right if all before it are."""
    before = [1.0, *rates[:-1]]
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True)]


class Acceptance:
    """rates: as above, one for each draft. seed: of all draws."""

    drawn = True

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        self.rates = np.array(conditional(rates))
        self.seed = seed

    def key(self, request_id: str) -> int:
        """Return the key by which `right` identifies the request."""
        said = f"{self.seed} {request_id}".encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest())

    def right(self, keys: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """int64[n]: how many leading drafts are right, of `drafts[i]` for the output tokens of
        request `keys[i]` (uint64) from `positions[i]` on."""
        most = int(drafts.max(initial=0))
        if not most:
            return np.zeros(len(keys), np.int64)
        ahead = np.arange(most)
        drawn = uniform(keys[:, None], positions[:, None] + ahead)
        right = (drawn < self.rates[:most]) & (ahead < drafts[:, None])
        return np.logical_and.accumulate(right, axis=1).sum(axis=1)

    def ahead(self, keys: np.ndarray, positions: np.ndarray) -> None:
        """Return None: these requests have as many drafts as the drafter makes."""


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) of each (key, position): SplitMix64 (Steele et al., OOPSLA 2014)."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


class DraftsPartedError(TwinserveError, ValueError):
    """A step verifies other drafts than were recorded. where: of which request, and how many."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: give the policy and the settings of the recorded run")
        self.where = where


class RecordedAcceptance:
    """In the place of an `Acceptance`. Positions are output tokens that the request had before the
    step, which is once at each of them: a text does not grow backwards."""

    drawn = False

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._verified: dict[tuple[int, int], tuple[int, int]] = {}
        self._found: dict[tuple[int, int], int] = {}

    def key(self, request_id: str) -> int:
        """What `right` and `ahead` know the request by."""
        return self._keys.setdefault(request_id, len(self._keys))

    def note(self, request_id: str, position: int, drafts: int, right: int) -> None:
        """A step gave the request tokens from output `position` on: it verified so many drafts, and
        so many leading ones were right."""
        self._verified[self.key(request_id), position] = drafts, right

    def note_found(self, request_id: str, position: int, drafts: int) -> None:
        """The drafter found so many drafts for the output tokens from `position` on."""
        self._found[self.key(request_id), position] = drafts

    def right(self, keys: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Return as `Acceptance.right`. Raises DraftsPartedError for other drafts than recorded."""
        found = np.zeros(len(keys), np.int64)
        places = zip(keys.tolist(), positions.tolist(), drafts.tolist(), strict=True)
        for i, (key, position, wanted) in enumerate(places):
            recorded, found[i] = self._verified.get((key, position), (-1, 0))
            if recorded != wanted:
                raise DraftsPartedError(self._parted(key, position, recorded, wanted))
        return found

    def ahead(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64[n]: drafts found for these requests; 0 if the request ended."""
        places = zip(keys.tolist(), positions.tolist(), strict=True)
        return np.array([self._found.get(place, 0) for place in places], np.int64)

    def _parted(self, key: int, position: int, recorded: int, wanted: int) -> str:
        name = next((name for name, known in self._keys.items() if known == key), str(key))
        was = "no step" if recorded < 0 else f"a step with {recorded} drafts"
        return (
            f"request {name}: a step verifies {wanted} drafts at output {position}, and {was} "
            "was recorded there"
        )
