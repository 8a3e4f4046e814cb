"""LayerKV's moves (Sec. 3.1.1, 3.1.2 and 4; eq. 5): which layers stay, leave, come back, or are
fetched for one step.

All transfers of a plan run during its step, no more of them than the step is expected to hide, in
each direction. So no request waits for a transfer but those whose layers it moves; and those wait
on the host, in which LayerKV's requests queue.
"""

import math

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.baselines.vllm_v0 import Queues
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.layerkv.cost import LayerCost
from twinserve.policies.layerkv.lengths import LengthRanges
from twinserve.policies.layerkv.options import LayerKvOptions
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable


class LayerMoves:
    """The moves of one plan.

    ranges     predicted lengths of running requests
    computing  rows whose prompt is in a step that has not been reported
    demand     cells that the head of the queue needs, if it found no memory
    stuck      the forecast is below the threshold, and nothing can leave
    """

    def __init__(
        self,
        options: LayerKvOptions,
        cost: LayerCost,
        queues: Queues,
        ranges: LengthRanges,
        computing: set[int],
        plan: StepPlan,
        requests: RequestTable,
        ledger: LayerwiseLedger,
    ) -> None:
        self.options, self.cost, self.queues = options, cost, queues
        self.plan, self.requests, self.ledger = plan, requests, ledger
        self.demand = 0
        self.stuck = False
        self._ranges, self._computing = ranges, computing
        self._step: list[int] = []  # rows that decode
        self._resting: set[int] = set()  # whose layers leave in this step; only asked

    # -- what there will be room for ---------------------------------------------------------------
    @property
    def threshold(self) -> int:
        """Blocks."""
        return math.ceil(self.options.threshold * self.ledger.num_blocks)

    def spare_blocks(self) -> int:
        """Free blocks above the need of the queue's head and the threshold."""
        return (self.ledger.free_cells - self.demand) // self.ledger.layers - self.threshold

    def _spare_cells(self) -> int:
        """Return the forecast's lowest number above the threshold (eq. 5); less than 0: cells that
        are short.

        The head of the queue counts as soon as Algorithm 1 lets it begin.
        """
        options, ledger, rows = self.options, self.ledger, self.queues.rows
        free = ledger.free_cells + ledger.leaving_cells - self.demand
        low = free
        if len(rows) and options.horizon:
            blocks, resident = ledger.table_blocks(rows), ledger.layers - ledger.host_layers(rows)
            left = self._ranges.left(rows, self.requests.output_tokens[rows])
            low = kernels.available_cells(
                free, blocks, resident, left, ledger.block_tokens, options.horizon
            ).min()
        return int(low) - self.threshold * ledger.layers

    # -- admission ---------------------------------------------------------------------------------
    def admit(self, row: int, known: int, keep_free: int) -> bool:
        """With as many layers on the device as there is room for, x at least (Sec. 3.1.1, 3.1.2).

        While any request's layers wait on the host, freed memory is for them: then x. Where as many
        wait as may (`max_parked`), only a prompt begins whose layers all stay.
        """
        ledger, options, layers = self.ledger, self.options, self.ledger.layers
        blocks = -(-known // ledger.block_tokens)
        x = self.cost.min_resident_layers(known) if options.x is None else min(options.x, layers)
        least = max(x, layers - ledger.free_host_cells // blocks)
        full = self._full()
        most = min(layers, (ledger.free_cells - keep_free * layers) // blocks)
        if full:
            least = layers
        if most < least:
            self.demand = 0 if full else least * blocks  # no others are to make room for it
            return False
        resident = least
        others = self.queues.rows
        if options.retain == "max" and not np.count_nonzero(ledger.host_layers(others)):
            resident = most
            if len(others):
                grown = blocks + options.horizon  # with the blocks that it takes itself
                resident = min(most, max(least, self._spare_cells() // grown))
        return ledger.admit_layers(row, known, resident, keep_free)

    def _full(self) -> bool:
        """Whether as many requests have layers on the host as may (`max_parked`)."""
        most = self.options.max_parked
        if most is None or len(self.queues.running) < most:
            return False
        return int(np.count_nonzero(self.ledger.host_layers(self.queues.rows))) >= most

    def _may_leave(self, row: int) -> bool:
        """Whether layers of this row may go to the host: it has some there, or is one more."""
        return bool(self.ledger.host_layers(row)) or not self._full()

    def prompt_seconds(self) -> float:
        """Return how long the link is idle during the prompts of the plan."""
        cost, ledger, plan = self.cost, self.ledger, self.plan
        return sum(
            cost.prefill_seconds(n) - cost.layer_seconds(n, int(ledger.host_layers(row)))
            for row, n in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        )

    # -- layers leave ------------------------------------------------------------------------------
    def make_room_ahead(self, seconds: float | None = None) -> None:
        """Sec. 3.1.1: if the forecast is below the threshold, kept layers go to the host, those of
        the newest requests first; half of each request's, then the rest. As many as take `seconds`
        on the link; None: as long as a decode step of all is expected to take, and one at least.

        The oldest request keeps what it has, and so do those whose prompt is in this step.
        """
        ledger, moved, short = self.ledger, self._resting, -self._spare_cells()
        if short <= 0:
            return
        rows = self.queues.rows[1:]
        if self._computing:
            rows = rows[[row not in self._computing for row in rows.tolist()]]
        resident, need = ledger.layers - ledger.host_layers(rows), ledger.table_blocks(rows)
        least = 0 if seconds is not None else 1
        if seconds is None:
            seconds = self.cost.decode_seconds(self.requests.computed_tokens[self.queues.rows])
        full = self._full()  # counted again only where layers have left
        for half in (True, False):
            keep = resident // 2 if half else np.zeros_like(resident)
            there = ledger.layers - ledger.host_layers(rows)
            # most have nothing to give, or the host no room for a layer of theirs
            able = np.flatnonzero((there > keep) & (need <= ledger.free_host_cells))[::-1]
            chosen, blocks = rows[able], need[able]
            tokens = self.requests.computed_tokens[chosen]
            each = self.cost.layer_seconds(tokens, 1)  # of all at once: of hundreds few may leave
            at = self._next_to_give(0, chosen, each, seconds, full, least)
            while at < len(able):
                row, size = int(chosen[at]), int(blocks[at])
                limit = int(seconds / each[at])
                if not moved:
                    limit = max(limit, least)
                wanted = min(
                    ledger.resident_layers(row) - int(keep[able[at]]),
                    -(-short // size),
                    ledger.free_host_cells // size,
                )
                n = min(wanted, limit)
                if n > 0:
                    ledger.offload(row, n)
                    full = self._full()
                    moved.add(row)
                    short -= n * size
                    seconds -= self.cost.layer_seconds(int(tokens[at]), n)
                if short <= 0 or (wanted > 0 and limit <= wanted):
                    return
                at = self._next_to_give(at + 1, chosen, each, seconds, full, least)
        self.stuck = not moved and not self._computing

    def _next_to_give(
        self, at: int, rows: np.ndarray, each: np.ndarray, seconds: float, full: bool, least: int
    ) -> int:
        """The place, from `at` on, of the next row that is asked for layers. full: those with none
        on the host are passed over, up to one of which a layer takes longer than `seconds`."""
        if not full or at >= len(rows):
            return at
        asked = self.ledger.host_layers(rows[at:]) > 0
        if self._resting or not least:
            asked |= seconds / each[at:] < 1
        found = asked.argmax()
        return at + int(found) if asked[found] else len(rows)

    def _make_room_now(self, row: int) -> bool:
        """A row finds no memory: half of the kept layers of the newest request leave, then the
        rest, then those of the one before it; the step waits. Never those of older requests, or of
        the rows that decode already."""
        ledger, fixed = self.ledger, (self._step, self._computing)
        for other in reversed(self.queues.running):
            if other <= row:
                break
            layers = 0 if any(other in rows for rows in fixed) else ledger.resident_layers(other)
            if (
                layers
                and self._may_leave(other)
                and ledger.offload(other, -(-layers // 2), at_once=True)
            ):
                self._resting.add(other)
                return True
        return False

    # -- a decode step -----------------------------------------------------------------------------
    def decode(self) -> None:
        """Return every row whose layers are all on the device, then, by arrival, the rows whose
        other layers can be fetched within the step."""
        plan, queues = self.plan, self.queues
        if not queues.running:
            return
        if self.options.proactive:
            self.make_room_ahead()
        if not self._resting and self._all_run(queues.rows):
            plan.rows, plan.tokens = queues.rows, np.ones(len(queues.rows), np.int64)
            return
        rows = queues.rows
        here = np.flatnonzero(self.ledger.host_layers(rows) == 0)
        some = rows[here]
        fits = (self.ledger.slack_tokens(some) >= 1).tolist()
        for place, row, fit in zip(here.tolist(), some.tolist(), fits, strict=True):
            # its layers left, or all of it did (the last ones of `running`), for one before it
            gone = row in self._resting or place >= len(queues.running)
            if not gone and (fit or self._grow(row)):
                self._step.append(row)
        self._bring()
        self._step.sort()
        plan.rows, plan.tokens = np.array(self._step, np.int64), np.ones(len(self._step), np.int64)

    def _all_run(self, rows: np.ndarray) -> bool:
        """The plain case: all layers are on the device, and each row sees a free block, which is
        what vLLM asks for."""
        ledger = self.ledger
        if np.count_nonzero(ledger.host_layers(rows)):
            return False
        new_blocks = np.count_nonzero(ledger.slack_tokens(rows) < 1)
        if new_blocks >= ledger.free_blocks and len(rows) > 1:
            return False
        return ledger.grow_all(rows, self.requests.computed_tokens[rows] + 1)

    def _grow(self, row: int) -> bool:
        """Room for one token more, from the layers of newer requests. If they have none, the row's
        own layers begin to leave and it rests; if the host is full, the newest request is preempted
        as vLLM would."""
        ledger, running = self.ledger, self.queues.running
        tokens = int(self.requests.computed_tokens[row]) + 1
        while not ledger.grow(row, tokens):
            if self._make_room_now(row):
                continue
            if row != running[0]:
                own = ledger.resident_layers(row) if self._may_leave(row) else 0
                if (not own and self._step) or (own and ledger.offload(row, -(-own // 2))):
                    self._resting.add(row)
                    return False
            victim = running[-1]
            if victim in self._step or (victim == row and ledger.leaving_cells):
                return False
            self.queues.preempt_last(self.plan, ledger)
            if victim == row:
                return False
        return True

    def _bring(self) -> None:
        """Give the link's time during the step to rows with layers on the host, in order of
        arrival.

        A row whose layers can all be fetched runs; those for which there is room then stay.
        Otherwise it waits, and its layers come back, a few a step. No row overtakes. If no other
        runs, the first one does, however long that takes.
        """
        ledger, running, step, options = self.ledger, self.queues.running, self._step, self.options
        everyone = self.queues.rows
        away = np.flatnonzero(ledger.host_layers(everyone))
        parked = {
            row: place
            for place, row in zip(away.tolist(), everyone[away].tolist(), strict=True)
            if row not in self._resting
        }
        if not parked:
            return
        rows = list(parked)
        spare = -1
        if options.promote:
            # Up to twice the threshold only: else a layer would leave again as soon as it is back.
            spare = self._spare_cells() - self.threshold * ledger.layers
        computed, cost = self.requests.computed_tokens, self.cost
        seconds = cost.decode_seconds(computed[np.array(step or rows[:1], np.int64)])
        for first, row in zip((True, *[False] * len(rows)), rows, strict=False):
            if parked[row] >= len(running):
                break  # preempted for one before it
            host, tokens = int(ledger.host_layers(row)), int(computed[row])
            runs = not options.park or not step or cost.layer_seconds(tokens, host) <= seconds
            if runs and not self._grow(row):
                break
            blocks = int(ledger.table_blocks(row))
            grown = blocks + options.horizon  # a layer on the device grows there
            back = min(
                host, max(0, spare // grown), max(0, (ledger.free_cells - ledger.layers) // blocks)
            )
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
