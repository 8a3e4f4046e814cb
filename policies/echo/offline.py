"""Echo's offline part (Sec. 4.1): plan edits by reward (eqs. 2 and 4), or first come first served
for the rungs without it; the threshold of Sec. 4.2; whom to preempt (Sec. 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from twinserve.policies.echo.forecast import MemoryForecast
from twinserve.policies.echo.options import EchoOptions
from twinserve.policies.echo.parts import (
    AddedPrompt,
    OfflineDecodes,
    StepInProgress,
    decoding,
    rate,
)
from twinserve.policies.echo.pool import FcfsPool, OfflinePool
from twinserve.policies.parts.deadlines import RowSet


class OfflineRequests:
    """pool      those that are queued; running: with KV
    forecast  of online memory, where the threshold is on
    last      int64[n]: rows of the last plan
    """

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

    def serve(self, step: StepInProgress) -> bool:
        """Whether the pool is shut: what is first in it found no memory, which no decode will
        change."""
        if not len(self.running) and not len(self.pool):
            return True
        rows = step.here(self.running.rows)
        decode = decoding(rows, step.requests)
        if self.options.kv_aware:
            self._by_reward(step, rows[decode], rows[~decode])
            return not len(self.pool)
        return self._in_order(step, rows[decode], rows[~decode])

    # -- first come, first served ------------------------------------------------------------------
    def _in_order(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> bool:
        resident = step.requests.computed_tokens[decodes]
        self._decode_offline(step, decodes, resident, self._fitting(step, resident))
        requests = step.requests
        for row in prompts.tolist():
            computed = int(requests.computed_tokens[row])
            new = step.chunk(int(requests.known_tokens(row)) - computed, computed)
            if new <= 0 or step.seats <= 0:
                return False
            if row not in step.dropped:
                self._continue_prompt(step, row, new, computed)
        while len(self.pool) and step.seats > 0 and step.tokens > 0:
            row, hit = self.pool.best(step.ledger)[0]
            if row in step.dropped:
                return False
            new = step.chunk(int(requests.known_tokens(row)) - hit, hit)
            if new <= 0:
                return False
            if not self._admit_offline(step, row, new, hit):
                return True
        return not len(self.pool)

    def _fitting(self, step: StepInProgress, resident: np.ndarray) -> int:
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

    # -- by reward ---------------------------------------------------------------------------------
    def _by_reward(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> None:
        """Hill climbing on eq. 4 from the last batch, one request at a time, until no single edit
        raises it: to add a prompt, to add a decode, to leave out either, to make a chunk longer.

        All decodes count the same and take the longer, the longer their context is (eq. 7: by
        maximum and mean). So the best one to leave out is the longest, the best one to add the
        shortest: a batch holds the k shortest.
        """
        ready = OfflineDecodes(decodes, step.requests.computed_tokens, step.ledger)
        under_way = prompts.tolist()
        self.pool.keep()
        self._search(step, ready, under_way)
        self._keep_added(step)
        self._decode_considered(step, ready)
        if not len(step):  # no decode finds memory: a prompt may
            self._add_prompts(step, ready, under_way, [])
            self._keep_added(step)
        if not len(step):
            self._serve_whoever(step, prompts)

    def _serve_whoever(self, step: StepInProgress, prompts: np.ndarray) -> None:
        """Nothing pays where all memory that is left holds text that others want; to do nothing
        would be for ever."""
        requests = step.requests
        for row in prompts.tolist():
            computed = int(requests.computed_tokens[row])
            new = step.chunk(int(requests.known_tokens(row)) - computed, computed)
            if (
                new > 0
                and row not in step.dropped
                and self._continue_prompt(step, row, new, computed)
            ):
                return
        if len(prompts):  # one in pieces at a time
            return
        for row, hit in self.pool.best(step.ledger):
            new = step.chunk(int(requests.known_tokens(row)) - hit, hit)
            if new > 0 and row not in step.dropped and self._admit_offline(step, row, new, hit):
                return

    def _search(self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int]) -> None:
        left_out: list[int] = []
        barred: list[int] = []
        self._climb(step, ready, int(np.isin(ready.rows, self.last).sum()))
        while self._add_prompts(step, ready, under_way, barred):
            if self.options.edits == "adding":
                return
            edited = self._climb(step, ready, step.considered)
            while (edited or len(step.added) > 1) and (
                self._leave_out_prompt(step, ready, under_way, left_out)
                or (edited and self._lengthen_chunk(step, ready, under_way))
            ):
                edited = True
                self._climb(step, ready, step.considered)
            if not edited:
                return
            # There may be memory now. By eq. 4 what was left out does not come back but for
            # rounding: not for ever.
            barred = [row for row, times in Counter(left_out).items() if times > 1]

    def _keep_added(self, step: StepInProgress) -> None:
        if step.added:
            step.ledger.commit(step.added[0].mark)

    def _climb(self, step: StepInProgress, ready: OfflineDecodes, k: int) -> bool:
        """Consider as many of the decodes (shortest first) as pay: from k, one less or one more at
        a time while the reward rises and the bound is kept. Whether that is another number than
        before."""
        limit = max(0, min(len(ready), step.seats + step.considered, step.tokens + step.considered))
        k = min(limit, k)
        known: dict[int, float] = {}

        def seconds(k: int) -> float:
            if k not in known:
                known[k] = step.seconds_with(k, ready.totals[k], ready.longest[k])
            return known[k]

        def reward(k: int) -> float:
            return rate(step.benefit_with(k), seconds(k))

        while k and seconds(k) > step.bound:
            k -= 1
        start = k
        while k < limit and seconds(k + 1) <= step.bound and reward(k + 1) > reward(k):
            k += 1
        if k == start:
            while k and reward(k - 1) > reward(k) and seconds(k - 1) <= step.bound:
                k -= 1
        before = step.considered
        step.consider(k, ready.totals[k], ready.longest[k])
        return k != before

    def _add_prompts(
        self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int], barred: list[int]
    ) -> bool:
        """Add the best one while one raises the reward. Whether any was added."""
        before = len(step.added)
        refused = set(barred)  # only asked
        while step.seats > 0 and step.tokens > 0:
            added = len(step.added)
            if not self._add_best_prompt(step, ready, under_way, refused):
                break
            # one that ends in this iteration needs nothing more: there may be memory for others
            if len(step.added) > added:
                refused = set(barred)
        return len(step.added) > before

    def _add_best_prompt(
        self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int], refused: set[int]
    ) -> bool:
        """Add the prompt or chunk that raises the reward most, if any does; False where none was
        added or refused."""
        requests, ledger = step.requests, step.ledger
        begun = [row for row in under_way if row not in step.granted and row not in step.dropped]
        candidates = [
            (row, int(requests.computed_tokens[row]), 0) for row in begun if row not in refused
        ]
        found = self.pool.best(ledger)
        candidates += [
            (row, hit, hit) for row, hit in found if row not in refused and row not in step.dropped
        ]
        best, best_reward = None, step.reward()
        for row, resident, hit in candidates:
            left = int(requests.known_tokens(row)) - resident
            new = step.chunk(left, resident)
            # One prompt at a time is computed piece by piece; others may overtake it where they end
            # in this iteration.
            if new <= 0 or (new < left and under_way and row not in begun):
                continue
            lost = self._lost_tokens(step, ready, row, resident + new)
            seconds = step.cost.seconds([*step.prefills, (new, resident)], *step.decodes)
            reward = rate(step.benefit + (hit + new - lost), seconds)
            if reward > best_reward:
                best, best_reward = (row, new, resident, hit), reward
        if best is None:
            return False
        if not self._add_prompt(step, ready, under_way, *best):
            refused.add(best[0])
        return True

    def _add_prompt(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        row: int,
        new: int,
        resident: int,
        hit: int,
    ) -> bool:
        """With its memory, in a try of the ledger: False and nothing changed where it finds
        none."""
        queued, others = row in self.pool, len(step.plan.preempted)
        lost, before = self._lost_tokens(step, ready, row, resident + new), tuple(under_way)
        led, keep = self.pool.leads(row), ready.growth(step.considered)
        mark = step.ledger.mark()
        if not (
            self._admit_offline(step, row, new, hit, keep)
            if queued
            else self._continue_prompt(step, row, new, resident, keep)
        ):
            step.ledger.rollback(mark)
            return False
        fixed = len(step.plan.preempted) > others
        step.record(AddedPrompt(row, new, resident, hit, lost, queued, led, before, mark, fixed))
        ends = resident + new == int(step.requests.known_tokens(row))
        if queued and not ends:
            under_way.append(row)
        elif ends and not queued:
            under_way.remove(row)
        return True

    def _leave_out_prompt(
        self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int], left_out: list[int]
    ) -> bool:
        """Leave out that of the added prompts without which the reward is highest, if it is higher
        then."""
        added = step.added
        best, best_reward = None, step.reward()
        for i, prompt in enumerate(added):
            others = step.prefills_without(i)
            seconds = step.cost.seconds(others, *step.decodes)
            reward = rate(step.benefit - prompt.benefit, seconds)
            if (
                reward > best_reward
                and seconds <= step.bound
                and not prompt.fixed
                and not self._is_built_on(step, i)
            ):
                best, best_reward = i, reward
        if best is None:
            return False
        left_out.append(added[best].row)
        before = step.reward()
        taken = self._take_back(step, best, under_way)
        self._put_behind(step, ready, under_way, taken[1:])
        return self._is_better(step, ready, under_way, best, taken, before)

    def _lengthen_chunk(
        self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int]
    ) -> bool:
        """Where others left, there is more time for a chunk: make that one longer which raises the
        reward most."""
        best, best_new, best_reward = None, 0, step.reward()
        for i, prompt in enumerate(step.added):
            left = int(step.requests.known_tokens(prompt.row)) - prompt.resident
            if prompt.fixed or prompt.new == left or self._is_built_on(step, i):
                continue
            others = step.prefills_without(i)
            new = step.longest_chunk(others, prompt.resident, min(left, step.tokens + prompt.new))
            if new <= prompt.new:
                continue
            more = (
                new - prompt.new - self._lost_tokens(step, ready, prompt.row, prompt.resident + new)
            )
            reward = rate(
                step.benefit + more,
                step.cost.seconds([*others, (new, prompt.resident)], *step.decodes),
            )
            if reward > best_reward:
                best, best_new, best_reward = i, new, reward
        if best is None:
            return False
        before = step.reward()
        taken = self._take_back(step, best, under_way)
        if self._add_prompt(
            step, ready, under_way, taken[0].row, best_new, taken[0].resident, taken[0].hit
        ):
            self._put_behind(step, ready, under_way, taken[1:])
        return self._is_better(step, ready, under_way, best, taken, before)

    def _is_better(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        first: int,
        taken: list[AddedPrompt],
        before: float,
    ) -> bool:
        """Whether the reward is higher than `before`. If not, as what others cost has changed with
        the edit, it is undone: `taken` are the prompts from number `first` on."""
        if step.reward() > before:
            return True
        if len(step.added) > first:
            self._take_back(step, first, under_way)
        self._put_behind(step, ready, under_way, taken)
        return False

    def _put_behind(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        prompts: list[AddedPrompt],
    ) -> None:
        """Add again what was behind a prompt of the plan that has changed. Other text may be cached
        now."""
        for prompt in prompts:
            new, resident, hit = prompt.new, prompt.resident, prompt.hit
            if prompt.admitted:
                hit = resident = step.ledger.hit_tokens(prompt.row)
                new = min(prompt.hit + prompt.new - hit, step.tokens)
            if new > 0:
                self._add_prompt(step, ready, under_way, prompt.row, new, resident, hit)

    def _take_back(
        self, step: StepInProgress, first: int, under_way: list[int]
    ) -> list[AddedPrompt]:
        """Number `first` of the added prompts and those after it, as if they had never been."""
        taken, mark = step.added[first:], step.added[first].mark
        while len(step.added) > first:
            prompt = step.withdraw()
            under_way[:] = prompt.under_way
            if prompt.admitted:
                step.plan.admitted.pop()
                self.running.discard(prompt.row)
                self.pool.put_back(prompt.row)
            elif prompt.led:
                self.pool.lead(prompt.row)
        step.ledger.rollback(mark)
        self.pool.ask_again()
        return taken

    @staticmethod
    def _is_built_on(step: StepInProgress, i: int) -> bool:
        """Whether a prompt of this plan begins with text that number `i` of the added ones computes
        in it; or is in pieces, which it may be as number `i`, begun before, ends."""
        prompt, texts = step.added[i], step.requests.prefix
        known = step.requests.known_tokens
        if not prompt.admitted and prompt.resident + prompt.new == known(prompt.row):
            if any(
                other.admitted and other.hit + other.new < known(other.row)
                for other in step.added[i + 1 :]
            ):
                return True
        first = prompt.resident // step.ledger.block_tokens
        text = texts[prompt.row]
        if text is None:
            return False
        for later in step.added[i + 1 :]:
            found, other = later.hit // step.ledger.block_tokens, texts[later.row]
            if (
                found > first
                and other is not None
                and np.array_equal(text[: first + 1], other[: first + 1])
            ):
                return True
        return False

    @staticmethod
    def _lost_tokens(step: StepInProgress, ready: OfflineDecodes, row: int, tokens: int) -> int:
        """The punishment (eq. 2): needed tokens that memory for the row up to `tokens`, beside that
        of the decodes, would push out of the cache."""
        size, lost = step.ledger.block_tokens, step.ledger.lost_tokens
        tokens -= step.ledger.held_blocks(row) * size or step.ledger.hit_tokens(row)
        grown = ready.growth(step.considered) * size
        return lost(grown + tokens) - lost(grown) if grown else lost(tokens)

    # -- memory ------------------------------------------------------------------------------------
    def _decode_considered(self, step: StepInProgress, ready: OfflineDecodes) -> None:
        """Grant those that are considered. Where one finds no memory, or takes that of another one
        of them, it is decided anew how many of those behind it pay."""
        k, i = step.considered, 0
        step.consider(0, 0, 0)
        if self._grow_together(step, ready.rows[:k], ready.resident[:k]):
            return
        while i < k:
            row, tokens, dropped = int(ready.rows[i]), int(ready.resident[i]), len(step.dropped)
            found = self._grow_offline(step, row, tokens + 1, True)
            if found:
                step.grant_decodes(np.array([row]), np.array([tokens]))
            i += 1
            lost = ready.rows[i:k].tolist() if len(step.dropped) > dropped else []
            gone = sum(other in step.dropped for other in lost)
            if gone or not found:
                ready = ready.behind(i, step.dropped)
                self._climb(step, ready, k - i - gone)
                k, i = step.considered, 0
                step.consider(0, 0, 0)

    @staticmethod
    def _grow_together(step: StepInProgress, rows: np.ndarray, resident: np.ndarray) -> bool:
        """Grant all a token each, if there is free memory for that."""
        if len(rows) and (
            step.ledger.missing_tokens(rows).any() or not step.ledger.grow_all(rows, resident + 1)
        ):
            return False
        step.grant_decodes(rows, resident)
        return True

    def _decode_offline(
        self, step: StepInProgress, rows: np.ndarray, resident: np.ndarray, k: int
    ) -> None:
        """Grant the first `k` a token each. One that finds no memory takes that of others, or is
        left out."""
        rows, resident = rows[:k], resident[:k]
        if self._grow_together(step, rows, resident):
            return
        for row, tokens in zip(rows.tolist(), resident.tolist(), strict=True):
            if row not in step.dropped and self._grow_offline(step, row, tokens + 1, True):
                step.grant_decodes(np.array([row]), np.array([tokens]))

    def _grow_offline(self, step: StepInProgress, row: int, tokens: int, evict: bool) -> bool:
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

    def _continue_prompt(
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
        if not self._grow_offline(
            step, row, resident + new, evict=not len(step) and not step.considered
        ):
            return False
        step.grant_prompt(row, new, resident)
        self._computed(step, row, resident, resident + new)
        return True

    def _admit_offline(
        self, step: StepInProgress, row: int, new: int, hit: int, keep: int = 0
    ) -> bool:
        """Begin a queued prompt, if all of it fits below the threshold. keep: blocks that decodes
        will take."""
        ledger = step.ledger
        known = int(step.requests.known_tokens(row))
        keep += step.promised_blocks(step.online, self.running.rows)
        if len(step.online) or len(self.running):
            keep += self._reserved_blocks(step)
        if hit != ledger.hit_tokens(row) or not ledger.admit(row, hit + new, hit, keep, known):
            return False
        shared = self.pool.shared_blocks(row) * ledger.block_tokens
        self.pool.take(row, leads=hit < min(shared, known - 1))
        self.running.add(row)
        step.plan.admitted.append((row, hit))
        step.grant_prompt(row, new, hit, hit)
        self._computed(step, row, hit, hit + new)
        return True

    def _reserved_blocks(self, step: StepInProgress) -> int:
        """What the threshold keeps free for online requests (Sec. 4.2, 5.3)."""
        if self.forecast is None:
            return 0
        return self.forecast.reserve(step.ledger.usage().real_time)

    def _computed(self, step: StepInProgress, row: int, before: int, after: int) -> None:
        size = step.ledger.block_tokens
        self.pool.passed(row, after // size)
        self.pool.computed(step.requests.prefix[row], before // size)

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
