"""LayerKV's moves: which layers stay, leave, come back, or are fetched for one step.

All transfers of a plan run beside its step, no more of them than the step is expected to hide, in each direction. So
nobody waits for a transfer but those whose layers it moves; and those wait on the host, which is where LayerKV has its
requests queue.
"""

from __future__ import annotations

import math

import numpy as np

from .kv.layerwise import LayerwiseLedger
from .layerkv_forecast import available_cells
from .plan import StepPlan
from .requests import RequestTable


class LayerMoves:
    """A part of LayerKvPolicy."""

    # -- what there will be room for ---------------------------------------------------------------------------
    def _threshold(self, ledger: LayerwiseLedger) -> int:
        """Blocks."""
        return math.ceil(self.options.threshold * ledger.num_blocks)

    def _spare_cells(self, requests: RequestTable, ledger: LayerwiseLedger) -> int:
        """What the forecast has above the threshold where it is lowest (eq. 5); less than 0: cells that are short.

        The head of the queue counts as soon as Algorithm 1 lets it begin.
        """
        options, rows = self.options, np.array(self.running, np.int64)
        free = ledger.free_cells + ledger.leaving_cells - self._demand
        low = free
        if len(rows) and options.horizon:
            blocks, resident = ledger.table_blocks(rows), ledger.layers - ledger.host_layers(rows)
            past = requests.output_tokens[rows].tolist()
            left = np.array([self._ranges[row].left(n) for row, n in zip(self.running, past, strict=True)])
            low = available_cells(free, blocks, resident, left, ledger.block_tokens, options.horizon).min()
        return int(low) - self._threshold(ledger) * ledger.layers

    # -- admission ---------------------------------------------------------------------------------------------
    def _admit_layers(
        self, row: int, known: int, keep_free: int, requests: RequestTable, ledger: LayerwiseLedger
    ) -> bool:
        """With as many layers on the device as there is room for, x at least (Sec. 3.1.1, 3.1.2).

        While anybody's layers wait on the host, freed memory is for them: then x.
        """
        layers, options = ledger.layers, self.options
        blocks = -(-known // ledger.block_tokens)
        x = self.cost.min_resident_layers(known) if options.x is None else min(options.x, layers)
        least = max(x, layers - ledger.free_host_cells // blocks)
        most = min(layers, (ledger.free_cells - keep_free * layers) // blocks)
        if most < least:
            self._demand = least * blocks
            return False
        resident = least
        others = np.array(self.running, np.int64)
        if options.retain == "max" and not np.count_nonzero(ledger.host_layers(others)):
            resident = most
            if len(others):
                grown = blocks + options.horizon  # with the blocks that it takes itself
                resident = min(most, max(least, self._spare_cells(requests, ledger) // grown))
        return ledger.admit_layers(row, known, resident, keep_free)

    def _prompt_seconds(self, plan: StepPlan) -> float:
        """How long the link is idle beside the prompts of `plan`."""
        cost, ledger = self.cost, self._ledger
        return sum(
            cost.prefill_seconds(n) - cost.layer_seconds(n, int(ledger.host_layers(row)))
            for row, n in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        )

    # -- layers leave ------------------------------------------------------------------------------------------
    def _make_room_ahead(
        self, requests: RequestTable, ledger: LayerwiseLedger, seconds: float | None = None
    ) -> set[int]:
        """Sec. 3.1.1: where the forecast is below the threshold, kept layers go to the host, those of the newest requests
        first; half of each request's, then the rest. As many as take `seconds` on the link; None: as long as a decode step of
        all is expected to take, and one at least. Returns whose.

        The oldest request keeps what it has, and so do those whose prompt is in this step.
        """
        short, moved = -self._spare_cells(requests, ledger), set()
        if short <= 0:
            return moved
        resident = {row: ledger.resident_layers(row) for row in self.running[1:] if row not in self._computing}
        least = 0 if seconds is not None else 1
        if seconds is None:
            seconds = self.cost.decode_seconds(requests.computed_tokens[np.array(self.running, np.int64)])
        for half in (True, False):
            for row, layers in reversed(resident.items()):
                blocks, tokens = int(ledger.table_blocks(row)), int(requests.computed_tokens[row])
                limit = int(seconds / self.cost.layer_seconds(tokens, 1))
                if not moved:
                    limit = max(limit, least)
                keep = layers // 2 if half else 0
                wanted = min(ledger.resident_layers(row) - keep, -(-short // blocks), ledger.free_host_cells // blocks)
                n = min(wanted, limit)
                if n > 0:
                    ledger.offload(row, n)
                    moved.add(row)
                    short -= n * blocks
                    seconds -= self.cost.layer_seconds(tokens, n)
                if short <= 0 or (wanted > 0 and limit <= wanted):
                    return moved
        self._stuck = not moved and not self._computing
        return moved

    def _make_room_now(self, row: int, resting: set[int], step: list[int], ledger: LayerwiseLedger) -> bool:
        """A row finds no memory: half of the kept layers of the newest request leave, then the rest, then those of the one
        before it; the step waits. Never those of older requests, or of the rows already in the `step`."""
        for other in reversed(self.running):
            if other <= row:
                break
            layers = 0 if other in step or other in self._computing else ledger.resident_layers(other)
            if layers and ledger.offload(other, -(-layers // 2), at_once=True):
                resting.add(other)
                return True
        return False

    # -- a decode step -----------------------------------------------------------------------------------------
    def _decode_layers(self, plan: StepPlan, requests: RequestTable, ledger: LayerwiseLedger) -> None:
        """Everybody whose layers are on the device, then by arrival those whose others can be fetched beside the step."""
        if not self.running:
            return
        resting = self._make_room_ahead(requests, ledger) if self.options.proactive else set()
        if self._rows is None:
            self._rows = np.array(self.running, np.int64)
        if not resting and self._all_run(self._rows, requests, ledger):
            plan.rows, plan.tokens = self._rows, np.ones(len(self._rows), np.int64)
            return
        step: list[int] = []
        for row in list(self.running):
            if row in resting or row not in self.running or ledger.host_layers(row):
                continue  # its layers left, or all of it did, for one before it
            if self._grow(row, step, resting, plan, requests, ledger):
                step.append(row)
        self._bring(step, resting, plan, requests, ledger)
        step.sort()
        plan.rows, plan.tokens = np.array(step, np.int64), np.ones(len(step), np.int64)

    def _all_run(self, rows: np.ndarray, requests: RequestTable, ledger: LayerwiseLedger) -> bool:
        """The plain case: all layers are on the device, and each row sees a free block, which is what vLLM asks for."""
        if np.count_nonzero(ledger.host_layers(rows)):
            return False
        new_blocks = np.count_nonzero(ledger.slack_tokens(rows) < 1)
        if new_blocks >= ledger.free_blocks and len(rows) > 1:
            return False
        return ledger.grow_all(rows, requests.computed_tokens[rows] + 1)

    def _grow(
        self,
        row: int,
        step: list[int],
        resting: set[int],
        plan: StepPlan,
        requests: RequestTable,
        ledger: LayerwiseLedger,
    ) -> bool:
        """Room for one token more, from the layers of newer requests. If they have none, the row's own layers begin to
        leave and it rests; if the host is full, the newest request is preempted as vLLM would."""
        tokens = int(requests.computed_tokens[row]) + 1
        while not ledger.grow(row, tokens):
            if self._make_room_now(row, resting, step, ledger):
                continue
            if row != self.running[0]:
                own = ledger.resident_layers(row)
                if (not own and step) or (own and ledger.offload(row, -(-own // 2))):
                    resting.add(row)
                    return False
            victim = self.running[-1]
            if victim in step or (victim == row and ledger.leaving_cells):
                return False
            self.running.pop()
            plan.preempted.append((victim, self._evict(victim, ledger)))
            self._rows = None
            if victim == row:
                return False
        return True

    def _bring(
        self,
        step: list[int],
        resting: set[int],
        plan: StepPlan,
        requests: RequestTable,
        ledger: LayerwiseLedger,
    ) -> None:
        """Rows with layers on the host, in order of arrival: the link's time beside the step goes to them.

        A row whose layers can all be fetched runs; those for which there is room then stay. Otherwise it waits, and its
        layers come back, a few a step. Nobody overtakes. If nobody else runs, the first one does, however long that takes.
        """
        rows = [row for row in self.running if ledger.host_layers(row) and row not in resting]
        if not rows:
            return
        spare = -1
        if self.options.promote:
            # Up to twice the threshold only: else a layer would leave again as soon as it is back.
            spare = self._spare_cells(requests, ledger) - self._threshold(ledger) * ledger.layers
        computed, cost = requests.computed_tokens, self.cost
        seconds = cost.decode_seconds(computed[np.array(step or rows[:1], np.int64)])
        for first, row in zip((True, *[False] * len(rows)), rows, strict=False):
            if row not in self.running:
                break  # preempted for one before it
            host, tokens = int(ledger.host_layers(row)), int(computed[row])
            runs = not step or cost.layer_seconds(tokens, host) <= seconds
            if runs and not self._grow(row, step, resting, plan, requests, ledger):
                break
            blocks = int(ledger.table_blocks(row))
            grown = blocks + self.options.horizon  # a layer on the device grows there
            back = min(host, max(0, spare // grown), max(0, (ledger.free_cells - ledger.layers) // blocks))
            if not runs:
                back = min(back, max(int(seconds / cost.layer_seconds(tokens, 1)), int(first)))
            if back:
                ledger.onload(row, back)
                spare -= back * grown
                seconds -= cost.layer_seconds(tokens, back)
            if not runs:
                break
            ledger.stream(row)
            seconds -= cost.layer_seconds(tokens, host - back)
            step.append(row)
