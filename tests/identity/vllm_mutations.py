"""The rules of vLLM's scheduler, each broken by an edit of its source (written against vLLM 0.32).

The comparison is shown to see every one of them before it is trusted with our own policy.
"""

from __future__ import annotations

from tests.identity.mutations import Mutation

_KV = "kv_cache_manager"
_MANAGER = "kv_cache_manager.coordinator.single_type_managers.0"
_POOL = "kv_cache_manager.block_pool"
_INDEX = "kv_cache_manager.block_pool.cached_block_hash_to_block"
_HIT_LIMIT = "max_cache_hit_length = request.num_tokens - 1"
_CAP = "self.scheduler_config.long_prefill_token_threshold\n        if num_eligible_reqs > 1"


def _in_schedule(old: str, new: str) -> tuple[str, str, str, str]:
    return ("", "schedule", old, new)


VLLM_MUTATIONS = (
    Mutation(
        "preempts the request that asks instead of the last",
        "victim",
        ("preemption", 3),
        (
            _in_schedule("preempted_req = self.running[-1]", "preempted_req = request"),
            _in_schedule(
                "preempted_req = self.running.pop()", "self.running.remove(preempted_req)"
            ),
        ),
    ),
    Mutation(
        "preempts the earliest of the least urgent",
        "victim",
        ("priority", 2),
        (_in_schedule("(r.priority, r.arrival_time)", "(r.priority, -r.arrival_time)"),),
    ),
    Mutation(
        "breaks a victim tie by the last in the batch",
        "victim",
        ("priority", 2),
        (
            _in_schedule(
                "self.running,\n                        key=",
                "reversed(self.running),\n                        key=",
            ),
        ),
    ),
    Mutation(
        "sends victims to the back of the queue",
        "resumption order",
        ("preemption", 3),
        (("waiting", "prepend_request", "self.appendleft(request)", "self.append(request)"),),
    ),
    Mutation(
        "admits in a step that preempted",
        "no admission after preemption",
        ("preemption", 5),
        (_in_schedule("if not preempted_reqs and", "if"),),
    ),
    Mutation(
        "serves the newest arrival first",
        "waiting order",
        ("preemption", 3),
        (("waiting", "add_request", "self.append(request)", "self.insert(1, request)"),),
    ),
    Mutation(
        "forgets urgency in the queue",
        "waiting order",
        ("priority", 2),
        (
            (
                "waiting",
                "add_request",
                "heapq.heappush(self._heap, request)",
                "self._heap.append(request)",
            ),
        ),
    ),
    Mutation(
        "passes over a request that does not fit",
        "waiting order",
        ("preemption", 3),
        (
            _in_schedule(
                "self.encoder_cache_manager.free(request)\n                break",
                "self.encoder_cache_manager.free(request)\n"
                "                skip_request(request_queue)\n                continue",
            ),
        ),
    ),
    Mutation(
        "plans one token less than the budget",
        "token budget",
        ("partial_chunks", 0),
        (
            _in_schedule(
                "token_budget = self.max_num_scheduled_tokens",
                "token_budget = self.max_num_scheduled_tokens - 1",
            ),
        ),
    ),
    Mutation(
        "keeps the budget of a victim that was already served",
        "token budget",
        ("priority", 5),
        (_in_schedule("token_budget += restored", "pass"),),
    ),
    Mutation(
        "caps chunks one token higher",
        "chunk cap",
        ("partial_chunks", 1),
        (
            _in_schedule(
                _CAP,
                _CAP.replace("threshold", "threshold + 1", 1).replace(
                    "if", "if self.scheduler_config.long_prefill_token_threshold and"
                ),
            ),
        ),
    ),
    Mutation(
        "caps the chunks of a request that is alone",
        "chunk cap",
        ("partial_chunks", 1),
        (_in_schedule("if num_eligible_reqs > 1", "if num_eligible_reqs >= 1"),),
    ),
    Mutation(
        "admits when the first chunk fits",
        "admission check",
        ("preemption", 0),
        (
            _in_schedule(
                "full_sequence_must_fit=self.scheduler_reserve_full_isl",
                "full_sequence_must_fit=False",
            ),
        ),
    ),
    Mutation(
        "ignores the watermark",
        "watermark",
        ("preemption", 2),
        ((_KV, "allocate_slots", "watermark_blocks = self.watermark_blocks", "pass"),),
    ),
    Mutation(
        "keeps one block less than the watermark",
        "watermark",
        ("preemption", 2),
        (
            (
                _KV,
                "allocate_slots",
                "watermark_blocks = self.watermark_blocks",
                "watermark_blocks = self.watermark_blocks - 1",
            ),
        ),
    ),
    Mutation(
        "keeps the watermark for the first request too",
        "watermark",
        ("preemption", 6),
        (_in_schedule("has_scheduled_reqs=bool(self.running)", "has_scheduled_reqs=True"),),
    ),
    Mutation(
        "does not count an idle hit block as memory",
        "memory accounting",
        ("mixed", 0),
        (
            (
                _MANAGER,
                "get_num_blocks_to_allocate",
                "return num_new_blocks + num_evictable_blocks",
                "return num_new_blocks",
            ),
        ),
    ),
    Mutation(
        "reuses the most recently freed cached block first",
        "eviction order",
        ("preemption", 1),
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
        ("preemption", 1),
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
        "keeps blocks without a hash as long as cached ones",
        "eviction order",
        ("preemption", 1),
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
        ("preemption", 1),
        ((_INDEX, "get_one_block", "next(iter(blocks.values()))", "list(blocks.values())[-1]"),),
    ),
    Mutation(
        "publishes a block one step after it is granted",
        "hit rule",
        ("mixed", 2),
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
        ("preemption", 1),
        ((_KV, "get_computed_blocks", _HIT_LIMIT, _HIT_LIMIT.replace("tokens", "prompt_tokens")),),
    ),
    Mutation(
        "takes a whole prompt from the cache",
        "last-token rule",
        ("preemption", 3),
        (
            (_KV, "get_computed_blocks", _HIT_LIMIT, _HIT_LIMIT.replace(" - 1", "")),
            _in_schedule(
                "num_new_tokens = request.num_tokens - num_computed_tokens",
                "num_new_tokens = max(1, request.num_tokens - num_computed_tokens)",
            ),
        ),
    ),
    Mutation(
        "leaves two tokens to compute",
        "last-token rule",
        ("preemption", 1),
        ((_KV, "get_computed_blocks", _HIT_LIMIT, _HIT_LIMIT.replace("- 1", "- 2")),),
    ),
)
