"""What every KV ledger offers. A ledger is the one account of KV memory: blocks, slots, prefix
hits, host copies.

Policies decide with it, so it answers in numbers kept incrementally, and it can be asked to try:
`mark()` before, `rollback(mark)` after. It never looks at the clock, and moves data only on paper:
the transfers that its changes imply are collected and handed to the plan by `take_moves()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
    """The ledger's account does not add up. Either the ledger has a defect, or a policy used it
    wrongly."""


@dataclass(slots=True)  # one a step: a frozen one takes three times as long to make
class KvUsage:
    """Blocks by use. A block shared by both classes counts once, as real-time."""

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
            raise ValueError(
                f"a pool of {num_blocks} blocks of {block_tokens} tokens is impossible: give 1 "
                "or more of each"
            )
        self.table = table
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.host_blocks = host_blocks
        self._moves: list[KvMove] = []

    @classmethod
    def whole_blocks(cls, num_blocks: int, host_blocks: int) -> int:
        """Return the blocks that a paged pool needs at most to hold all requests of such a ledger,
        each in blocks of its own."""
        return num_blocks

    def reuse_in_order(self) -> None:
        """Reuse freed blocks without reusable text in turn with cached blocks, not before them.
        Called before the first row. Default: no change, because nothing is cached or the ledger
        evicts by a rule of its own."""

    # -- questions ---------------------------------------------------------------------------------
    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Return the blocks that an admission could take now, cached prefixes without users
        included."""

    def obtainable_blocks(self, row: int) -> int:
        """Return an upper bound on the blocks that the row could get now without dropping another
        row."""
        return self.free_blocks

    def room_tokens(self, row: int) -> int:
        """Return an upper bound on the tokens of the row that could find a place now without
        dropping another row. The row holds nothing yet."""
        return self.obtainable_blocks(row) * self.block_tokens

    def gained_blocks(self, row: int, victim: int) -> int:
        """Return an upper bound on the additional blocks that `row` could get if `victim` were
        dropped."""
        return self.held_blocks(victim)

    def relief(self, row: int, tokens: int, victims: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the room that `row` lacks up to `tokens`, and the part of it that dropping each of
        `victims` would yield (int64[n]), in the ledger's own units. Victims that yield less than
        the lack cannot make room. If they yield enough, only a try shows whether the row fits.

        Victims whose yields together do not reach the lack cannot get the row its room; whether
        those that reach it can, only a try tells.
        """
        held = np.array([self.held_blocks(victim) for victim in victims.tolist()], np.int64)
        lack = -(-tokens // self.block_tokens) - self.held_blocks(row) - self.free_blocks
        return lack, held

    def cannot_return(self, rows: np.ndarray) -> np.ndarray:
        """Return bool[n]: the best-effort rows whose KV on the host has no place with the rows of
        this step. The ledger may not find all of them."""
        return np.zeros(len(rows), bool)

    @abstractmethod
    def held_blocks(self, row: int) -> int:
        """Return the device blocks in the row's block table."""

    def hit_tokens(self, row: int) -> int:
        """Return the tokens of the row's known text in the prefix cache. They are whole blocks and
        never include the last token."""
        return 0

    def shared_tokens(self, rows: np.ndarray) -> int:
        """Return the tokens of these rows (int64[n]) that share memory with another of them. A
        place used by k rows counts k - 1 times. 0 if the ledger shares no memory."""
        return 0

    def lost_tokens(self, tokens: int) -> int:
        """Return the cached tokens needed by offline requests that would be evicted if a request
        took memory for `tokens` further tokens. 0 if the ledger does not count them."""
        return 0

    @property
    def lost_blocks(self) -> int | None:
        """Return a counter of evicted blocks that queued or running offline requests still needed.
        None if the ledger does not count them."""
        return None

    def missing_tokens(self, row):
        """Return the tokens of the row whose KV is only on the host and must return before the row
        can run. An int for a row, int64[n] for an array of rows.

        An int for a row, int64[n] for an array of rows.
        """
        return 0 if np.ndim(row) == 0 else np.zeros(len(row), np.int64)

    @abstractmethod
    def usage(self) -> KvUsage: ...

    def evicted_by(self, taken: np.ndarray) -> np.ndarray | None:
        """Return int64[n]: the cached blocks that leave if so many blocks (int64[n], ascending) are
        taken now. None: as few as possible, because blank blocks go first."""
        return None

    # -- changes -----------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Start a new plan: forget which rows were granted memory for the last plan."""
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
        """Give a row without KV the cached blocks of its first `hit_tokens` tokens, and room up to
        `tokens`. Returns False without changes if fewer than `keep_free` blocks would stay free, or
        if a sequence of `reserve_tokens` tokens would not fit now. That room is not set aside."""

    def admit_remote(self, row: int, tokens: int, hit_tokens: int, keep_free: int) -> bool:
        """`admit` for KV that another engine computed. The row gets its room now. Other rows can
        find its text once the KV has arrived and the row next grows."""
        raise LedgerError(f"the {self.name} ledger takes no KV of other engines")

    @abstractmethod
    def grow(self, row: int, tokens: int) -> bool:
        """Give room up to `tokens` to a row whose KV is all on the device. Returns False without
        changes if there is none."""

    def grow_each(self, rows: np.ndarray, tokens: np.ndarray) -> int:
        """`grow` one row after another until one finds no room. Returns how many grew."""
        for done, (row, upto) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            if not self.grow(row, upto):
                return done
        return len(rows)

    @abstractmethod
    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        """`grow` many rows at once. Returns False without changes unless free memory alone suffices
        for all. The caller then grows row by row."""

    def publish(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The first `tokens` (int64[n]) of each row are computed and known, so other rows can find
        their full blocks from now on. Default: no row finds the text of another."""

    @abstractmethod
    def slack_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return int64[n]: the tokens that each row can add to its computed tokens in memory it
        already has."""

    def decode_steps(self, rows: np.ndarray, limit: int) -> int:
        """Return for how many steps, at most `limit`, free memory lets all `rows` decode one token
        each. Steps count from computed_tokens. Memory granted for the step being planned counts as
        granted.
        """
        free = self.free_blocks
        if len(rows) * -(-limit // self.block_tokens) <= free:
            return limit
        new_blocks = self.block_growth(rows, limit).cumsum()
        return int(new_blocks.searchsorted(free, side="right"))

    def block_growth(self, rows: np.ndarray, steps: int) -> np.ndarray:
        """Return int64[steps]: the new blocks that `rows` take at each step if each decodes one
        token a step."""
        return kernels.growth(self.slack_tokens(rows), steps, self.block_tokens)

    @abstractmethod
    def extend(self, rows: np.ndarray, steps: int) -> None:
        """Give each row room for `steps` decode tokens beyond computed_tokens, as counted before
        the growth. Raises LedgerError beyond what `decode_steps` promised.
        """

    @property
    def runs_of_chunks(self) -> bool:
        """Return whether prompts may grow by several chunks at once (`chunk_steps`,
        `extend_chunks`), with the same effect as one chunk after another."""
        return False

    def chunk_steps(self, decodes: np.ndarray, chunks: Chunks, limit: int) -> int:
        """`decode_steps` for decodes together with prompts."""
        free, size = self.free_blocks, self.block_tokens
        most = len(decodes) * -(-limit // size)
        most += sum([1 + -(-tokens * limit // size) for _, tokens, _ in chunks])
        if most <= free:
            return limit
        grown = self.chunk_growth(decodes, chunks, limit).cumsum()
        return int(grown.searchsorted(free, side="right"))

    def chunk_growth(self, decodes: np.ndarray, chunks: Chunks, steps: int) -> np.ndarray:
        """`block_growth` for decodes together with prompts."""
        grown = self.block_growth(decodes, steps)
        rows = np.array([row for row, _, _ in chunks], np.int64)
        room = (self.slack_tokens(rows) + self.table.computed_tokens[rows]).tolist()
        for (_, tokens, computed), filled in zip(chunks, room, strict=True):
            over = computed + tokens * np.arange(1, steps + 1) - filled
            need = np.maximum(-(-over // self.block_tokens), 0)
            grown[1:] += need[1:] - need[:-1]  # the first one's is there
        return grown

    def extend_chunks(self, rows: np.ndarray, tokens: np.ndarray, steps: int) -> None:
        """`extend` for rows that compute `tokens` (int64[n]) a step. Only up to what `chunk_steps`
        promised."""
        raise LedgerError(f"the {self.name} ledger has no runs of chunks")

    @abstractmethod
    def free(self, row: int) -> None:
        """The row ended: release its device blocks and host copies."""

    def drop(self, row: int) -> None:
        """`free` for a row that will be computed again. It may then find its own blocks in a prefix
        cache."""
        self.free(row)

    def swap_out(self, row: int) -> bool:
        """Copy the row's KV to the host and release its blocks. Returns False without changes if
        the host is full."""
        return False

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        """Bring a swapped row's KV back. Returns False without changes if fewer than `keep_free`
        blocks would stay free."""
        return False

    def take_moves(self) -> list[KvMove]:
        """Return the transfers caused by all changes since `begin_step`."""
        moves, self._moves = self._moves, []
        return moves

    # -- events ------------------------------------------------------------------------------------
    def subscribe(self, listener: KvListener) -> None:
        """Tell `listener` which contents of the workload can be found here: first the present ones,
        then each change when it is made. Changes of a try follow when it is committed. Not to be
        called during a try. Raises ValueError if the ledger has no events (`publishes_events`)."""
        raise ValueError(
            f"the {self.name} ledger publishes no KV events; use one that does, as kv=paged"
        )

    def lost_in_run(
        self, rows: np.ndarray, told: int, steps: Sequence[int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield what decodes of `rows` will evict: step, and contents (int64[n]) lost since the
        step yielded before, or since step `told`. The steps are those of `steps` (ascending, after
        `told`), counted from 1 as in `decode_steps`. `extend` will evict the same.
        """
        yield from ()

    def foretell(self, contents: np.ndarray) -> None:
        """Tell listeners now that `contents` (int64[n], of `lost_in_run`) are lost. It is no event
        when `extend` evicts them."""

    # -- trying ------------------------------------------------------------------------------------
    @abstractmethod
    def mark(self) -> int:
        """Begin a try, which may be nested: changes from here on can be undone."""

    @abstractmethod
    def rollback(self, mark: int) -> None:
        """Undo every change since `mark`, and end the try."""

    @abstractmethod
    def commit(self, mark: int) -> None:
        """Keep the changes since `mark`, and end the try."""

    # -- its own auditor ---------------------------------------------------------------------------
    @abstractmethod
    def check(self) -> None:
        """Recount everything from scratch. Raises LedgerError that names the first mismatch."""
