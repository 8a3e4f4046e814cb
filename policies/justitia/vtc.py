"""VTC: the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", Alg.
2), as Justitia's baseline: an application is a client, and pays p for its prompts and 2d for its
outputs.

The client that has paid least goes first. A client with nothing in the queue does not save up. When
it comes (back), its counter is lifted to the smallest among those that wait; if none waits, to that
of the client that left the queue last. (`counter_lift=false` is the paper's LCF, least counter
first: a late client goes first until it has caught up.)

Ours: a group of requests of any kind is a client (an application, a session, a pool), a request
without one is its own. A prompt is paid once, when it is admitted, and not again if it must be
recomputed. As in the paper no request is preempted for fairness; if memory runs out, the last one
admitted gives way.
"""

import math
from dataclasses import replace

import numpy as np
from pydantic import Field

from twinserve.policies.justitia.demand import Presence
from twinserve.policies.justitia.queues import OwnersQueue
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queue_policy import QueueOptions, QueuePolicy
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS, RequestTable


class VtcOptions(QueueOptions):
    """input_weight, output_weight  w_p and w_q: what a prompt token and an output token cost
    counter_lift                 off: a new client starts at 0
    """

    input_weight: int = Field(1, ge=1)
    output_weight: int = Field(2, ge=1)
    counter_lift: bool = True


class VtcPolicy(QueuePolicy[VtcOptions]):
    name = "vtc"
    Options = VtcOptions
    traits = replace(QueuePolicy.traits, orders_applications=True)
    waiting: OwnersQueue[int]

    def setup(self) -> None:
        super().setup()
        self.paid: dict[int, int] = {}  # client -> paid; until it has ended
        self.here = Presence()
        self.waiting = OwnersQueue(self.paid.__getitem__)
        self._client_of = np.zeros(FIRST_ROWS, np.int64)  # row -> client
        self._admissions: dict[int, int] = {}  # row -> number, in order of admission
        self._admitted = 0
        self._last_to_leave: int | None = None  # client that left the queue last
        self._ended: set[int] = set()  # that one, if it has ended

    def client(self, row: int, requests: RequestTable) -> int:
        """Of a row: its group, or a number below 0 for a request by itself."""
        group = int(requests.group[row])
        return group if group >= 0 else ~row

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        if row >= len(self._client_of):
            room = np.zeros(max(row + 1 - len(self._client_of), len(self._client_of)), np.int64)
            self._client_of = np.concatenate([self._client_of, room])
        client = self._client_of[row] = self.client(row, requests)
        client = int(client)
        self.here.comes(client)
        if client not in self.waiting:
            self._lift(client)
        self.waiting.add(row, client)

    def _lift(self, client: int) -> None:
        if not self.options.counter_lift:
            least = 0
        elif self.waiting:
            least = self.paid[self.waiting.first()]
        else:
            least = 0 if self._last_to_leave is None else self.paid[self._last_to_leave]
        self.paid[client] = max(self.paid.get(client, 0), least)

    def admitted(self, row: int, requests: RequestTable) -> None:
        client = int(self._client_of[row])
        self.paid[client] += self.options.input_weight * int(requests.prompt_tokens[row])
        if client not in self.waiting:
            self._last_left(client)
        self._admissions[row] = self._admitted
        self._admitted += 1
        self.reorder()

    def on_outcome(self, outcome: StepOutcome) -> None:
        clients, counts = np.unique(self._client_of[outcome.emitted], return_counts=True)
        price = self.options.output_weight * len(outcome.ends_s)
        if outcome.verified is not None:  # a step gives a row more than one
            of_client = np.searchsorted(clients, self._client_of[outcome.emitted])
            counts = np.zeros(len(clients), np.int64)
            np.add.at(counts, of_client, outcome.verified.tokens)
        for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
            if client in self.paid:  # else it has ended, and waits for nothing any more
                self.paid[client] += price * count

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._admissions.pop(row, None)
        client = int(self._client_of[row])
        if self.here.goes(client):
            self._forget(client)

    def on_application_end(self, group: int) -> None:
        if self.here.closes(group) and group in self.paid:
            self._forget(group)

    def _last_left(self, client: int) -> None:
        before, self._last_to_leave = self._last_to_leave, client
        if before in self._ended and before != client:
            self._ended.clear()
            del self.paid[before]

    def _forget(self, client: int) -> None:
        """It has ended. What it paid counts as long as it is the last one that left the queue."""
        self.waiting.forget(client)
        if client == self._last_to_leave:
            self._ended.add(client)
        else:
            del self.paid[client]

    def rank(self, row: int) -> tuple:
        return (self._admissions.get(row, self._admitted),)

    def quiet_steps(self, plan: StepPlan, ledger: KvLedger) -> float:
        """Until the head's own decodes have cost it its place; those of the others only help it."""
        if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
            return math.inf
        head = self.waiting.first()
        price = self.options.output_weight * int(
            np.count_nonzero(self._client_of[plan.rows] == head)
        )
        ahead = self.waiting.second_value() - self.paid[head]
        if not price or ahead == math.inf:
            return math.inf
        return max(0, (ahead - 1) // price - 1)
