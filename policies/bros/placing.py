"""Find memory for the requests that an iteration of BROS chose, or handle its lack (Wan et al.,
IEEE version, Algorithm 1, lines 8, 9, 19 and 20)."""

from dataclasses import replace

import numpy as np

from twinserve.policies.bros.memory import Hopeless, acquire, find, in_want, place_plain
from twinserve.policies.bros.packing import Packer
from twinserve.policies.bros.parts import EMPTY, PlanInProgress, Urgent, Victims, among
from twinserve.policies.bros.queues import Queues
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.requests import State

_RUNNING = int(State.RUNNING)


class Placer:
    """Places for both classes, others' too."""

    def __init__(self, queues: Queues, packer: Packer) -> None:
        self.queues, self.packer = queues, packer
        self.options, self.estimator = packer.options, packer.estimator

    def real_time(self, step: PlanInProgress, urgent: Urgent, chosen: Batch) -> tuple[Batch, bool]:
        """Memory for the chosen ones, most urgent first (line 8). Those that need none run in any
        case; the first that finds none ends the search (line 9). Returns the placed ones and
        whether all were."""
        if not len(chosen):
            return chosen, True
        placed, others = place_plain(step, chosen)
        if not others:
            return chosen, True
        for i, take in in_want(step, chosen, placed, others):
            row = int(chosen.rows[i])
            # A request that is too late already, and holds nothing yet, does not push out others
            # that are not.
            late = urgent.residual[i] < urgent.costs[i] and not step.ledger.held_blocks(row)
            rivals = (
                urgent.batch.rows[:0] if late and not self.options.late_drops else urgent.batch.rows
            )
            victims = Victims(self.queues.be_pending.rows, rivals, chosen.rows[placed], row)
            if not take(step, row, int(chosen.context[i]), victims):
                return chosen[placed], False
            placed[i] = True
        return chosen[placed], bool(placed.all())

    def residents(self, step: PlanInProgress, urgent: Urgent, placed: Batch, size: int) -> Batch:
        """A more urgent request found no memory. Those that have theirs go on, in order, so that it
        gets free."""
        rows, requests = urgent.batch.rows, step.view.requests
        # On the device, though others may have written over a few of their slots, which then come
        # back.
        holding = (requests.computed_tokens[rows] > 0) & (requests.state[rows] == _RUNNING)
        here = among(rows, placed.rows)
        if step.dropped:
            holding &= step.keeps(rows)
        again = np.flatnonzero(here | holding)
        batch, residual = urgent.batch[again], urgent.residual[again]
        reduced = self.packer.urgent(batch, residual, requests, step.reach)
        chosen = reduced.batch[
            : min(reduced.fitting(size), self.packer.within_tokens(reduced.batch[:size]))
        ]
        others = chosen[~among(chosen.rows, placed.rows)]
        done, growing = place_plain(step, others)
        for i, take in in_want(step, others, done, growing):
            row, running = int(others.rows[i]), np.concatenate([placed.rows, others.rows[done]])
            victims = Victims(self.queues.be_pending.rows, rows, running, row)
            done[i] = take(step, row, int(others.context[i]), victims)
        return placed + others[done]

    def best_effort(
        self,
        step: PlanInProgress,
        placed: Batch,
        candidates: Batch,
        packed: int,
        bound: float,
        size: int,
    ) -> Batch:
        """Memory for best-effort candidates (line 19). One that finds none is skipped, and the next
        is considered in its place: a single stuck request must not starve the others."""
        accepted = EMPTY
        dropped, blocked = len(step.dropped), EMPTY
        if dropped:
            candidates = candidates[step.keeps(candidates.rows)]
        if step.ledger.overwrites:
            candidates, blocked = self._returning(step, candidates)
            packed = self.packer.room(placed, candidates, bound, size)
        elif dropped:
            packed = min(packed, self.packer.room(placed, candidates, bound, size))
        running = step.view.requests.state[candidates.rows] == _RUNNING
        hopeless = Hopeless(step)
        while packed > 0:
            group, candidates = candidates[:packed], candidates[packed:]
            newcomer, running = ~running[:packed], running[packed:]
            done, others = place_plain(step, group)
            left = np.array(others, np.int64)
            while len(left):
                if newcomer[left[0]]:
                    left = left[hopeless.first_skipped(newcomer[left], group.context[left]) :]
                    if not len(left):
                        break
                i, left = int(left[0]), left[1:]
                row, tokens = int(group.rows[i]), int(group.context[i])
                if row in step.dropped:
                    continue
                if newcomer[i] or group.swapped[i]:  # takes no other row's memory
                    done[i] = find(step, row, tokens)
                else:
                    later = self.later_ones(row, accepted.rows, group.rows[done])
                    done[i] = acquire(step, row, tokens, later)
                if newcomer[i] and not done[i]:
                    hopeless.found_none(row, tokens)
            accepted = accepted + (group[done] if others else group)
            if len(blocked) and len(step.dropped) > dropped:
                dropped = len(step.dropped)
                freed, blocked = self._returning(step, blocked)
                candidates = self.packer.by_swap(candidates + freed)
                running = step.view.requests.state[candidates.rows] == _RUNNING
            elif done.all():
                break
            ask = running | (candidates.context < hopeless.tokens)
            candidates, running = candidates[ask], running[ask]
            packed = self.packer.room(placed + accepted, candidates, bound, size)
        return accepted

    def _returning(self, step: PlanInProgress, candidates: Batch) -> tuple[Batch, Batch]:
        """Best-effort candidates by what must come back before they run now that others have
        overwritten it; and those whose KV has no place with the others."""
        candidates = replace(candidates, swapped=self.queues.missing(candidates.rows, step.ledger))
        blocked = step.ledger.cannot_return(candidates.rows)
        return self.packer.by_swap(candidates[~blocked]), candidates[blocked]

    def later_ones(self, row: int, *running: np.ndarray) -> np.ndarray:
        """Return best-effort requests that arrived after `row` and are not in the batch, the last
        one first. A running request that cannot grow takes their memory; otherwise all would hold
        some and none go on."""
        rows = self.queues.be_pending.rows
        later = rows[np.searchsorted(rows, row, side="right") :]
        return later[~among(later, np.concatenate(running))][::-1]

    def give_places_back(
        self, step: PlanInProgress, urgent: Urgent, placed: Batch, best_effort: Batch, last: Batch
    ) -> Batch:
        """Some that were to take the places of real-time requests `last` found no block (line 19):
        these keep them, the most urgent first. Returns the real-time requests placed now."""
        others = np.setdiff1d(self.queues.be_pending.rows, best_effort.rows)
        for i in range(len(last)):
            one = last[i : i + 1]
            row, whole = int(one.rows[0]), placed + best_effort + one
            fits = self.estimator.seconds(whole) <= urgent.bound
            if not fits or self.packer.within_tokens(whole) < len(whole) or row in step.dropped:
                break
            victims = Victims(others, urgent.batch.rows, placed.rows, row)
            if not acquire(step, row, int(one.context[0]), victims):
                break
            placed = placed + one
        return placed

    def someone(
        self, step: PlanInProgress, urgent: Batch, candidates: Batch
    ) -> tuple[Batch, Batch]:
        """All rows wait for memory that others hold: the most urgent one gets it, from any other.
        If no real-time request can have it, the first best-effort one does. Returns the real-time
        and the best-effort requests placed."""
        candidates = candidates[candidates.rows.argsort()]
        pending = self.queues.be_pending.rows
        for batch, owners in (
            (urgent, np.append(pending, urgent.rows[::-1])),
            (candidates, pending[::-1]),
        ):
            for i, row in enumerate(batch.rows.tolist()):
                victims = owners[owners != row]
                if row not in step.dropped and acquire(step, row, int(batch.context[i]), victims):
                    placed = batch[i : i + 1]
                    return (placed, EMPTY) if batch is urgent else (EMPTY, placed)
        return EMPTY, EMPTY
