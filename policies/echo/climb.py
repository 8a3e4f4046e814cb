"""Hill climbing on eq. 4 by the edits of Sec. 4.1, leaving out included: `offline=climb`."""

from collections import Counter

import numpy as np

from twinserve.policies.echo.parts import AddedPrompt, OfflineDecodes, StepInProgress, rate
from twinserve.policies.echo.selection import Selection


class Climb(Selection):
    """From the last batch, one request at a time, until no single edit raises the reward."""

    def serve(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> None:
        """Hill climbing on eq. 4 from the last batch, one request at a time, until no single edit
        raises it. Edits add a prompt or a decode, leave out either, or make a chunk longer.

        All decodes count the same and take the longer, the longer their context is (eq. 7: by
        maximum and mean). So the best one to leave out is the longest, the best one to add the
        shortest: a batch holds the k shortest.
        """
        ready = OfflineDecodes(decodes, step.requests.computed_tokens, step.ledger)
        under_way = prompts.tolist()
        self.pool.keep()
        self._search(step, ready, under_way)
        self.keep_added(step)
        self._decode_considered(step, ready)
        if not len(step):  # no decode finds memory: a prompt may
            self.add_prompts(step, ready, under_way, [])
            self.keep_added(step)
        if not len(step):
            self.serve_whoever(step, prompts)

    def _search(self, step: StepInProgress, ready: OfflineDecodes, under_way: list[int]) -> None:
        left_out: list[int] = []
        barred: list[int] = []
        self._climb(step, ready, int(np.isin(ready.rows, self.offline.last).sum()))
        while self.add_prompts(step, ready, under_way, barred):
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

    def _climb(self, step: StepInProgress, ready: OfflineDecodes, k: int) -> bool:
        """Consider as many of the decodes (shortest first) as pay most within the bound, k of them
        if no other number pays more. Returns whether the number has changed.

        All numbers are looked at: the first decode takes the time of reading the weights for one
        token. So one edit may lower the reward although ten raise it.
        """
        limit = max(0, min(len(ready), step.seats + step.considered, step.tokens + step.considered))
        best, best_reward = 0, -np.inf
        k = min(limit, k)
        numbers = sorted(range(limit + 1), key=lambda n: (abs(n - k), n))
        for n in numbers:
            seconds = step.seconds_with(n, ready.totals[n], ready.longest[n])
            reward = rate(step.benefit_with(n), seconds)
            if reward > best_reward and (seconds <= step.bound or not n):
                best, best_reward = n, reward
        before = step.considered
        step.consider(best, ready.totals[best], ready.longest[best])
        return best != before

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
            reward = rate(step.benefit - step.benefit_added(prompt), seconds)
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
                new - prompt.new - self.lost_tokens(step, ready, prompt.row, prompt.resident + new)
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
        if self.add_prompt(
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
                self.add_prompt(step, ready, under_way, prompt.row, new, resident, hit)

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
                self.offline.running.discard(prompt.row)
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

    def _decode_considered(self, step: StepInProgress, ready: OfflineDecodes) -> None:
        """Grant those that are considered. If one finds no memory, or takes that of another one
        of them, it is decided anew how many of those behind it pay."""
        k, i = step.considered, 0
        step.consider(0, 0, 0)
        if self.offline.grow_together(step, ready.rows[:k], ready.resident[:k]):
            return
        while i < k:
            row, tokens, dropped = int(ready.rows[i]), int(ready.resident[i]), len(step.dropped)
            found = self.offline.grow(step, row, tokens + 1, True)
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
