"""A plan of Echo while it is being made: its rows, its benefit, punishment and reward (eqs. 1,
2 and 4), and the rows that had to go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.echo.cost import StepCost
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable

NOBODY = np.zeros(0, np.int64)


class StepInProgress:
    """Grants so far, and what they sum up to.

    seats, tokens   left in the batch
    bound           seconds that the iteration may take by estimate (the paper's SLO); inf without
                    online requests
    prefills        (new, resident) tokens of each prompt or chunk
    decodes         requests that decode, resident tokens of all of them, of the longest
    benefit         tokens processed (eq. 1), less what evictions lost (eq. 2); a prompt's token
                    counts 1, a decoded one `b_decode`, one found in the cache `b_hit`
    added           offline prompts and chunks, in order
    online          int64[n]: online requests with KV, when they have been served

    The search over plans only considers offline decodes: they count in all of these, but are
    granted, and take memory, when the search has ended.
    """

    def __init__(
        self,
        view: SystemView,
        ledger: KvLedger,
        cost: StepCost,
        seats: int,
        tokens: int,
        b_decode: float = 1.0,
        b_hit: float = 0.0,
    ) -> None:
        self.view, self.requests, self.ledger, self.cost = view, view.requests, ledger, cost
        self.plan = StepPlan()
        self.seats, self.tokens = seats, tokens
        self.bound = np.inf
        self.online = NOBODY
        self.prefills: list[tuple[int, int]] = []
        self.decodes = self._granted_decodes = (0, 0, 0)
        self._granted_benefit = 0.0
        self.considered = 0  # offline decodes
        self.added: list[AddedPrompt] = []
        self.b_decode, self.b_hit = b_decode, b_hit
        self.granted: set[int] = set()  # only asked
        self.dropped: set[int] = set()  # only asked
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.granted)

    @property
    def benefit(self) -> float:
        return self.benefit_with(self.considered)

    def here(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have something to compute, have no pending transfer and were not
        dropped in this step: first those that decode, then the others."""
        requests, ready = self.requests, self.view.ready_s
        emitted = requests.output_tokens[rows]
        left = requests.prompt_tokens[rows] + emitted - requests.computed_tokens[rows]
        decode = (left == 1) & (emitted > 0)
        gone = self.dropped or ready
        if not gone and np.count_nonzero(decode) == len(rows):
            return rows, NOBODY
        other = (left > 0) & ~decode
        if gone:
            kept = np.array([r not in self.dropped and r not in ready for r in rows.tolist()], bool)
            decode, other = decode & kept, other & kept
        return rows[decode], rows[other]

    def promised_blocks(self, *rows: np.ndarray) -> int:
        """Blocks that prompts which have been begun still need."""
        everyone = np.concatenate(rows)
        computed = self.requests.computed_tokens[everyone]
        unfinished = everyone[self.requests.known_tokens(everyone) - computed > 1]
        if not len(unfinished):
            return 0
        size, ledger = self.ledger.block_tokens, self.ledger
        known = self.requests.known_tokens(unfinished).tolist()
        return sum(
            max(0, -(-tokens // size) - ledger.held_blocks(row))
            for row, tokens in zip(unfinished.tolist(), known, strict=True)
            if row not in self.dropped
        )

    # -- what it takes -----------------------------------------------------------------------------
    def seconds(self) -> float:
        return self.cost.seconds(self.prefills, *self.decodes)

    def seconds_with(self, n: int, total: int, longest: int) -> float:
        """`seconds`, if these decodes were considered."""
        return self.cost.seconds(self.prefills, *self.with_decodes(n, total, longest))

    def chunk(self, left: int, resident: int) -> int:
        """Prompt tokens that the iteration still has room and time for, of `left` on `resident`
        ones."""
        return self.longest_chunk(self.prefills, resident, min(left, self.tokens))

    def fits_whole(self, left: int, resident: int) -> bool:
        """False where `chunk` is surely shorter than `left`: quicker to tell."""
        if left > self.tokens:
            return False
        if self.bound == np.inf:
            return True
        whole = [*self.prefills, (left, resident)]
        return self.cost.seconds(whole, *self.decodes) <= self.bound

    def longest_chunk(self, prefills: list[tuple[int, int]], resident: int, limit: int) -> int:
        """Return up to `limit` tokens on `resident` ones, with these prefills and the decodes."""
        if limit <= 0 or self.bound == np.inf:
            return max(limit, 0)
        return self.cost.longest_chunk(prefills, self.decodes, resident, limit, self.bound)

    def reward(self) -> float:
        """Eq. 4, tokens a second."""
        return rate(self.benefit, self.seconds())

    def prefills_without(self, i: int) -> list[tuple[int, int]]:
        """`prefills` without number `i` of `added`, which are the last of them."""
        at = len(self.prefills) - len(self.added) + i
        return [*self.prefills[:at], *self.prefills[at + 1 :]]

    def with_decodes(self, n: int, total: int, longest: int) -> tuple[int, int, int]:
        """Return `decodes`, if these were considered with those that are granted."""
        granted = self._granted_decodes
        return granted[0] + n, granted[1] + total, max(granted[2], longest)

    def benefit_with(self, n: int) -> float:
        """`benefit`, if `n` decodes were considered."""
        return self._granted_benefit + self.b_decode * n

    def consider(self, n: int, total: int, longest: int) -> None:
        """`n` decodes in place of those considered so far."""
        self.decodes = self.with_decodes(n, total, longest)
        self.seats += self.considered - n
        self.tokens += self.considered - n
        self.considered = n

    def forget_benefit(self) -> None:
        """Of what is granted so far. None may be considered."""
        self._granted_benefit = 0.0

    # -- grants ------------------------------------------------------------------------------------
    def grant_decodes(self, rows: np.ndarray, resident: np.ndarray) -> None:
        """In front of `added`. None may be considered any more."""
        if not len(rows):
            return
        lengths = resident.tolist()
        n = len(lengths)
        self._add(rows, np.ones(n, np.int64), rows.tolist(), n, len(self._rows) - len(self.added))
        self.decodes = self._granted_decodes = self.with_decodes(n, sum(lengths), max(lengths))
        self._granted_benefit += self.b_decode * n

    def grant_prompt(self, row: int, new: int, resident: int, hit: int = 0) -> None:
        self._add(np.array([row]), np.array([new]), (row,), new, len(self._rows))
        self.prefills.append((new, resident))
        self._granted_benefit += self.benefit_of(new, hit)

    def benefit_of(self, new: int, hit: int) -> float:
        """Of a prompt's tokens, computed and found in the cache (eq. 1)."""
        return new + self.b_hit * hit

    def benefit_added(self, prompt: AddedPrompt) -> float:
        return self.benefit_of(prompt.new, prompt.hit) - prompt.lost

    def record(self, prompt: AddedPrompt) -> None:
        """The last grant was this one."""
        self.added.append(prompt)
        self._granted_benefit -= prompt.lost

    def withdraw(self) -> AddedPrompt:
        """Take back the last of `added`; its memory is another matter."""
        prompt = self.added.pop()
        self._rows.pop()
        self._tokens.pop()
        self.prefills.pop()
        self.granted.discard(prompt.row)
        self.seats += 1
        self.tokens += prompt.new
        self._granted_benefit -= self.benefit_added(prompt)
        return prompt

    def _add(
        self, rows: np.ndarray, new: np.ndarray, names: Sequence[int], tokens: int, at: int
    ) -> None:
        """names: `rows`, as plain numbers; tokens: the sum of `new`."""
        self._rows.insert(at, rows)
        self._tokens.insert(at, new)
        self.granted.update(names)
        self.seats -= len(names)
        self.tokens -= tokens

    def finish(self) -> StepPlan:
        if self._rows:
            self.plan.rows = np.concatenate(self._rows)
            self.plan.tokens = np.concatenate(self._tokens)
        self.plan.moves = self.ledger.take_moves()
        return self.plan

    # -- memory ------------------------------------------------------------------------------------
    def acquire(
        self, take: Callable[[], bool], victims: Callable[[], Iterable[int]]
    ) -> list[int] | None:
        """Get memory by `take`, dropping `victims` one after another until it succeeds. Returns the
        dropped rows, or None without changes if all of them are not enough."""
        if take():
            return []
        mark, dropped = self.ledger.mark(), []
        for victim in victims():
            self.ledger.drop(victim)
            dropped.append(victim)
            if take():
                self.ledger.commit(mark)
                self.dropped.update(dropped)
                self.plan.preempted += [(row, Preemption.RECOMPUTE) for row in dropped]
                return dropped
        self.ledger.rollback(mark)
        return None


@dataclass(frozen=True, slots=True)
class AddedPrompt:
    """An offline prompt or chunk of the plan.

    new, resident  tokens it computes, tokens before them
    hit, lost      tokens found in the cache at its admission, needed ones that its memory pushed
                   out (eq. 2)
    admitted       it was queued before; led: it computed its family's shared text; under_way:
                   prompts begun before it
    mark           the ledger's, from before, where plans are tried; fixed: others lost their memory
                   for it
    """

    row: int
    new: int
    resident: int
    hit: int
    lost: int
    admitted: bool
    led: bool
    under_way: tuple[int, ...]
    mark: int
    fixed: bool


class OfflineDecodes:
    """Offline requests that could decode a token, shortest context first (then in order of
    arrival).

    rows, resident  int64[n]
    totals, longest of the k shortest, tokens, at index k
    """

    def __init__(self, rows: np.ndarray, computed: np.ndarray, ledger: KvLedger) -> None:
        """computed: of each row of the table."""
        resident = computed[rows]
        if len(rows) > 1:
            order = np.argsort(resident, kind="stable")
            rows, resident = rows[order], resident[order]
        self.rows, self.resident = rows, resident
        self._computed, self._ledger = computed, ledger

    def __len__(self) -> int:
        return len(self.rows)

    def behind(self, first: int, dropped: set[int]) -> OfflineDecodes:
        """From number `first` on, without those that were dropped."""
        rows = np.array([row for row in self.rows[first:].tolist() if row not in dropped], np.int64)
        return OfflineDecodes(rows, self._computed, self._ledger)

    @cached_property
    def totals(self) -> list[int]:
        return [0, *np.cumsum(self.resident).tolist()]

    @cached_property
    def longest(self) -> list[int]:
        return [0, *self.resident.tolist()]

    @cached_property
    def _growth(self) -> list[int]:
        return [0, *np.cumsum(self._ledger.slack_tokens(self.rows) < 1).tolist()]

    def growth(self, k: int) -> int:
        """Blocks that the k shortest will newly take."""
        return self._growth[k] if k else 0


def phases(
    rows: np.ndarray, prompts: np.ndarray, requests: RequestTable
) -> tuple[np.ndarray, np.ndarray]:
    """int64[n]: tokens that each row has computed; bool[n]: which compute the one token after their
    last emitted one. prompts: tokens of theirs, int64[n]."""
    emitted, computed = requests.output_tokens[rows], requests.computed_tokens[rows]
    return computed, (prompts + emitted - computed == 1) & (emitted > 0)


def rate(benefit: float, seconds: float) -> float:
    """Tokens a second. A chunk behind cached text may be estimated to take no time (eq. 6 below c
    at both of its ends)."""
    if seconds > 0:
        return benefit / seconds
    return math.inf if benefit > 0 else 0.0
