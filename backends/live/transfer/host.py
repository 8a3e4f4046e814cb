"""The scheduler's side of swapping: the host's content, and the next step's copies.

The scheduler owns host memory as rows, one a token slot, and decides the content of each, so room
is exact. Workers (one or many, in this process or another) only copy between device slots and host
rows.

    device slot  block id * tokens a block + offset in the block: as in vLLM's slot mapping
    host row     index into every worker's host memory

Nothing here needs vLLM or torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Run = tuple[int, int]  # first index, how many follow one another


class HostFull(RuntimeError):
    """The host has no room for a copy; drop and recompute the request, or wait."""


@dataclass
class Copies:
    """Copies of one direction in one step: the i-th device slot of `slots` belongs to the i-th host
    row of `rows`.

    slots, rows  runs, both with the same number of indices in total
    after        number of the latest order that wrote one of these rows; 0 when none did
    """

    slots: list[Run] = field(default_factory=list)
    rows: list[Run] = field(default_factory=list)
    after: int = 0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)

    def add(self, slots: Iterable[Run], rows: Iterable[Run], after: int = 0) -> None:
        for run in slots:
            extend(self.slots, run)
        for run in rows:
            extend(self.rows, run)
        self.after = max(self.after, after)


@dataclass
class Orders:
    """What every worker does before the forward pass of one step: all of `out`, then all of `back`.

    number  counts steps that have orders, from 1; 0 when there is nothing to do
    """

    number: int = 0
    out: Copies = field(default_factory=Copies)
    back: Copies = field(default_factory=Copies)


def extend(runs: list[Run], run: Run) -> None:
    """Append `run`, merged with the last one if it continues it."""
    if run[1] <= 0:
        return
    if runs and sum(runs[-1]) == run[0]:
        runs[-1] = runs[-1][0], runs[-1][1] + run[1]
    else:
        runs.append(run)


def slots_of(block_ids: list[int], block_tokens: int, start: int, stop: int) -> list[Run]:
    """Return device slots of token positions start..stop-1 in `block_ids`, in order."""
    runs: list[Run] = []
    for index in range(start // block_tokens, -(-stop // block_tokens)):
        first = max(start - index * block_tokens, 0)
        last = min(stop - index * block_tokens, block_tokens)
        extend(runs, (block_ids[index] * block_tokens + first, last - first))
    return runs


def part(runs: list[Run], start: int, stop: int) -> list[Run]:
    """The indices number start..stop-1 of `runs`."""
    chosen: list[Run] = []
    for first, count in runs:
        low, high = max(start, 0), min(stop, count)
        if low < high:
            chosen.append((first + low, high - low))
        start, stop = start - count, stop - count
    return chosen


class HostRows:
    """Free rows 0..rows-1; lowest ones first, so that copies lie in few runs."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise ValueError(f"host_tokens is {rows}; it must be 1 or more")
        self.rows = self.free = rows
        self._runs: list[Run] = [(0, rows)]  # disjoint, ascending, never adjacent

    def take(self, count: int) -> list[Run]:
        """`count` rows. Raises HostFull, and takes none, when there are fewer."""
        if count > self.free:
            raise HostFull(
                f"the host has room for {self.free} of {self.rows} tokens, {count} shall be "
                "copied out; drop host "
                "copies, preempt by recompute, or give it more (host_tokens)"
            )
        taken, left = [], count
        while left:
            first, size = self._runs[0]
            used = min(size, left)
            taken.append((first, used))
            left -= used
            self._runs[:1] = [(first + used, size - used)] if used < size else []
        self.free -= count
        return taken

    def give(self, runs: Iterable[Run]) -> None:
        """Take rows back."""
        merged: list[Run] = []
        for run in sorted([*self._runs, *(run for run in runs if run[1])]):
            if merged and sum(merged[-1]) > run[0]:
                raise ValueError(f"host rows from {run[0]} on are free already")
            extend(merged, run)
        self._runs = merged
        self.free = sum(count for _, count in merged)


@dataclass
class _Copy:
    """A request's first `tokens` tokens on the host."""

    tokens: int
    rows: list[Run]
    written: int  # number of the order


class HostKv:
    """Which requests have KV on the host, and the orders of the step under way.

    host_tokens   token slots that the host has room for
    block_tokens  token slots a device block

    Rows that are given up become free with the next step: this step may still read them.
    """

    def __init__(self, host_tokens: int, block_tokens: int) -> None:
        self.host_rows = HostRows(host_tokens)
        self.block_tokens = block_tokens
        self.unfilled: tuple[str, ...] = ()
        self._number = 1  # of the orders being collected
        self._orders = Orders()
        self._copies: dict[str, _Copy] = {}
        self._coming: dict[str, int] = {}  # ordered back -> tokens computed without the host
        self._leaving: list[Run] = []

    # -- orders ----------------------------------------------------------------------------------
    def swap_out(self, request_id: str, block_ids: list[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of a request that holds `block_ids` to the host, before
        this step's forward pass. Call it before the blocks are given away; they may be given away
        in this step.

        Raises HostFull when there is no room, ValueError when the request has a copy already, when
        `tokens` is not positive or does not fit the blocks.
        """
        if request_id in self._copies:
            raise ValueError(
                f"{request_id} is swapped out already; swap it in or drop its copy first"
            )
        if not 0 < tokens <= len(block_ids) * self.block_tokens:
            raise ValueError(
                f"{request_id}: {tokens} tokens to swap out of {len(block_ids)} blocks of "
                f"{self.block_tokens}"
            )
        rows = self.host_rows.take(tokens)
        self._orders.out.add(slots_of(block_ids, self.block_tokens, 0, tokens), rows)
        self._copies[request_id] = _Copy(tokens, rows, self._number)

    def swap_in(self, request_id: str) -> int:
        """Let the request resume in this step with its KV from the host; returns the tokens held
        there.

        It is an offer to the scheduler for this step. If the request is not resumed (no blocks, no
        budget), the copy stays, and `unfilled` names the request after the step. Raises ValueError
        without a copy.
        """
        if request_id not in self._copies:
            raise ValueError(f"{request_id} has no copy on the host; nothing to swap in")
        self._coming.setdefault(request_id, 0)
        return self._copies[request_id].tokens

    def drop(self, request_id: str) -> None:
        """Forget all that the host holds of a request; nothing happens when there is nothing."""
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            self._leaving += copy.rows
        self._coming.pop(request_id, None)

    def drop_all(self) -> None:
        """Forget everything; requests that were swapped out will be recomputed."""
        for request_id in [*self._copies]:
            self.drop(request_id)

    def _held_rows(self) -> Iterator[Run]:
        return (run for copy in self._copies.values() for run in copy.rows)

    # -- questions -------------------------------------------------------------------------------
    def held(self, request_id: str) -> int:
        """Tokens of a swapped-out request on the host; 0 when it is not swapped out."""
        copy = self._copies.get(request_id)
        return copy.tokens if copy is not None else 0

    @property
    def free_tokens(self) -> int:
        """Room on the host, in tokens."""
        return self.host_rows.free

    # -- the engine's scheduler asks and tells ---------------------------------------------------
    def missing(self, request_id: str, computed: int, known: int) -> int:
        """Tokens that the host adds to the first `computed` ones of a request that is ordered back.
        Its last known token (of `known`) is left out: the step must compute one."""
        if request_id not in self._coming:
            return 0
        self._coming[request_id] = computed
        return max(0, min(self._copies[request_id].tokens, known - 1) - computed)

    def resumed(self, request_id: str, block_ids: list[int], tokens: int) -> None:
        """The request was given `block_ids`, and `tokens` of its tokens come from the host. Its
        copy is given up: it is on the device now, or is being computed anew there."""
        if tokens:
            start, copy = self._coming[request_id], self._copies[request_id]
            self._orders.back.add(
                slots_of(block_ids, self.block_tokens, start, start + tokens),
                part(copy.rows, start, start + tokens),
                copy.written,
            )
        self.drop(request_id)

    def take_orders(self) -> Orders:
        """What this step shall do; the next one starts with none."""
        orders, self._orders = self._orders, Orders()
        if orders.out.rows or orders.back.rows:
            orders.number = self._number
            self._number += 1
        self.unfilled = tuple(self._coming)
        self._coming.clear()
        self.host_rows.give(self._leaving)
        self._leaving = []
        return orders

    def check(self) -> None:
        """Every row is free, held once, or about to be free. Raises RuntimeError otherwise."""
        whole = HostRows(self.host_rows.rows)
        whole.take(whole.rows)
        try:
            whole.give(self.host_rows._runs)
            whole.give([*self._held_rows(), *self._leaving])
        except ValueError as error:
            raise RuntimeError(f"host rows are not conserved: {error}") from error
        if whole.free != whole.rows:
            raise RuntimeError(f"host rows are not conserved: {whole.rows - whole.free} are lost")
