"""Echo's offline part (Sec. 4.1): plan edits by reward, or first come first served for the rungs without it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .echo_parts import StepInProgress, rate


class OfflinePart:
    """Mixed into EchoPolicy."""

    def _serve_offline(self, step: StepInProgress) -> bool:
        """Whether the pool is shut: what is first in it found no memory, which no decode will change."""
        if not len(self.offline) and not len(self.pool):
            return True
        rows = self._here(self.offline.rows, step)
        decoding = self._decoding(rows, step.requests)
        if self.options.kv_aware:
            self._by_reward(step, rows[decoding], rows[~decoding])
            return not len(self.pool)
        return self._in_order(step, rows[decoding], rows[~decoding])

    # -- first come, first served ------------------------------------------------------------------------------
    def _in_order(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> bool:
        resident = step.requests.computed_tokens[decodes]
        self._decode_offline(step, decodes, resident, self._fitting(step, resident))
        requests = step.requests
        for row in prompts.tolist():
            computed = int(requests.computed_tokens[row])
            new = self._chunk(step, int(requests.known_tokens(row)) - computed, computed)
            if new <= 0 or step.seats <= 0:
                return False
            if row not in step.dropped:
                self._continue_prompt(step, row, new, computed)
        while len(self.pool) and step.seats > 0 and step.tokens > 0:
            row, hit = self.pool.best(step.ledger)[0]
            if row in step.dropped:
                return False
            new = self._chunk(step, int(requests.known_tokens(row)) - hit, hit)
            if new <= 0:
                return False
            if not self._admit_offline(step, row, new, hit):
                return True
        return not len(self.pool)

    def _fitting(self, step: StepInProgress, resident: np.ndarray) -> int:
        """How many decodes from the front keep the iteration within its bound."""
        n = max(0, min(len(resident), step.seats, step.tokens))
        if not self.options.slo_aware or step.bound == np.inf or not n:
            return n
        lengths = resident[:n].tolist()
        if self._seconds_with(step, n, sum(lengths), max(lengths)) <= step.bound:
            return n
        total = longest = 0
        for k, length in enumerate(lengths):
            total, longest = total + length, max(longest, length)
            if self._seconds_with(step, k + 1, total, longest) > step.bound:
                return k
        return n

    def _seconds_with(self, step: StepInProgress, n: int, total: int, longest: int) -> float:
        return self.cost.seconds(step.prefills, *step.with_decodes(n, total, longest))

    # -- by reward ---------------------------------------------------------------------------------------------
    def _by_reward(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> None:
        """Hill climbing on eq. 4 from the last batch, one request at a time.

        All decodes count the same and take the longer, the longer their context is (eq. 7: by maximum and mean). So the
        best one to leave out is the longest, the best one to add the shortest: a batch holds the k shortest.
        """
        resident = step.requests.computed_tokens[decodes]
        order = np.argsort(resident, kind="stable")
        decodes, resident = decodes[order], resident[order]
        k = self._climb(step, decodes, resident)
        self._decode_offline(step, decodes, resident, k)
        under_way = prompts.tolist()
        refused: set[int] = set()  # only asked
        while step.seats > 0 and step.tokens > 0:
            if self._add_best_prompt(step, under_way, refused):
                continue
            if k < len(decodes) and int(decodes[k]) not in step.dropped and self._pays(step, int(resident[k])):
                self._decode_offline(step, decodes[k:], resident[k:], 1)
                k += 1
                continue
            return

    def _climb(self, step: StepInProgress, decodes: np.ndarray, resident: np.ndarray) -> int:
        """How many of the decodes (shortest first) to take: from as many as in the last batch, one less or one more at a
        time while the reward rises and the bound is kept."""
        limit = max(0, min(len(decodes), step.seats, step.tokens))
        k = min(limit, int(np.isin(decodes, self._last).sum()))
        totals = [0, *np.cumsum(resident).tolist()]
        lengths = [0, *resident.tolist()]
        known: dict[int, float] = {}

        def seconds(k: int) -> float:
            if k not in known:
                known[k] = self._seconds_with(step, k, totals[k], lengths[k])
            return known[k]

        def reward(k: int) -> float:
            return rate(step.benefit + step.b_decode * k, seconds(k))

        bound = step.bound if self.options.slo_aware else np.inf
        while k and seconds(k) > bound:
            k -= 1
        start = k
        while k < limit and seconds(k + 1) <= bound and reward(k + 1) > reward(k):
            k += 1
        if k == start:
            while k and reward(k - 1) > reward(k) and seconds(k - 1) <= bound:
                k -= 1
        return k

    def _pays(self, step: StepInProgress, resident: int) -> bool:
        seconds = self._seconds_with(step, 1, resident, resident)
        in_time = seconds <= step.bound or not self.options.slo_aware
        return in_time and rate(step.benefit + step.b_decode, seconds) > step.reward()

    def _add_best_prompt(self, step: StepInProgress, under_way: list[int], refused: set[int]) -> bool:
        """Add the prompt or chunk that raises the reward most, if any does; False where none was added or refused."""
        requests, ledger = step.requests, step.ledger
        begun = [row for row in under_way if row not in step.granted and row not in step.dropped]
        candidates = [(row, int(requests.computed_tokens[row]), 0) for row in begun if row not in refused]
        candidates += [(row, hit, hit) for row, hit in self.pool.best(ledger) if row not in refused | step.dropped]
        best, best_reward = None, step.reward()
        for row, resident, hit in candidates:
            left = int(requests.known_tokens(row)) - resident
            new = self._chunk(step, left, resident)
            # One prompt at a time is computed piece by piece; others may overtake it where they end in this iteration.
            if new <= 0 or (new < left and under_way and row not in begun):
                continue
            lost = self._lost_tokens(step, row, resident + new)
            seconds = self.cost.seconds([*step.prefills, (new, resident)], *step.decodes)
            reward = rate(step.benefit + hit + new - lost, seconds)
            if reward > best_reward:
                best, best_reward = (row, new, resident, hit, lost), reward
        if best is None:
            return False
        row, new, resident, hit, lost = best
        ends = resident + new == int(requests.known_tokens(row))
        if row in begun:
            done = self._continue_prompt(step, row, new, resident)
            if done and ends:
                under_way.remove(row)
        else:
            done = self._admit_offline(step, row, new, hit)
            if done and not ends:
                under_way.append(row)
        if done:
            step.benefit -= lost
        else:
            refused.add(row)
        return True

    @staticmethod
    def _lost_tokens(step: StepInProgress, row: int, tokens: int) -> int:
        """The punishment (eq. 2): needed tokens that memory for the row up to `tokens` would push out of the cache."""
        lost = getattr(step.ledger, "lost_tokens", None)
        if lost is None:
            return 0
        held = step.ledger.held_blocks(row) * step.ledger.block_tokens
        return lost(tokens - (held or step.ledger.hit_tokens(row)))

    # -- memory ------------------------------------------------------------------------------------------------
    def _decode_offline(self, step: StepInProgress, rows: np.ndarray, resident: np.ndarray, k: int) -> None:
        """Grant the first `k` a token each. One that finds no memory takes that of others, or is left out."""
        rows, resident = rows[:k], resident[:k]
        if not len(rows):
            return
        if not step.ledger.missing_tokens(rows).any() and step.ledger.grow_all(rows, resident + 1):
            step.grant_decodes(rows, resident)
            return
        for row, tokens in zip(rows.tolist(), resident.tolist(), strict=True):
            if row not in step.dropped and self._grow_offline(step, row, tokens + 1, True):
                step.grant_decodes(np.array([row]), np.array([tokens]))

    def _grow_offline(self, step: StepInProgress, row: int, tokens: int, evict: bool) -> bool:
        need = -(-tokens // step.ledger.block_tokens) - step.ledger.held_blocks(row)

        def victims() -> Iterator[int]:
            return self._offline_victims(step, row, need) if evict else iter(())

        dropped = step.acquire(lambda: step.ledger.grow(row, tokens), victims)
        for other in dropped or ():
            self._wait_again(other)
        return dropped is not None

    def _continue_prompt(self, step: StepInProgress, row: int, new: int, resident: int) -> bool:
        # Its memory was promised to it. Where that has gone to online requests, it waits rather than evict, unless
        # nothing else runs.
        if not self._grow_offline(step, row, resident + new, evict=not len(step)):
            return False
        step.grant_prompt(row, new, resident)
        self._computed(step, row, resident, resident + new)
        return True

    def _admit_offline(self, step: StepInProgress, row: int, new: int, hit: int) -> bool:
        """Begin a queued prompt, if all of it fits below the threshold."""
        ledger = step.ledger
        known = int(step.requests.known_tokens(row))
        keep = self._promised_blocks(step, self.online.rows, self.offline.rows)
        if len(self.online) or len(self.offline):
            keep += self._reserved_blocks(step)
        if hit != ledger.hit_tokens(row) or not ledger.admit(row, hit + new, hit, keep, known):
            return False
        shared = self.pool.shared_blocks(row) * ledger.block_tokens
        self.pool.take(row, leads=hit < min(shared, known - 1))
        self.offline.add(row)
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

    def _offline_victims(self, step: StepInProgress, row: int, need: int) -> Iterator[int]:
        """Offline requests that may lose their memory to `row`, which needs `need` blocks.

        By reward: the one whose loss punishes least, which is the one with the fewest blocks of its own among those that
        are enough alone; if none is, the one with most, and so on. Else the last to arrive.
        """
        ledger = step.ledger
        left = [r for r in self.offline.rows.tolist() if r != row and r not in step.granted and r not in step.dropped]
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
