"""How Echo chooses offline prompts (Sec. 4.1, eqs. 2 and 4), whatever search asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twinserve.policies.echo.parts import AddedPrompt, OfflineDecodes, StepInProgress, rate
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.requests import RequestTable

if TYPE_CHECKING:
    from twinserve.policies.echo.offline import OfflineRequests


class Selection:
    """Prompts and chunks, the best one by eq. 4 first.

    offline  the requests that it chooses among
    rising   only what raises the reward is added
    tries    what was added may be taken back
    """

    rising = True
    tries = True

    def __init__(self, offline: OfflineRequests) -> None:
        self.offline, self.options, self.pool = offline, offline.options, offline.pool

    def serve(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> None:
        """Offline decodes and prompts with KV, int64[n] each, and queued ones, into the step."""
        raise NotImplementedError

    def serve_whoever(self, step: StepInProgress, prompts: np.ndarray) -> None:
        """Nothing pays where all memory that is left holds text that others want; to do nothing
        would be for ever."""
        if step.seats <= 0:  # online requests keep all others out
            return
        requests = step.requests
        for row in prompts.tolist():
            computed = int(requests.computed_tokens[row])
            new = step.chunk(int(requests.known_tokens(row)) - computed, computed)
            if (
                new > 0
                and row not in step.dropped
                and self.offline.continue_prompt(step, row, new, computed)
            ):
                return
        if len(prompts):  # one in pieces at a time
            return
        for row, hit in self.queued(requests, step.ledger, []):
            new = step.chunk(int(requests.known_tokens(row)) - hit, hit)
            if new > 0 and row not in step.dropped and self.offline.admit(step, row, new, hit):
                return

    def keep_added(self, step: StepInProgress) -> None:
        if step.added and self.tries:
            step.ledger.commit(step.added[0].mark)

    def queued(
        self, requests: RequestTable, ledger: KvLedger, under_way: list[int]
    ) -> list[tuple[int, int]]:
        """(row, tokens found in the cache) of the queued candidates. A row that came more than
        `patience_s` after the first waiting one, queued or under way, does not overtake it. A
        queued one stands in their place."""
        found, first = self.pool.best(ledger), self.pool.first()
        if first is None:
            return found
        arrived = requests.arrival_s
        latest = float(arrived[min(first, *under_way) if under_way else first])
        latest += self.options.patience_s
        kept = [one for one in found if arrived[one[0]] <= latest]
        if len(kept) == len(found) or arrived[first] > latest or self.pool.waits(first):
            return kept
        kept.append((first, ledger.hit_tokens(first)))
        return list(dict.fromkeys(kept))

    def add_prompts(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        barred: list[int],
        begin: bool = True,
    ) -> bool:
        """Add the best one, as long as there is one: of those under way, and of the queued ones if
        any may `begin`. Whether any was added."""
        before = len(step.added)
        refused = set(barred)  # only asked
        while step.seats > 0 and step.tokens > 0:
            added = len(step.added)
            if not self.add_best_prompt(step, ready, under_way, refused, begin):
                break
            # one that ends in this iteration needs nothing more: there may be memory for others
            if len(step.added) > added:
                refused = set(barred)
        return len(step.added) > before

    def add_best_prompt(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        refused: set[int],
        begin: bool = True,
    ) -> bool:
        """Add the prompt or chunk with which the reward is highest, if it rises (`rising`) or, if
        it need not, if more tokens are gained than lost; False if none was added or refused."""
        requests = step.requests
        begun = [row for row in under_way if row not in step.granted and row not in step.dropped]
        candidates = [
            (row, int(requests.computed_tokens[row]), 0) for row in begun if row not in refused
        ]
        candidates += [
            (row, hit, hit)
            for row, hit in (self.queued(requests, step.ledger, under_way) if begin else ())
            if row not in refused and row not in step.dropped
        ]
        best, best_reward = None, step.reward() if self.rising else -np.inf
        for row, resident, hit in candidates:
            left = int(requests.known_tokens(row)) - resident
            # One prompt at a time is computed piece by piece; others may overtake it where they end
            # in this iteration.
            whole = under_way and row not in begun
            if whole and not step.fits_whole(left, resident):
                continue
            new = step.chunk(left, resident)
            if new <= 0 or (whole and new < left):
                continue
            lost = self.lost_tokens(step, ready, row, resident + new)
            gained = step.benefit_of(new, hit) - lost
            seconds = step.cost.seconds([*step.prefills, (new, resident)], *step.decodes)
            reward = rate(step.benefit + gained, seconds)
            if reward > best_reward and (self.rising or gained > 0):
                best, best_reward = (row, new, resident, hit), reward
        if best is None:
            return False
        if not self.add_prompt(step, ready, under_way, *best):
            refused.add(best[0])
        return True

    def add_prompt(
        self,
        step: StepInProgress,
        ready: OfflineDecodes,
        under_way: list[int],
        row: int,
        new: int,
        resident: int,
        hit: int,
    ) -> bool:
        """Add with its memory; False and nothing changed if it finds none."""
        queued, others = row in self.pool, len(step.plan.preempted)
        lost, before = self.lost_tokens(step, ready, row, resident + new), tuple(under_way)
        led, keep = self.pool.leads(row), ready.growth(step.considered)
        mark = step.ledger.mark() if self.tries else 0
        if not (
            self.offline.admit(step, row, new, hit, keep)
            if queued
            else self.offline.continue_prompt(step, row, new, resident, keep)
        ):
            if self.tries:
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

    @staticmethod
    def lost_tokens(step: StepInProgress, ready: OfflineDecodes, row: int, tokens: int) -> int:
        """Return the punishment (eq. 2): the needed tokens that leave the cache if the row gets
        memory up to `tokens`, in addition to the memory of the decodes."""
        size, lost = step.ledger.block_tokens, step.ledger.lost_tokens
        tokens -= step.ledger.held_blocks(row) * size or step.ledger.hit_tokens(row)
        grown = ready.growth(step.considered) * size
        return lost(grown + tokens) - lost(grown) if grown else lost(tokens)
