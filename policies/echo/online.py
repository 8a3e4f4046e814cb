"""Echo's online part (Sec. 4.1, 6): first come, first served, before any offline request, within
SLO (Sec. 5.1) and memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.echo.offline import OfflineRequests
from twinserve.policies.echo.options import EchoOptions
from twinserve.policies.echo.parts import StepInProgress, phases
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.requests import RequestTable


class OnlineRequests:
    """waiting  without KV; running: with KV
    factor   actual over estimated time of an iteration, where `feedback` asks for it
    """

    def __init__(self, options: EchoOptions, offline: OfflineRequests) -> None:
        self.options = options
        self.offline = offline
        self.waiting = RowSet()
        self.running = RowSet()
        self.factor = 1.0

    def serve(self, step: StepInProgress) -> bool:
        """Decodes, then prompts in order of arrival. Whether the first waiting request found no
        memory."""
        requests = step.requests
        decodes, prompts = step.here(self.running.rows)
        self._decode_online(step, decodes)
        if self.options.slo_aware:
            self._protect(step, decodes)
        first = True
        for row in prompts.tolist():
            if row in step.dropped:
                continue
            resident = int(requests.computed_tokens[row])
            left = int(requests.known_tokens(row)) - resident
            new = self._online_chunk(step, left, resident, first)
            if new <= 0 or step.seats <= 0:
                return False
            if not self._grow_online(step, row, resident + new):
                return False
            self._grant_online_prompt(step, row, new, resident)
            first = False
        return self._admit_online(step, first)

    # -- those that hold memory --------------------------------------------------------------------
    def _decode_online(self, step: StepInProgress, rows: np.ndarray) -> None:
        rows = rows[: max(0, min(step.seats, step.tokens))]
        computed = step.requests.computed_tokens[rows]
        ledger = step.ledger
        missing = np.count_nonzero(ledger.missing_tokens(rows))
        if not missing and ledger.grow_all(rows, computed + 1):
            step.grant_decodes(rows, computed)
            return
        for row, resident in zip(rows.tolist(), computed.tolist(), strict=True):
            if row not in step.dropped and self._grow_online(step, row, resident + 1):
                step.grant_decodes(np.array([row]), np.array([resident]))

    def _grow_online(self, step: StepInProgress, row: int, tokens: int) -> bool:
        need = -(-tokens // step.ledger.block_tokens) - step.ledger.held_blocks(row)
        return self._take(step, lambda: step.ledger.grow(row, tokens), row, need)

    def _take(self, step: StepInProgress, take, row: int, need: int) -> bool:
        """Memory for an online row: offline requests give way first, then online ones that came
        later."""

        def victims() -> Iterator[int]:
            yield from self.offline.victims(step, row, need)
            for other in self.running.rows[::-1].tolist():
                if other <= row:
                    return
                if other not in step.granted and other not in step.dropped:
                    yield other

        dropped = step.acquire(take, victims)
        if dropped is None:
            return False
        for other in dropped:
            self._wait_again(other)
        return True

    def _wait_again(self, row: int) -> None:
        if row in self.offline.running:
            self.offline.wait_again(row)
        else:
            self.running.discard(row)
            self.waiting.add(row)

    # -- prompts -----------------------------------------------------------------------------------
    def _admit_online(self, step: StepInProgress, first: bool) -> bool:
        ledger, requests = step.ledger, step.requests
        while len(self.waiting) and step.seats > 0 and step.tokens > 0:
            row = int(self.waiting.rows[0])
            if row in step.dropped:
                return False
            known = int(requests.known_tokens(row))
            hit = ledger.hit_tokens(row)
            new = self._online_chunk(step, known - hit, hit, first)
            if new <= 0:
                return False
            promised = step.promised_blocks(self.running.rows)
            need = -(-known // ledger.block_tokens) - hit // ledger.block_tokens + promised

            def take(row=row, new=new, hit=hit, known=known, promised=promised) -> bool:
                return ledger.admit(row, hit + new, hit, promised, known)

            if not self._take(step, take, row, need):
                return True
            self.waiting.discard(row)
            self.running.add(row)
            step.plan.admitted.append((row, hit))
            self._grant_online_prompt(step, row, new, hit, hit)
            first = False
        return False

    def _online_chunk(self, step: StepInProgress, left: int, resident: int, first: bool) -> int:
        """The prompt that came first goes on in every iteration, if only by a block. Otherwise it
        could starve if the decodes alone need all the time."""
        new = step.chunk(left, resident)
        return max(new, min(left, step.tokens, step.ledger.block_tokens)) if first else new

    def _grant_online_prompt(
        self, step: StepInProgress, row: int, new: int, resident: int, hit: int = 0
    ) -> None:
        step.grant_prompt(row, new, resident, hit)
        self.offline.pool.computed(step.requests.prefix[row], resident // step.ledger.block_tokens)
        if self.options.slo_aware:
            self._protect(step, np.array([row]))

    # -- deadlines ---------------------------------------------------------------------------------
    def due(self, rows: np.ndarray, requests: RequestTable) -> np.ndarray:
        """float64[n]: when each row's next token is due, seconds; inf without an objective (Sec.
        5.1)."""
        return kernels.next_due(requests, rows, self.options.slo == "gap")

    def phases(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """int64[n]: tokens that each row has computed; bool[n]: which compute the one token after
        their last emitted one."""
        return phases(rows, requests.prompt_tokens[rows], requests)

    def _protect(self, step: StepInProgress, rows: np.ndarray) -> None:
        """The iteration is bounded by the tightest SLO among those of `rows` that are in it (Sec.
        5.1)."""
        if len(rows) > len(step):
            rows = np.array([row for row in rows.tolist() if row in step.granted], np.int64)
        if not len(rows):
            return
        bound = self.bound(rows, step.requests, step.view.now, step.seconds())
        step.bound = min(step.bound, bound)

    def bound(self, rows: np.ndarray, requests: RequestTable, now: float, estimate: float) -> float:
        """Estimated seconds that an iteration with `rows` may take, one that takes `estimate`
        without offline work."""
        seconds, by_gap = self.factor * estimate, self.options.slo == "gap"
        return kernels.tightest(requests, rows, by_gap, now, seconds) / self.factor
