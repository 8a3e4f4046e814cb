"""Hugging Face's Text Generation Inference (TGI): its router.

Source: text-generation-inference 2.x, `backends/v3/src/backend.rs` (`batching_task`),
`backends/v3/src/queue.rs` (`State::next_batch`) and the launcher's help.

- One batch decodes, all of it in each step. It is charged with tokens: of each request the prompt
  and all that it may generate. The sum stays within `max_batch_total_tokens`, and memory for all of
  it is set aside, so no row is preempted.
- Prompts are a step of their own, during which the batch pauses. They come whole from the front of
  the queue while `max_batch_prefill_tokens`, seats and the rest of the total last. The first that
  does not fit ends it. Then they join the batch, and a decode follows.
- With a batch such a step needs at least `waiting_served_ratio` times as many requests as the
  batch has (rounded down); once `max_waiting_tokens` tokens have been decoded since the last one,
  any number will do.

Ours: a client of TGI says how much may be generated, and the answer is cut there. Requests here end
at the trace's length, which no policy may see. So `max_new_tokens` stands for every client's limit,
and a row that reaches it asks for more. If the batch has room, the request is charged again and
goes on. Otherwise it waits at the front, to be computed again with its generated tokens as part of
its prompt. Left out: padding, speculation, sliding windows, the chunked prompts of 3.x.
"""

from bisect import insort
from dataclasses import replace

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queues import room_for
from twinserve.policies.parts.runs import further_decodes
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import FIRST_ROWS, RequestTable


class TgiOptions(Options):
    """Named as TGI's launcher names them.

    max_batch_total_tokens    tokens that the batch may be charged with; None: all that the KV
                              memory holds
    max_batch_prefill_tokens  prompt tokens of a step, rounded up to whole blocks; None:
                              max_model_len + 50
    waiting_served_ratio      requests that may interrupt the batch, in shares of its size
    max_waiting_tokens        decodes after which any number of requests may interrupt
    max_batch_size            requests in the batch; max_num_seqs bounds it too
    max_new_tokens            tokens that a client asks for (see above)
    """

    max_batch_total_tokens: int | None = Field(None, ge=1)
    max_batch_prefill_tokens: int | None = Field(None, ge=1)
    waiting_served_ratio: float = Field(0.3, ge=0.0, le=1e6)
    max_waiting_tokens: int = Field(20, ge=0)
    max_batch_size: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(1024, ge=1)


class TgiPolicy(Policy[TgiOptions]):
    name = "tgi"
    Options = TgiOptions
    uses_estimator = False
    traits = Traits(
        no_drafts=(
            "charges a request with all that it may generate, and counts decoded tokens by steps; "
            "TGI's own speculation is not modelled"
        )
    )

    def setup(self) -> None:
        given, total = self.options.max_batch_prefill_tokens, self.options.max_batch_total_tokens
        self.prefill_budget = self.limits.max_model_len + 50 if given is None else given
        self.seats = min(
            self.limits.max_num_seqs, self.options.max_batch_size or self.limits.max_num_seqs
        )
        limit = (self.prefill_budget, "the option max_batch_prefill_tokens")
        if total is not None and total < self.prefill_budget:
            limit = (total, "the option max_batch_total_tokens")
        self.traits = replace(self.traits, prompt_limit=limit)
        # in order of arrival; a row that had to leave the batch is among the first again
        self.waiting: list[int] = []
        self.running: list[int] = []
        self._rows: np.ndarray | None = None  # `running` as an array, until it changes
        # row -> tokens of text it is charged with; of rows in the batch
        self._charge = np.zeros(FIRST_ROWS, np.int64)
        # row -> its output tokens when prompts were last computed
        self._emitted = np.zeros(FIRST_ROWS, np.int64)
        self._decode_next = False  # prompts have just interrupted the batch

    def step_tokens(self, longest: int) -> int:
        return max(self.seats, min(self.prefill_budget + longest, self.seats * longest))

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        insort(self.waiting, row)
        self._charge, self._emitted = room_for(self._charge, row), room_for(self._emitted, row)

    def on_finish(self, row: int) -> None:
        self.running.remove(row)
        self._rows = None

    def on_withdraw(self, row: int) -> None:
        if row in self.running:
            self.on_finish(row)
        else:
            self.waiting.remove(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        requests, plan = view.requests, StepPlan()
        ledger.begin_step()
        waited = self._waiting_tokens(requests)
        forced = waited >= self.options.max_waiting_tokens
        must_decode = self._decode_next and bool(self.running)
        if not must_decode:
            least = (
                0
                if forced or not self.running
                else int(len(self.running) * self.options.waiting_served_ratio)
            )
            self._prefill(plan, least, requests, ledger)
        if not plan:
            self._decode(plan, requests, ledger)
        plan.moves = ledger.take_moves()
        further = further_decodes(plan, requests, ledger)
        if further:
            known = requests.known_tokens(plan.rows)
            further = min(further, int((self._charge[plan.rows] - known).min()) - 1)
            if self.waiting and must_decode:
                further = 0  # waiting rows were not looked at
            elif self.waiting and not forced:
                further = min(further, self.options.max_waiting_tokens - waited - 1)
            plan.valid_for = max(0, further)
        return plan

    def charged_tokens(self) -> int:
        """Tokens that the batch is charged with."""
        return int(self._charge[self._batch()].sum())

    def _batch(self) -> np.ndarray:
        if self._rows is None:
            self._rows = np.array(self.running, np.int64)
        return self._rows

    def _waiting_tokens(self, requests: RequestTable) -> int:
        """Tokens decoded since prompts were last computed, and one; all of the batch have decoded
        the same number."""
        if not self.running:
            return 0
        row = self.running[0]
        return 1 + int(requests.output_tokens[row] - self._emitted[row])

    def _total(self, ledger: KvLedger) -> int:
        memory = ledger.num_blocks * ledger.block_tokens
        return min(memory, self.options.max_batch_total_tokens or memory)

    # -- prompts -----------------------------------------------------------------------------------
    def _prefill(
        self, plan: StepPlan, least: int, requests: RequestTable, ledger: KvLedger
    ) -> None:
        """At least `least` prompts from the front of the queue, or none."""
        if not self.waiting or len(self.waiting) < least:
            return
        chosen = self._next_batch(requests, ledger)
        if len(chosen) < max(1, least):
            return
        set_aside = self._set_aside(requests, ledger)
        rows, tokens = [], []
        for row, known, charge in chosen:
            hit = ledger.hit_tokens(row)
            extra = _blocks(charge - 1, ledger) - _blocks(known, ledger)
            if not ledger.admit(row, known, hit, set_aside + max(0, extra)):
                break
            set_aside += max(0, extra)
            plan.admitted.append((row, hit))
            self._charge[row] = charge
            rows.append(row)
            tokens.append(known - hit)
        if not rows:
            return
        del self.waiting[: len(rows)]
        self._decode_next = bool(self.running)
        self._emitted[self._batch()] = requests.output_tokens[self._batch()]
        self._emitted[rows] = requests.output_tokens[rows] + 1
        self.running += rows
        self._rows = None
        plan.rows, plan.tokens = np.array(rows, np.int64), np.array(tokens, np.int64)

    def _next_batch(self, requests: RequestTable, ledger: KvLedger) -> list[tuple[int, int, int]]:
        """(row, prompt tokens, charge) of those that the budgets have room for."""
        total = self._total(ledger)
        room, prompts = (
            total - self.charged_tokens(),
            _blocks(self.prefill_budget, ledger) * ledger.block_tokens,
        )
        chosen: list[tuple[int, int, int]] = []
        for row in self.waiting:
            if len(self.running) + len(chosen) == self.seats:
                break
            known = int(requests.known_tokens(row))
            charge = max(
                known, min(known + self.options.max_new_tokens, total, self.limits.max_model_len)
            )
            prompts, room = prompts - known, room - charge
            if prompts < 0 or room < 0:
                alone = not self.running and not chosen
                if not (alone and prompts >= 0):  # nothing but this one: it gets all there is
                    break
            chosen.append((row, known, charge))
        return chosen

    def _set_aside(self, requests: RequestTable, ledger: KvLedger) -> int:
        """Blocks that the batch has been promised and does not hold yet."""
        rows = self._batch()
        promised = -(-(self._charge[rows] - 1) // ledger.block_tokens)
        held = -(-requests.computed_tokens[rows] // ledger.block_tokens)
        return int(np.maximum(promised - held, 0).sum())

    # -- decodes -----------------------------------------------------------------------------------
    def _decode(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> None:
        self._decode_next = False
        rows = self._batch()
        if not len(rows):
            return
        for row in rows[requests.known_tokens(rows) >= self._charge[rows]].tolist():
            self._ask_for_more(row, plan, requests, ledger)
        rows = self._batch()
        if not ledger.grow_all(rows, requests.computed_tokens[rows] + 1):
            rows = self._one_by_one(plan, requests, ledger)
        plan.rows, plan.tokens = rows, np.ones(len(rows), np.int64)

    def _ask_for_more(
        self, row: int, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> None:
        """The row has generated all that it is charged with."""
        known = int(requests.known_tokens(row))
        own = _blocks(int(requests.computed_tokens[row]), ledger)
        free = ledger.free_blocks - self._set_aside(requests, ledger)
        most = min(
            self._total(ledger) - self.charged_tokens() + int(self._charge[row]),
            (own + free) * ledger.block_tokens + 1,
        )
        charge = min(known + self.options.max_new_tokens, most)
        if charge > known:
            self._charge[row] = charge
        elif len(self.running) == 1:
            self._charge[row] = known + 1  # no other row is charged with anything
        else:
            self._leave(row, plan, ledger)

    def _leave(self, row: int, plan: StepPlan, ledger: KvLedger) -> None:
        ledger.drop(row)
        self.running.remove(row)
        insort(self.waiting, row)
        self._rows = None
        plan.preempted.append((row, Preemption.RECOMPUTE))

    def _one_by_one(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> np.ndarray:
        """Memory that was set aside is not there: a ledger where blocks are not all alike. The last
        to join leaves."""
        index = 0
        while index < len(self.running):
            row = self.running[index]
            while not ledger.grow(row, int(requests.computed_tokens[row]) + 1):
                last = self.running[-1]
                self._leave(last, plan, ledger)
                if last == row:
                    break
            else:
                index += 1
        return self._batch()


def _blocks(tokens: int, ledger: KvLedger) -> int:
    return -(-tokens // ledger.block_tokens)
