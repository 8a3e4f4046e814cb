"""Paged memory of an engine that speculates.

Source: vLLM 0.32, `v1/core/kv_cache_manager.py` (`allocate_slots`),
`v1/core/single_type_kv_cache_manager.py` (`find_longest_cache_hit`).
"""

import numpy as np

from twinserve.policies.drafting import Drafting
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.paged.ledger import PagedLedger


class DraftedLedger(PagedLedger):
    """A paged ledger whose rows have room for drafts: beyond the tokens of a step, `lookahead`
    more, never beyond the longest request. Blocks that a rejected draft was to fill stay with the
    row. Others find known text alone: a draft may be wrong."""

    known_text_only = True
    _ahead = 0
    _longest = 1 << 62
    _drops_hit = False

    def look_ahead(self, drafting: Drafting, longest: int) -> None:
        """Before the first row; longest: tokens of a request."""
        if len(self._tables):
            raise LedgerError("rows hold memory already; say what is drafted before the first one")
        self._ahead, self._longest = drafting.lookahead, longest
        self._drops_hit = drafting.drops_hit

    def hit_tokens(self, row: int) -> int:
        return self._usable(super().hit_tokens(row))

    def _usable(self, hit: int) -> int:
        """Of a prefix hit, what the drafter need not see computed."""
        return hit - self.block_tokens if self._drops_hit and hit else hit

    def relief(self, row: int, tokens: int, victims: np.ndarray) -> tuple[int, np.ndarray]:
        return super().relief(row, int(self._room(tokens)), victims)

    def _room(self, tokens):
        return np.minimum(tokens + self._ahead, self._longest)
