"""vLLM's scheduler with a simple rule on top that swaps requests out and in again, so that the
connector is driven the way a steered scheduler drives it. Imports vLLM: name it by path.

The rule, from `additional_config["swapping"]` or set on the scheduler (0: no swapping):

    period  every so many steps, the running request that was swapped least often is swapped out
    away    for so many steps it is hidden; after them it is ordered back at every step until it
            resumes
    forget  every so many returns happen without an order: the request is recomputed

With `report`, a path, totals are written there whenever a request ends: for an engine in another
process.
"""

import json
import time
from pathlib import Path

from vllm.v1.core.sched.request_queue import create_request_queue

from tests.live.recording_scheduler import RecordingScheduler
from twinserve.backends.live.transfer.host import HostFull


class SwapScheduler(RecordingScheduler):
    """`swaps`: times each request was swapped out; `counts`: what happened; `transfers`: all
    reports; `before_step`: calls to make before a step, then forgotten."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        rule = self.vllm_config.additional_config.get("swapping", {})
        self.set_rule(rule.get("period", 0), rule.get("away", 0), rule.get("forget", 0))
        self.report = rule.get("report")
        self.before_step: list = []

    def set_rule(self, period: int, away: int, forget: int = 0) -> None:
        self.period, self.away, self.forget = period, away, forget
        self.steps = 0
        self.swaps: dict[str, int] = {}
        self.back_at: dict[str, int] = {}
        self.transfers: list = []
        self.counts = dict.fromkeys(
            ("out", "back", "refused", "unfilled", "forgotten", "reused"), 0
        )
        self.tokens = {"out": 0, "back": 0}
        self._left: dict[str, set[int]] = {}  # request -> blocks it left

    def schedule(self, *args, **kwargs):
        self.steps += 1
        while self.before_step:
            self.before_step.pop(0)(self)
        if self.period and self.steps % self.period == 0 and self.running:
            self.send_out(
                min(self.running, key=lambda r: (self.swaps.get(r.request_id, 0), r.request_id))
            )
        due = []
        for request_id in sorted(self.back_at):
            if self.back_at[request_id] > self.steps:
                continue
            if (
                self.forget
                and (self.counts["back"] + self.counts["forgotten"]) % self.forget
                == self.forget - 1
            ):
                self.counts["forgotten"] += 1
                del self.back_at[request_id]
                continue
            due.append((request_id, self.connector.swap_in(request_id)))
        hidden = [r for r in self.waiting if self.back_at.get(r.request_id, 0) > self.steps]
        for request in hidden:
            self.waiting.remove_request(request)
        plan = super().schedule(*args, **kwargs)
        if hidden:
            queue = create_request_queue(self.policy)
            for request in [*hidden, *self.waiting]:
                queue.add_request(request)
            self.waiting = queue
        self.note(plan, due)
        return plan

    def send_out(self, request) -> None:
        """Swap `request` out; where the host is full, drop it."""
        name = request.request_id
        (blocks,) = self.kv_cache_manager.get_block_ids(name)
        try:
            self.connector.swap_out(name, blocks, request.num_computed_tokens)
        except HostFull:
            self.counts["refused"] += 1
        else:
            self.counts["out"] += 1
            self.tokens["out"] += request.num_computed_tokens
            self.swaps[name] = self.swaps.get(name, 0) + 1
            self.back_at[name] = self.steps + self.away
            self._left[name] = set(blocks)
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def note(self, plan, due: list[tuple[str, int]]) -> None:
        for request_id, held in due:
            if request_id not in plan.num_scheduled_tokens:
                assert request_id in self.connector.unfilled
                assert self.connector.host.held(request_id) == held
                self.counts["unfilled"] += 1
                continue
            request = self.requests[request_id]
            # nothing but what the host held was taken over: the rest is this step's own work
            assert request.num_computed_tokens - plan.num_scheduled_tokens[request_id] >= held
            assert not self.connector.host.held(request_id)
            self.counts["back"] += 1
            self.tokens["back"] += held
            del self.back_at[request_id]
        taken = {
            block
            for request_id in plan.num_scheduled_tokens
            for block in self.kv_cache_manager.get_block_ids(request_id)[0]
        }
        for request_id in list(self._left):
            if self._left[request_id] & taken:  # another one, or itself again
                self.counts["reused"] += request_id in self.back_at
                del self._left[request_id]

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.transfers += self.connector.take_transfers()
        for request_id in self.log[-1].finished:
            self.back_at.pop(request_id, None)
            if self.report:
                nbytes = sum(transfer.nbytes for transfer in self.transfers)
                totals = {"counts": self.counts, "tokens": self.tokens, "bytes": nbytes}
                Path(self.report).write_text(json.dumps(totals))
        return outputs
