"""The real V1 `Scheduler` of vLLM, stepped without a model.

Nothing of vLLM's scheduling code is replaced: `schedule()` and `update_from_output()` run as
shipped, and the "model" is a sampled token for each request whose tokens are all computed. What we
add only watches: wrappers around four methods note victims, evictions, duplicates and who asked for
memory, then call through. With asynchronous scheduling two batches are under way at most, with
pipeline stages as many as there are stages, and the order of calls is that of vLLM's engine core
(`step_with_batch_queue`).

One function may be replaced: the block hash. With `hashing="content"` (default, fast) a block's
hash is its content id, since ids already identify whole prefixes; with `hashing="vllm"` token ids
are made from the content ids and vLLM's own chained sha256 hasher runs on them. A test shows that
both lead to the same decisions.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.identity.build_vllm import build_scheduler
from tests.identity.mutations import Mutation
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.release import computes_chunk, no_end_of_text

# A token id no prompt block uses; outputs of request n are OUTPUT_BASE + n * OUTPUT_STRIDE +
# position.
OUTPUT_BASE = 1 << 62
OUTPUT_STRIDE = 1 << 20


def prompt_token_ids(
    prefix: np.ndarray | None, tokens: int, block_tokens: int, unique: int
) -> list[int]:
    """Token ids of a prompt: block k's tokens are made from prefix[k] so that equal ids give equal
    tokens.

    Each token carries its block's id, so different ids never give equal blocks; without a prefix
    the tokens are those of content ids that only this request (`unique`) has.
    """
    blocks = -(-tokens // block_tokens)
    if prefix is None:
        prefix = -1 - (np.arange(blocks, dtype=np.int64) + unique * OUTPUT_STRIDE)
    return np.repeat(prefix, block_tokens)[:tokens].tolist()


def content_hasher(
    prefix: np.ndarray | None, prompt_tokens: int, block_tokens: int, unique: int
) -> Callable:
    """A block hasher for one request: full prompt blocks hash to their content id, all others to
    themselves.

    A block that holds an output token is unique to its request, hence its hash names request and
    index.
    """
    full = 0 if prefix is None else prompt_tokens // block_tokens
    ids = b"" if prefix is None else prefix[:full].astype("<i8").tobytes()

    def hash_new_blocks(request) -> list[bytes]:
        known = len(request.block_hashes)
        blocks = request.num_tokens // block_tokens
        if blocks == known:
            return []
        return [
            ids[8 * k : 8 * k + 8] if k < full else b"own%d.%d" % (unique, k)
            for k in range(known, blocks)
        ]

    return hash_new_blocks


@dataclass
class Counters:
    """How often the phenomena that a scenario is for have happened."""

    evictions: int = 0  # cached blocks whose content was given up for new ones
    partial_chunks: int = 0  # grants that left tokens of the request to compute
    preemptions: int = 0
    priority_preemptions: int = 0  # victims that were not the last of the batch
    granted_victims: int = 0  # victims that had been granted tokens earlier in the same step
    hit_tokens: int = 0  # found by new requests
    resumed_hit_tokens: int = 0  # found by preempted requests on their return
    duplicates: int = 0  # blocks cached under a hash that another block already had
    in_flight_preemptions: int = 0  # victims with a token on its way; of these ...
    ended_victims: int = 0  # ... it was the last token: they ended while they waited
    withdrawn_new: int = 0  # clients that left before their request was first scheduled
    withdrawn_returning: int = 0  # while it waited after a preemption
    withdrawn_running: int = 0  # while it ran; of these ...
    withdrawn_in_chunk: int = 0  # ... its prompt was computed in part
    withdrawn_in_flight: int = 0  # ... a token was on its way; of these ...
    withdrawn_at_end: int = 0  # ... the last one
    drained_preemptions: int = 0  # victims for which a batch under way computed (stages)
    held_back: int = 0  # times a request of the batch was left out, its last token on its way


class RealScheduler:
    """One vLLM scheduler with a fake model; implements the `Side` protocol.

    `mutation` breaks one rule of this instance, to prove that the comparison sees it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        hashing: str = "content",
        mutation: Mutation | None = None,
        kv_transfer: dict | None = None,
    ) -> None:
        if hashing not in ("content", "vllm"):
            raise ValueError(f"hashing is {hashing!r}; use 'content' or 'vllm'")
        self.settings = settings
        self.hashing = hashing
        self.counters = Counters()
        self.scheduler = build_scheduler(settings, kv_transfer)
        if mutation is not None:
            mutation.apply(self.scheduler)
        self._submitted = 0
        self._queue: deque = deque()  # batches under way, the oldest on the right
        self._next_output: dict[str, int] = {}
        self._returning: set[str] = set()  # preempted once or more, not ended
        self._batch: list[str] = []
        self._victims: list[str] = []
        self._asking: str | None = None
        self._watch()

    def _watch(self) -> None:
        """Wrap four methods of this one instance to note what they are called with."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        pool = manager.block_pool
        index = pool.cached_block_hash_to_block
        preempt, allocate = scheduler._preempt_request, manager.allocate_slots
        evict, insert = pool._maybe_evict_cached_block, index.insert

        def note_preempt(request, *args, **kwargs):
            order = self._batch
            victim = request.request_id
            self.counters.priority_preemptions += order[-1] != victim
            if self._asking in order:
                self.counters.granted_victims += order.index(victim) < order.index(self._asking)
            order.remove(victim)
            self._victims.append(victim)
            self.counters.in_flight_preemptions += request.num_output_placeholders
            if self.settings.pipeline_stages > 1:
                self.counters.drained_preemptions += request.num_in_flight_tokens > 0
            return preempt(request, *args, **kwargs)

        def note_allocate(request, *args, **kwargs):
            self._asking = request.request_id
            return allocate(request, *args, **kwargs)

        def note_evict(block):
            evicted = evict(block)
            self.counters.evictions += evicted
            return evicted

        def note_insert(key, block):
            self.counters.duplicates += index.get_one_block(key) is not None
            return insert(key, block)

        scheduler._preempt_request, manager.allocate_slots = note_preempt, note_allocate
        pool._maybe_evict_cached_block, index.insert = note_evict, note_insert

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        prefix: np.ndarray | None = None,
        priority: int = 0,
        arrival: float = 0.0,
    ) -> None:
        """Queue a request; `prefix` as in RequestSpec, `arrival` in seconds."""
        from vllm.v1.request import Request

        block_tokens = self.settings.block_tokens
        if prompt_tokens + output_tokens > self.settings.max_model_len:
            raise ValueError(
                f"request {request_id} needs {prompt_tokens + output_tokens} tokens, more than "
                f"max_model_len {self.settings.max_model_len}; shorten it"
            )
        if prefix is not None and len(prefix) != -(-prompt_tokens // block_tokens):
            raise ValueError(
                f"request {request_id} has {len(prefix)} prefix ids for {prompt_tokens} prompt "
                f"tokens; give one for each block of {block_tokens}"
            )
        number = self._submitted
        self._submitted += 1
        if self.hashing == "vllm":
            tokens = prompt_token_ids(prefix, prompt_tokens, block_tokens, number)
            hasher = _vllm_hasher(block_tokens)
        else:
            tokens = [0] * prompt_tokens  # never read: only their number matters to the scheduler
            hasher = content_hasher(prefix, prompt_tokens, block_tokens, number)
        self._next_output[request_id] = OUTPUT_BASE + number * OUTPUT_STRIDE
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=tokens,
                sampling_params=_sampling_params(output_tokens),
                pooling_params=None,
                arrival_time=arrival,
                priority=priority,
                block_hasher=hasher if self.settings.enable_prefix_caching else None,
                **no_end_of_text(Request),
            )
        )

    def withdraw(self, request_id: str) -> None:
        """Abort it, as vLLM's engine core does between two steps."""
        from vllm.v1.request import RequestStatus

        request, counters = self.scheduler.requests[request_id], self.counters
        running = request in self.scheduler.running
        flying = request.num_output_placeholders
        counters.withdrawn_running += running
        counters.withdrawn_returning += not running and request_id in self._returning
        counters.withdrawn_new += not running and request_id not in self._returning
        counters.withdrawn_in_chunk += running and (
            request.num_computed_tokens < request.num_prompt_tokens
        )
        counters.withdrawn_in_flight += running and flying > 0
        counters.withdrawn_at_end += (
            running and flying > 0 and request.num_output_tokens + flying == request.max_tokens
        )
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._returning.discard(request_id)
        del self._next_output[request_id]

    @property
    def names(self) -> list[str]:
        """Requests that have not ended, in order of submission."""
        return [name for name, r in self.scheduler.requests.items() if not r.is_finished()]

    def step(self) -> Observed:
        """One schedule, one fake forward pass, one update: of this batch, or of the one before
        it."""
        scheduler = self.scheduler
        before = [request.request_id for request in scheduler.running]
        self._batch, self._victims = list(before), []
        plan = scheduler.schedule()
        scheduled = dict(plan.num_scheduled_tokens)
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        hits = self._admitted(len(before) - len(self._victims), scheduled)

        self.counters.preemptions += len(self._victims)
        self._returning.update(self._victims)
        finished = self._execute(plan)
        self._returning.difference_update(finished)
        for request_id in finished:
            del self._next_output[request_id]
        return Observed(
            scheduled=scheduled,
            preempted=tuple(self._victims),
            free_blocks=free_blocks,
            hits=hits,
            finished=finished,
            running=tuple(request.request_id for request in scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def _execute(self, plan) -> tuple[str, ...]:
        """Put the batch in the queue and, if that is full then, take in the oldest one's output."""
        scheduler = self.scheduler
        self._queue.appendleft((plan, self._sampled(plan)))
        if self.settings.async_scheduling:
            self.counters.held_back += sum(
                request.request_id not in plan.num_scheduled_tokens
                and request.num_output_placeholders > 0
                and request.num_output_tokens + 1 == request.max_tokens
                for request in scheduler.running
            )
        depth = self.settings.pipeline_stages + self.settings.async_scheduling
        if len(self._queue) < depth and (plan.num_scheduled_tokens or scheduler.has_requests()):
            return ()
        running = {request.request_id for request in scheduler.running}
        outputs = scheduler.update_from_output(*self._queue.pop())
        finished = tuple(
            output.request_id
            for client in outputs.values()
            for output in client.outputs
            if output.finish_reason is not None
        )
        self.counters.ended_victims += len(set(finished) - running)
        return finished

    def _sampled(self, plan):
        """What the model will answer: a token for each request whose known text is computed with
        it."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(plan.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            if computes_chunk(self.scheduler.requests[request_id]):
                self.counters.partial_chunks += 1
                sampled.append([])
            else:
                sampled.append([self._next_output[request_id]])
                self._next_output[request_id] += 1
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _admitted(self, kept: int, scheduled: dict[str, int]) -> dict[str, int]:
        """Hit tokens of the requests that joined the batch: those behind the `kept` old ones."""
        hits = {}
        for request in self.scheduler.running[kept:]:
            request_id = request.request_id
            hits[request_id] = hit = request.num_computed_tokens - scheduled[request_id]
            if request_id in self._returning:
                self.counters.resumed_hit_tokens += hit
            else:
                self.counters.hit_tokens += hit
        return hits

    @property
    def unfinished(self) -> int:
        return self.scheduler.get_num_unfinished_requests()


@functools.cache
def _sampling_params(max_tokens: int):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)


@functools.cache
def _vllm_hasher(block_tokens: int):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(block_tokens, sha256)
