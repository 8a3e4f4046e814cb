"""What every KV ledger offers. A ledger is the one account of KV memory: blocks, slots, prefix
hits, host copies.

Policies decide with it, so it answers in numbers kept incrementally, and it can be asked to try:
`mark()` before, `rollback(mark)` after. It never looks at the clock, and moves data only on paper:
the transfers that its changes imply are collected and handed to the plan by `take_moves()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.kv.events import KvListener
from twinserve.policies.plan import KvMove
from twinserve.policies.requests import RequestTable

if TYPE_CHECKING:
    from twinserve.policies.kv.tiers import Tier


# Prompts that compute the same number of tokens in every step of a run: row, that number, tokens
# computed before the run.
Chunks = Sequence[tuple[int, int, int]]


class LedgerError(AssertionError):
    """The account does not add up: a defect in a ledger or in a policy that used it wrongly."""


@dataclass(slots=True)  # one a step: a frozen one takes three times as long to make
class KvUsage:
    """Blocks by what they hold; a block shared by both classes counts once, as real-time."""

    total: int
    free: int  # a new request could get them: empty, or unused cached prefixes
    real_time: int
    best_effort: int
    cached: int  # the part of `free` that holds reusable prefixes
    host_tokens: int = 0  # tokens with a copy on the host


class KvLedger(ABC):
    """KV memory of one engine.

    block_tokens  tokens a block holds
    num_blocks    blocks of the device pool
    host_blocks   blocks that the host has room for
    Rows index the RequestTable given at construction. All sizes are tokens or blocks as named.
    """

    name: str
    caches_prefixes = False  # True: built with prefix_caching and shared_contents (see PagedLedger)
    prefix_caching = False  # of a ledger: full blocks stay findable
    evicts_by_last_use = True  # cached prefixes leave as vLLM's do, the one used longest ago first
    overwrites = False  # granting memory to a row can send KV of others to the host
    publishes_events = False  # True: has `subscribe`; False: nothing in it is found by others
    hands_over = False  # True: has `admit_remote`, and keeps what rows held that have ended
    knows_layers = False  # True: built with layers, how many the model has (see LayerwiseLedger)
    layers = 1  # of a ledger: those whose KV it moves one by one
    host: Tier  # the host's room, and what rows hold of it
    # Of an asynchronous engine, which sets it: a plan may take memory for a token after one that is
    # still being computed. A block that such a token would fill has no name yet, so only known text
    # can be found; when an outcome is booked `publish` comes, with what rows have computed.
    known_text_only = False

    def __init__(
        self, table: RequestTable, num_blocks: int, block_tokens: int, host_blocks: int = 0
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens")
        self.table = table
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.host_blocks = host_blocks
        self._moves: list[KvMove] = []

    @classmethod
    def whole_blocks(cls, num_blocks: int, host_blocks: int) -> int:
        """Blocks, at most, of a paged pool in which every request that has KV on the device of such
        a ledger lies as a whole, in blocks of its own."""
        return num_blocks

    def reuse_in_order(self) -> None:
        """Before the first row: freed blocks without reusable text shall be used again in their
        turn among the cached ones, not before them. Default: nothing to change, since no prefix is
        cached, or prefixes leave by a rule of the ledger's own."""

    # -- questions ---------------------------------------------------------------------------------
    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks that an admission could take now, cached prefixes without users included."""

    def obtainable_blocks(self, row: int) -> int:
        """At most so many further blocks could the row get now without dropping any row; an
        upper bound."""
        return self.free_blocks

    def room_tokens(self, row: int) -> int:
        """At most so many tokens of the row, which holds nothing, could get a place now without
        dropping any row; an upper bound."""
        return self.obtainable_blocks(row) * self.block_tokens

    def gained_blocks(self, row: int, victim: int) -> int:
        """How many more blocks `row` could obtain if `victim` were dropped; an upper bound."""
        return self.held_blocks(victim)

    def relief(self, row: int, tokens: int, victims: np.ndarray) -> tuple[int, np.ndarray]:
        """What `row` lacks of room up to `tokens`, and what dropping each of `victims` would yield
        of it (int64[n]), in units of the ledger's own.

        Victims whose yields together do not reach the lack cannot get the row its room; whether
        those that reach it can, only a try tells.
        """
        held = np.array([self.held_blocks(victim) for victim in victims.tolist()], np.int64)
        lack = -(-tokens // self.block_tokens) - self.held_blocks(row) - self.free_blocks
        return lack, held

    def cannot_return(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which of these best-effort rows have KV on the host for which the others that
        run in this step leave no place; perhaps not all of them."""
        return np.zeros(len(rows), bool)

    @abstractmethod
    def held_blocks(self, row: int) -> int:
        """Device blocks in the row's block table."""

    def hit_tokens(self, row: int) -> int:
        """Tokens of the row's known text that the prefix cache holds, whole blocks, never the last
        token."""
        return 0

    def shared_tokens(self, rows: np.ndarray) -> int:
        """Tokens of these rows (int64[n]) that are in the same memory as those of another of them,
        each place counted once less than rows have it; 0 where no memory is shared."""
        return 0

    def lost_tokens(self, tokens: int) -> int:
        """Cached tokens that queued or running offline requests will use, and that would be evicted
        if a request took memory for `tokens` further tokens now. 0 if they are not counted."""
        return 0

    @property
    def lost_blocks(self) -> int | None:
        """Grows whenever cached blocks that queued or running offline requests will use are
        evicted; None if they are not counted."""
        return None

    def missing_tokens(self, row):
        """Tokens of the row whose KV is on the host only and must come back before it can run.

        An int for a row, int64[n] for an array of rows.
        """
        return 0 if np.ndim(row) == 0 else np.zeros(len(row), np.int64)

    @abstractmethod
    def usage(self) -> KvUsage: ...

    # -- changes -----------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """A new plan starts: forget which rows were granted memory for the last one."""
        self._moves = []

    @abstractmethod
    def admit(
        self,
        row: int,
        tokens: int,
        hit_tokens: int = 0,
        keep_free: int = 0,
        reserve_tokens: int = 0,
    ) -> bool:
        """Give a row without KV the cached blocks of its first `hit_tokens` tokens and room up to
        `tokens`.

        False, and nothing changed, where that would leave fewer than `keep_free` blocks free, or
        where a sequence of `reserve_tokens` tokens would not fit (it need only fit; nothing is set
        aside for it).
        """

    def admit_remote(self, row: int, tokens: int, hit_tokens: int, keep_free: int) -> bool:
        """`admit` for KV that another engine computed: the room is taken now, and what is written
        to it can be found by others when the row next grows, after it has come."""
        raise LedgerError(f"the {self.name} ledger takes no KV of other engines")

    @abstractmethod
    def grow(self, row: int, tokens: int) -> bool:
        """Room up to `tokens` for a row that holds KV, all of it on the device; False and nothing
        changed if none."""

    def grow_each(self, rows: np.ndarray, tokens: np.ndarray) -> int:
        """`grow` for one row after another until one finds no room: how many did."""
        for done, (row, upto) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if not self.grow(row, upto):
                return done
        return len(rows)

    @abstractmethod
    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        """`grow` for many rows at once, in the plain case: False and nothing changed unless every
        row can have its room from free memory alone. Then the caller goes row by row."""

    def publish(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The first `tokens` (int64[n]) of each row are computed and known: their full blocks can
        be found from now on. Default: no text is found by others."""

    @abstractmethod
    def slack_tokens(self, rows: np.ndarray) -> np.ndarray:
        """int64[n]: tokens each row can add to its computed_tokens in memory it already has, no
        other row touched."""

    def decode_steps(self, rows: np.ndarray, limit: int) -> int:
        """How many steps (at most `limit`) all `rows` can decode one token each with the free
        memory there is.

        Counted from computed_tokens; memory already granted for the step being planned counts as
        granted.
        """
        free = self.free_blocks
        if len(rows) * -(-limit // self.block_tokens) <= free:
            return limit
        new_blocks = np.cumsum(self.block_growth(rows, limit))
        return int(np.searchsorted(new_blocks, free, side="right"))

    def block_growth(self, rows: np.ndarray, steps: int) -> np.ndarray:
        """int64[steps]: blocks that `rows`, each decoding one token a step, newly take at each
        step."""
        return kernels.growth(self.slack_tokens(rows), steps, self.block_tokens)

    @abstractmethod
    def extend(self, rows: np.ndarray, steps: int) -> None:
        """Room for `steps` decode tokens of each row beyond computed_tokens (those before the
        growth).

        Only up to what `decode_steps` promised. Raises LedgerError beyond it.
        """

    @property
    def runs_of_chunks(self) -> bool:
        """Whether prompts may grow by several chunks at once (`chunk_steps`, `extend_chunks`), as
        if it were one after another for every reader between steps."""
        return False

    def chunk_steps(self, decodes: np.ndarray, chunks: Chunks, limit: int) -> int:
        """`decode_steps` with prompts beside the decodes."""
        free, size = self.free_blocks, self.block_tokens
        most = len(decodes) * -(-limit // size)
        most += sum([1 + -(-tokens * limit // size) for _, tokens, _ in chunks])
        if most <= free:
            return limit
        grown = np.cumsum(self.chunk_growth(decodes, chunks, limit))
        return int(np.searchsorted(grown, free, side="right"))

    def chunk_growth(self, decodes: np.ndarray, chunks: Chunks, steps: int) -> np.ndarray:
        """`block_growth` with prompts beside the decodes."""
        grown = self.block_growth(decodes, steps)
        rows = np.array([row for row, _, _ in chunks], np.int64)
        room = (self.slack_tokens(rows) + self.table.computed_tokens[rows]).tolist()
        for (_, tokens, computed), filled in zip(chunks, room, strict=True):
            over = computed + tokens * np.arange(1, steps + 1) - filled
            need = np.maximum(-(-over // self.block_tokens), 0)
            grown[1:] += need[1:] - need[:-1]  # the first one's is there
        return grown

    def extend_chunks(self, rows: np.ndarray, tokens: np.ndarray, steps: int) -> None:
        """`extend` where each row computes so many `tokens` (int64[n]) a step; only up to what
        `chunk_steps` promised."""
        raise LedgerError(f"the {self.name} ledger has no runs of chunks")

    @abstractmethod
    def free(self, row: int) -> None:
        """The row ended: give back all it holds, device and host."""

    def drop(self, row: int) -> None:
        """`free`, but the row will be computed again, and may then find its own blocks in a prefix
        cache."""
        self.free(row)

    def swap_out(self, row: int) -> bool:
        """Copy the row's KV to the host and give back its blocks; False and nothing changed if the
        host is full."""
        return False

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        """Bring a swapped row's KV back; False and nothing changed where fewer than `keep_free`
        blocks would stay."""
        return False

    def take_moves(self) -> list[KvMove]:
        """The transfers implied by all changes since `begin_step`."""
        moves, self._moves = self._moves, []
        return moves

    # -- events ------------------------------------------------------------------------------------
    def subscribe(self, listener: KvListener) -> None:
        """From now on `listener` hears which of the workload's contents can be found here: at once
        what can be now, then every change, when it is made or, of a try, when that is committed.

        Not while a change is tried. Raises ValueError where there are no events
        (`publishes_events`).
        """
        raise ValueError(
            f"the {self.name} ledger publishes no KV events; use one that does, as kv=paged"
        )

    # -- trying ------------------------------------------------------------------------------------
    @abstractmethod
    def mark(self) -> int:
        """Start (or nest) a try: changes from here on can be undone."""

    @abstractmethod
    def rollback(self, mark: int) -> None:
        """Undo every change since `mark`, and end the try."""

    @abstractmethod
    def commit(self, mark: int) -> None:
        """Keep the changes since `mark`, and end the try."""

    # -- its own auditor ---------------------------------------------------------------------------
    @abstractmethod
    def check(self) -> None:
        """Recount everything from scratch; raise LedgerError with the first thing that does not add
        up."""
