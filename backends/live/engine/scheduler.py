"""vLLM's scheduler, steered. It sees only the planned requests, in plan order, each with its grant
as a cap. The rest is as shipped (allocation, hashing, the message to the worker). Imports vLLM:
load it by name.

What it then schedules is compared with the plan at every step; `drift` counts the steps that
differ.
"""

import time

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from twinserve.backends.live.engine.planned import PlannedStep, ScheduledStep
from twinserve.backends.live.needs import require_state
from twinserve.backends.live.versions import LiveEngineError, has_double, second_queues
from twinserve.policies.plan import Preemption


class Steering:
    """What is put before vLLM's Scheduler or AsyncScheduler. Set `planned`, then call `schedule()`
    (the engine's step does).

    drift        steps that differ from their plan; first_drift says how
    last         the latest ScheduledStep
    accepted     of the latest step that has ended: {request id: drafts that were right}
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        require_state(self)
        if self.policy is not SchedulingPolicy.FCFS:
            raise LiveEngineError(
                "a steered engine takes its order from the policy: leave --scheduling-policy at "
                "fcfs"
            )
        self.planned: PlannedStep | None = None
        self.last: ScheduledStep | None = None
        self.forget_counts()
        # The decider has made room for whole prompts already; vLLM's own admission rule would
        # come on top.
        self.scheduler_reserve_full_isl = False
        self._others = second_queues(self)
        self._steered: PlannedStep | None = None  # while schedule() runs
        self._unplanned: list[str] = []
        # the pool has room for every text once
        self.keeps_texts = False
        self._truncate_hits()
        self._give_up_doubles()

    @property
    def device_blocks(self) -> int:
        """Blocks of the pool, vLLM's null block not counted."""
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def forget_counts(self) -> None:
        """Reset the counts, for another run on the same engine."""
        self.steps = 0
        self.drift = 0
        self.first_drift = ""
        self.accepted: dict[str, int] = {}

    def part(self, found: str) -> None:
        """Record that the latest step differed from its plan; `found` says how."""
        self.drift += 1
        self.first_drift = self.first_drift or f"step {self.steps}: {found}"

    # -- one step ----------------------------------------------------------------------------------
    def schedule(self, *args, **kwargs):
        planned, self.planned = self.planned or PlannedStep(), None
        self.accepted = {}
        for request_id, kind in planned.preempted:
            self._take_memory(self.requests[request_id], kind)
        for request_id in planned.forgotten:
            self.connector.forget(request_id)
        for request_id in planned.swapped_in:
            self.connector.swap_in(request_id)
        shown = [self.requests[i] for i in planned.grants]
        waiting = [r for r in shown if r.status != RequestStatus.RUNNING]
        paused = [r for r in self.running if r.request_id not in planned.grants]
        self.running = [r for r in shown if r.status == RequestStatus.RUNNING]
        queues = self._show(waiting)
        self._steered, self._unplanned = planned, []
        # vLLM cuts a chunk to a model's alignment through this hook; here it is cut to the grant.
        aligned, self.need_mamba_block_aligned_split = self.need_mamba_block_aligned_split, True
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.need_mamba_block_aligned_split = aligned
            self._steered = None
            self.running = paused + self.running
            self._show_again(queues, {r.request_id for r in waiting})
        self._note(planned, output, {r.request_id for r in waiting})
        return output

    def _show(self, requests: list) -> dict:
        """Only these wait, in this order. Returns the queues there were, by name."""
        names = (*self._others, "waiting")
        queues = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, create_request_queue(SchedulingPolicy.FCFS))
        self.waiting.extend(requests)
        return queues

    def _show_again(self, queues: dict, shown: set[str]) -> None:
        """All that wait now, and behind them those in `queues` that were not shown. Mostly none
        was: a long queue is not copied at every step."""
        left = [r for name in queues for r in getattr(self, name)]
        if left or shown:
            hidden = [r for queue in queues.values() for r in queue if r.request_id not in shown]
            self._show(left + hidden)
            return
        for name, queue in queues.items():
            setattr(self, name, queue)

    def _take_memory(self, request, kind: Preemption) -> None:
        if kind is Preemption.SWAP and request.num_computed_tokens:
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            self.connector.swap_out(request.request_id, blocks, request.num_computed_tokens)
        self.running.remove(request)
        super()._preempt_request(request, time.monotonic())

    def _note(self, planned: PlannedStep, output, joined: set[str]) -> None:
        grants = dict(output.num_scheduled_tokens)
        # vLLM has counted this step's tokens as computed already
        hits = {
            i: self.requests[i].num_computed_tokens - grants[i]
            for i in planned.grants
            if i in joined and i in grants
        }
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        unfilled = self.connector.unfilled if planned.swapped_in else ()
        # padding is a draft of no token
        drafted = {
            name: sum(token >= 0 for token in tokens)
            for name, tokens in output.scheduled_spec_decode_tokens.items()
        }
        drafts = {name: n for name, n in drafted.items() if n}
        self.last = ScheduledStep(grants, hits, free, self._unplanned, list(unfilled), drafts)
        self.steps += 1
        found = self.last.drift(planned)
        if found:
            self.part(found)

    # -- what vLLM's own schedule() calls ----------------------------------------------------------
    def _mamba_block_aligned_split(self, request, num_new_tokens: int, *args, **kwargs) -> int:
        return min(num_new_tokens, self._steered.grants[request.request_id])

    def make_spec_decoding_stats(self, *args, request_id: str, num_accepted_tokens: int, **kwargs):
        """vLLM counts here what a request's drafts came to."""
        self.accepted[request_id] = num_accepted_tokens
        return super().make_spec_decoding_stats(
            *args, request_id=request_id, num_accepted_tokens=num_accepted_tokens, **kwargs
        )

    def _preempt_request(self, request, *args, **kwargs) -> None:
        if self._steered is not None:
            self._unplanned.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def _truncate_hits(self) -> None:
        """A pool that is larger than the ledger's keeps prefixes that the ledger gave up."""
        manager = self.kv_cache_manager
        lookup = manager.get_computed_blocks

        def truncated(request):
            blocks, tokens, *rest = lookup(request)
            granted = self._steered.hits.get(request.request_id, 0) if self._steered else tokens
            if tokens > granted:
                kept = granted // self.block_size
                blocks, tokens = (
                    KVCacheBlocks(tuple(group[:kept] for group in blocks.blocks)),
                    kept * self.block_size,
                )
            return (blocks, tokens, *rest)

        manager.get_computed_blocks = truncated

    def _give_up_doubles(self) -> None:
        """Where texts are kept, a block whose text another one has, too, is free for any use: what
        is computed twice then pushes no other text out."""
        pool = self.kv_cache_manager.block_pool
        free = pool.free_blocks

        def free_blocks(blocks):
            if self.keeps_texts:
                blocks = list(blocks)
                for block in blocks:
                    if block.ref_cnt == 1 and has_double(pool, block):
                        pool._maybe_evict_cached_block(block)
            free(blocks)

        pool.free_blocks = free_blocks


class SteeredScheduler(Steering, Scheduler):
    """For an engine that steps synchronously."""
