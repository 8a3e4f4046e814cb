"""The rules of vLLM's scheduler, each broken by an edit of its source (written against vLLM 0.32)."""

from __future__ import annotations

from .mutations import Mutation

_KV = "kv_cache_manager"
_MANAGER = "kv_cache_manager.coordinator.single_type_managers.0"
_POOL = "kv_cache_manager.block_pool"
_QUEUE = "kv_cache_manager.block_pool.free_block_queue"
_INDEX = "kv_cache_manager.block_pool.cached_block_hash_to_block"

VLLM_MUTATIONS = (
    Mutation(
        "preempts the first request not yet served instead of the last",
        "victim",
        (
            ("", "schedule", "preempted_req = self.running[-1]", "preempted_req = request"),
            (
                "",
                "schedule",
                "preempted_req = self.running.pop()",
                "self.running.remove(preempted_req)",
            ),
        ),
        policy="fcfs",
    ),
    Mutation(
        "preempts the earliest of the least urgent",
        "victim",
        (("", "schedule", "(r.priority, r.arrival_time)", "(r.priority, -r.arrival_time)"),),
        policy="priority",
    ),
    Mutation(
        "breaks a victim tie by the last in the batch",
        "victim",
        (
            (
                "",
                "schedule",
                "self.running,\n                        key=",
                "reversed(self.running),\n                        key=",
            ),
        ),
        policy="priority",
    ),
    Mutation(
        "keeps the budget of a victim that was already served",
        "token budget",
        (("", "schedule", "token_budget += restored", "pass"),),
        policy="priority",
    ),
    Mutation(
        "sends victims to the back of the queue",
        "resumption order",
        (("waiting", "prepend_request", "self.appendleft(request)", "self.append(request)"),),
        policy="fcfs",
    ),
    Mutation(
        "admits in a step that preempted",
        "no admission after preemption",
        (("", "schedule", "if not preempted_reqs and", "if"),),
    ),
    Mutation(
        "reuses the most recently freed cached block first",
        "eviction order",
        (
            (
                _POOL,
                "free_blocks",
                "append_n(blocks_to_evict_last)",
                "prepend_n(blocks_to_evict_last)",
            ),
        ),
    ),
    Mutation(
        "evicts a prefix from its head",
        "eviction order",
        (
            (
                _MANAGER,
                "free",
                "reversed(self.pop_blocks_for_free(request_id))",
                "self.pop_blocks_for_free(request_id)",
            ),
        ),
    ),
    Mutation(
        "keeps unhashed blocks as long as cached ones",
        "eviction order",
        (
            (
                _POOL,
                "free_blocks",
                "prepend_n(blocks_to_evict_first)",
                "append_n(blocks_to_evict_first)",
            ),
        ),
    ),
    Mutation(
        "serves a duplicate from the newest copy",
        "hit rule",
        (
            (
                _INDEX,
                "get_one_block",
                "next(iter(blocks.values()))",
                "list(blocks.values())[-1]",
            ),
        ),
    ),
    Mutation(
        "publishes a block one step after it is granted",
        "hit rule",
        (
            (
                _KV,
                "allocate_slots",
                "total_computed_tokens + num_new_tokens,\n        request.num_tokens,",
                "total_computed_tokens,\n        request.num_tokens,",
            ),
        ),
    ),
    Mutation(
        "a returning request finds no block of its output",
        "hit rule",
        (
            (
                _KV,
                "get_computed_blocks",
                "max_cache_hit_length = request.num_tokens - 1",
                "max_cache_hit_length = request.num_prompt_tokens - 1",
            ),
        ),
    ),
    Mutation(
        "takes a whole prompt from the cache",
        "last-token rule",
        (
            (
                _KV,
                "get_computed_blocks",
                "max_cache_hit_length = request.num_tokens - 1",
                "max_cache_hit_length = request.num_tokens",
            ),
            (
                "",
                "schedule",
                "num_new_tokens = request.num_tokens - num_computed_tokens",
                "num_new_tokens = max(1, request.num_tokens - num_computed_tokens)",
            ),
        ),
    ),
    Mutation(
        "leaves two tokens to compute",
        "last-token rule",
        (
            (
                _KV,
                "get_computed_blocks",
                "max_cache_hit_length = request.num_tokens - 1",
                "max_cache_hit_length = request.num_tokens - 2",
            ),
        ),
    ),
    Mutation(
        "caps chunks one token higher",
        "chunk cap",
        (
            (
                "",
                "schedule",
                "self.scheduler_config.long_prefill_token_threshold\n        if num_eligible_reqs > 1",
                "self.scheduler_config.long_prefill_token_threshold + 1\n"
                "        if self.scheduler_config.long_prefill_token_threshold and num_eligible_reqs > 1",
            ),
        ),
    ),
    Mutation(
        "caps the chunks of a request that is alone",
        "chunk cap",
        (("", "schedule", "if num_eligible_reqs > 1", "if num_eligible_reqs >= 1"),),
    ),
    Mutation(
        "plans one token less than the budget",
        "token budget",
        (
            (
                "",
                "schedule",
                "token_budget = self.max_num_scheduled_tokens",
                "token_budget = self.max_num_scheduled_tokens - 1",
            ),
        ),
    ),
    Mutation(
        "ignores the watermark",
        "watermark",
        (
            (
                _KV,
                "allocate_slots",
                "watermark_blocks = self.watermark_blocks",
                "watermark_blocks = 0",
            ),
        ),
    ),
    Mutation(
        "rounds the watermark one block down",
        "watermark",
        (
            (
                _KV,
                "allocate_slots",
                "watermark_blocks = self.watermark_blocks",
                "watermark_blocks = max(0, self.watermark_blocks - 1)",
            ),
        ),
    ),
    Mutation(
        "keeps the watermark for the first request too",
        "watermark",
        (("", "schedule", "has_scheduled_reqs=bool(self.running)", "has_scheduled_reqs=True"),),
    ),
    Mutation(
        "admits when the first chunk fits",
        "admission check",
        (
            (
                "",
                "schedule",
                "full_sequence_must_fit=self.scheduler_reserve_full_isl",
                "full_sequence_must_fit=False",
            ),
        ),
    ),
    Mutation(
        "passes over a request that does not fit",
        "waiting order",
        (
            (
                "",
                "schedule",
                "self.encoder_cache_manager.free(request)\n                break",
                "self.encoder_cache_manager.free(request)\n"
                "                skip_request(request_queue)\n                continue",
            ),
        ),
    ),
    Mutation(
        "serves the newest arrival first",
        "waiting order",
        (("waiting", "add_request", "self.append(request)", "self.insert(1, request)"),),
        policy="fcfs",
    ),
    Mutation(
        "forgets urgency in the queue",
        "waiting order",
        (
            (
                "waiting",
                "add_request",
                "heapq.heappush(self._heap, request)",
                "self._heap.append(request)",
            ),
        ),
        policy="priority",
    ),
    Mutation(
        "counts a free hit block as memory",
        "memory accounting",
        (
            (
                _MANAGER,
                "get_num_blocks_to_allocate",
                "return num_new_blocks + num_evictable_blocks",
                "return num_new_blocks",
            ),
        ),
    ),
)
