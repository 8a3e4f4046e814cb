"""Which drafts an engine found, and which of them were right, by request and output position: noted
while it runs, and given again when its run is simulated."""

from __future__ import annotations

import numpy as np

from twinserve.errors import TwinserveError


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
        """int64[n], as `Acceptance.right`. Raises DraftsPartedError where other drafts were
        verified there."""
        found = np.zeros(len(keys), np.int64)
        places = zip(keys.tolist(), positions.tolist(), drafts.tolist(), strict=True)
        for i, (key, position, wanted) in enumerate(places):
            recorded, found[i] = self._verified.get((key, position), (-1, 0))
            if recorded != wanted:
                raise DraftsPartedError(self._parted(key, position, recorded, wanted))
        return found

    def ahead(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64[n]: drafts found for these requests; 0 where the request ended."""
        places = zip(keys.tolist(), positions.tolist(), strict=True)
        return np.array([self._found.get(place, 0) for place in places], np.int64)

    def _parted(self, key: int, position: int, recorded: int, wanted: int) -> str:
        name = next((name for name, known in self._keys.items() if known == key), str(key))
        was = "no step" if recorded < 0 else f"a step with {recorded} drafts"
        return (
            f"request {name}: a step verifies {wanted} drafts at output {position}, and {was} "
            "was recorded there"
        )
