"""Echo's offline part (Sec. 4.1): by eq. 4 (`rank`, `climb`), or first come first served for the
rungs without it; the threshold of Sec. 4.2; which rows to preempt (Sec. 6)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from twinserve.policies.echo.climb import Climb
from twinserve.policies.echo.options import EchoOptions
from twinserve.policies.echo.parts import NOBODY, StepInProgress, phases
from twinserve.policies.echo.pool import FcfsPool, OfflinePool
from twinserve.policies.echo.rank import Rank
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.requests import RequestTable


class Window:
    """Mean and standard deviation of the last `size` whole numbers. Sums are whole numbers too, so
    nothing drifts."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.values: deque[int] = deque(maxlen=self.size)
        self._sum = 0
        self._squares = 0

    def add(self, value: int, times: int = 1) -> None:
        for _ in range(min(times, self.size)):
            if len(self.values) == self.size:
                oldest = self.values[0]
                self._sum -= oldest
                self._squares -= oldest * oldest
            self.values.append(value)
            self._sum += value
            self._squares += value * value

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return self._sum / len(self.values) if self.values else 0.0

    @property
    def deviation(self) -> float:
        n = len(self.values)
        return math.sqrt(n * self._squares - self._sum * self._sum) / n if n else 0.0

    def high(self, sigmas: float) -> float:
        """mu + sigmas * sigma."""
        return self.mean + sigmas * self.deviation


class MemoryForecast:
    """The KV memory that online requests may need soon: mu + sigmas * sigma of their memory over
    the last `window_s` seconds.

    It is sampled every `every_s` seconds of the engine's clock, so the forecast does not depend on
    the number of questions.
    """

    def __init__(self, sigmas: float = 2.0, window_s: float = 3600.0, every_s: float = 1.0) -> None:
        self.sigmas = sigmas
        self.every_s = every_s
        self.window = Window(round(window_s / every_s))
        self._taken = 0  # samples so far; the next one is due at _taken * every_s
        self.blocks = 0

    @property
    def next_s(self) -> float:
        """When the next sample is due, seconds."""
        return self._taken * self.every_s

    def remember(self, held: Iterable[int]) -> None:
        """Samples from before the clock began, blocks, the oldest first; before the first
        `observe`."""
        for blocks in held:
            self.window.add(blocks)
        self.blocks = math.ceil(self.window.high(self.sigmas))

    def observe(self, now: float, held: int) -> None:
        """Online requests hold `held` blocks, and have since the last plan: samples that came due
        take that value."""
        due = 0
        while (self._taken + due) * self.every_s <= now:
            due += 1
            if due > self.window.size:  # long idle: the whole window has one value
                due = max(due, int(now / self.every_s) - self._taken)
        if due:
            self._taken += due
            self.window.add(held, due)
            self.blocks = math.ceil(self.window.high(self.sigmas))

    def reserve(self, held: int) -> int:
        """Blocks to leave free for online requests that hold `held` now."""
        return max(0, self.blocks - held)


class ArrivalForecast:
    """The arrival rate to expect: mu + sigmas * sigma of the arrivals per bin over the last
    `window_s` seconds (Fig. 11)."""

    def __init__(self, window_s: float = 900.0, bin_s: float = 60.0, sigmas: float = 0.0) -> None:
        self.bin_s = bin_s
        self.sigmas = sigmas
        self.window = Window(round(window_s / bin_s))
        self._bin = 0
        self._count = 0

    def arrive(self, now: float) -> None:
        """A request arrives at `now` (seconds, not decreasing)."""
        self._close(now)
        self._count += 1

    def _close(self, now: float) -> None:
        """Bins that ended before `now` enter the window."""
        current = int(now // self.bin_s)
        if current > self._bin:
            self.window.add(self._count)
            self.window.add(0, current - self._bin - 1)
            self._bin, self._count = current, 0

    def rate(self, now: float) -> float:
        """Requests a second expected at `now`, from bins that ended; 0 before the first one
        ends."""
        self._close(now)
        return self.window.high(self.sigmas) / self.bin_s


class OfflineRequests:
    """pool       those that are queued; running: with KV
    forecast   of online memory, if the threshold is on
    last       int64[n]: rows of the last plan
    selection  the choice by eq. 4, if on"""

    def __init__(self, options: EchoOptions) -> None:
        self.options = options
        self.running = RowSet()
        self.pool = OfflinePool(options.length_buckets) if options.kv_aware else FcfsPool()
        self.forecast = (
            MemoryForecast(options.sigmas, options.history_s, options.sample_s)
            if options.threshold
            else None
        )
        self.last = np.zeros(0, np.int64)
        self._prompts = NOBODY, NOBODY  # of the rows asked last: tokens of their prompts
        self.selection = (Rank if options.offline == "rank" else Climb)(self)

    def serve(self, step: StepInProgress) -> bool:
        """Whether the pool is shut: what is first in it found no memory, which no decode will
        change."""
        if not len(self.running) and not len(self.pool):
            return True
        decodes, prompts = step.here(self.running.rows)
        if self.options.kv_aware:
            self.selection.serve(step, decodes, prompts)
            return not len(self.pool)
        return self._in_order(step, decodes, prompts)

    # -- first come, first served ------------------------------------------------------------------
    def _in_order(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> bool:
        resident = step.requests.computed_tokens[decodes]
        self.decode(step, decodes, resident, self.fitting(step, resident))
        requests = step.requests
        for row in prompts.tolist():
            computed = int(requests.computed_tokens[row])
            new = step.chunk(int(requests.known_tokens(row)) - computed, computed)
            if new <= 0 or step.seats <= 0:
                return False
            if row not in step.dropped:
                self.continue_prompt(step, row, new, computed)
        while len(self.pool) and step.seats > 0 and step.tokens > 0:
            row, hit = self.pool.best(step.ledger)[0]
            if row in step.dropped:
                return False
            new = step.chunk(int(requests.known_tokens(row)) - hit, hit)
            if new <= 0:
                return False
            if not self.admit(step, row, new, hit):
                return True
        return not len(self.pool)

    def fitting(self, step: StepInProgress, resident: np.ndarray) -> int:
        """How many decodes from the front keep the iteration within its bound."""
        n = max(0, min(len(resident), step.seats, step.tokens))
        if step.bound == np.inf or not n:
            return n
        lengths = resident[:n].tolist()
        if step.seconds_with(n, sum(lengths), max(lengths)) <= step.bound:
            return n
        total = longest = 0
        for k, length in enumerate(lengths):
            total, longest = total + length, max(longest, length)
            if step.seconds_with(k + 1, total, longest) > step.bound:
                return k
        return n

    # -- memory ------------------------------------------------------------------------------------
    @staticmethod
    def grow_together(step: StepInProgress, rows: np.ndarray, resident: np.ndarray) -> bool:
        """Grant all a token each, if there is free memory for that."""
        if not len(rows):
            return True
        ledger = step.ledger
        if np.count_nonzero(ledger.missing_tokens(rows)) or not ledger.grow_all(rows, resident + 1):
            return False
        step.grant_decodes(rows, resident)
        return True

    def decode(self, step: StepInProgress, rows: np.ndarray, resident: np.ndarray, k: int) -> None:
        """Grant the first `k` a token each. One that finds no memory takes that of others, or is
        left out."""
        rows, resident = rows[:k], resident[:k]
        if self.grow_together(step, rows, resident):
            return
        for row, tokens in zip(rows.tolist(), resident.tolist(), strict=True):
            if row not in step.dropped and self.grow(step, row, tokens + 1, True):
                step.grant_decodes(np.array([row]), np.array([tokens]))

    def grow(self, step: StepInProgress, row: int, tokens: int, evict: bool) -> bool:
        need = -(-tokens // step.ledger.block_tokens) - step.ledger.held_blocks(row)

        def victims() -> Iterator[int]:
            return self.victims(step, row, need) if evict else iter(())

        dropped = step.acquire(lambda: step.ledger.grow(row, tokens), victims)
        for other in dropped or ():
            self.wait_again(other)
        return dropped is not None

    def wait_again(self, row: int) -> None:
        """It lost its memory."""
        self.running.discard(row)
        self.pool.put_back(row)

    def continue_prompt(
        self, step: StepInProgress, row: int, new: int, resident: int, keep: int = 0
    ) -> bool:
        """keep: blocks that decodes will take."""
        ledger = step.ledger
        if keep and -(-(resident + new) // ledger.block_tokens) - ledger.held_blocks(row) > max(
            0, ledger.free_blocks - keep
        ):
            return False
        # Its memory was promised to it. Where that has gone to online requests, it waits rather
        # than evict, unless nothing else runs.
        if not self.grow(step, row, resident + new, evict=not len(step) and not step.considered):
            return False
        step.grant_prompt(row, new, resident)
        self.computed(step.requests, ledger, row, resident, resident + new)
        return True

    def admit(self, step: StepInProgress, row: int, new: int, hit: int, keep: int = 0) -> bool:
        """Begin a queued prompt, if all of it fits below the threshold. keep: blocks that decodes
        will take."""
        ledger = step.ledger
        known = int(step.requests.known_tokens(row))
        keep += step.promised_blocks(step.online, self.running.rows)
        if len(step.online) or len(self.running):
            keep += self.reserved_blocks(step)
        if hit != ledger.hit_tokens(row) or not ledger.admit(row, hit + new, hit, keep, known):
            return False
        shared = self.pool.shared_blocks(row) * ledger.block_tokens
        self.pool.take(row, leads=hit < min(shared, known - 1))
        self.running.add(row)
        step.plan.admitted.append((row, hit))
        step.grant_prompt(row, new, hit, hit)
        self.computed(step.requests, ledger, row, hit, hit + new)
        return True

    def reserved_blocks(self, step: StepInProgress) -> int:
        """What the threshold keeps free for online requests (Sec. 4.2, 5.3)."""
        if self.forecast is None:
            return 0
        return self.forecast.reserve(step.ledger.usage().real_time)

    def computed(
        self, requests: RequestTable, ledger: KvLedger, row: int, before: int, after: int
    ) -> None:
        """A prompt is computed from so many tokens on up to so many: others may find its text."""
        size = ledger.block_tokens
        self.pool.passed(row, after // size)
        self.pool.computed(requests.prefix[row], before // size)

    def phases(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """As `OnlineRequests.phases`."""
        known, prompts = self._prompts
        if known is not rows:
            prompts = requests.prompt_tokens[rows]
            self._prompts = rows, prompts
        return phases(rows, prompts, requests)

    def victims(self, step: StepInProgress, row: int, need: int) -> Iterator[int]:
        """Offline requests that may lose their memory to `row`, which needs `need` blocks.

        By reward: the one whose loss punishes least, which is the one with the fewest blocks of its
        own among those that are enough alone; if none is, the one with most, and so on. Else the
        last to arrive.
        """
        ledger = step.ledger
        left = [
            r
            for r in self.running.rows.tolist()
            if r != row and r not in step.granted and r not in step.dropped
        ]
        if not self.options.kv_aware:
            yield from reversed(left)
            return
        while left:
            missing = need - ledger.free_blocks
            gains = [(ledger.gained_blocks(row, victim), -victim) for victim in left]
            enough = [gain for gain in gains if gain[0] >= missing]
            victim = -(min(enough) if enough else max(gains))[1]
            left.remove(victim)
            yield victim
