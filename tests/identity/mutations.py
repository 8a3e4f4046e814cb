"""Seeded breaks of single rules: a method's source is rewritten in one place and bound to one object.

A mutation test is only as good as its aim, so an edit whose text is not found exactly once is an error, never a
mutation that does nothing. The same tool breaks vLLM's scheduler and our own policy.
"""

from __future__ import annotations

import __future__
import inspect
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass


class MutationMisses(AssertionError):
    """The code to break is not there: the mutated code has changed and the mutation must be written anew."""


def rewrite_method(owner: object, method: str, edits: Sequence[tuple[str, str]]) -> None:
    """Give `owner` (an instance) its own copy of `method` with each (old, new) text edit applied.

    Each `old` must occur exactly once in the dedented source, else MutationMisses. Other instances of the class
    keep the original. Methods that use zero-argument super() cannot be rewritten this way.
    """
    original = inspect.getattr_static(type(owner), method)
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if kind else original
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        if source.count(old) != 1:
            raise MutationMisses(
                f"{type(owner).__name__}.{method} holds {source.count(old)} copies of {old!r}, not one; "
                "write this mutation anew"
            )
        source = source.replace(old, new)
    if kind:
        source = source[source.index("def ") :]  # drop the decorator; bound by hand below
    namespace = dict(sys.modules[function.__module__].__dict__)
    code = compile(
        source, inspect.getsourcefile(function), "exec", __future__.annotations.compiler_flag
    )
    exec(code, namespace)
    target = type(owner) if kind is classmethod else owner
    mutated = namespace[function.__name__]
    setattr(owner, method, mutated if kind is staticmethod else types.MethodType(mutated, target))


@dataclass(frozen=True)
class Mutation:
    """A break of one rule.

    rule     one of RULES
    edits    (path from the scheduler to the object, method, old text, new text)
    """

    name: str
    rule: str
    edits: tuple[tuple[str, str, str, str], ...]

    def apply(self, root: object) -> None:
        """Break the rule in this one `root` and the objects it owns."""
        grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for path, method, old, new in self.edits:
            grouped.setdefault((path, method), []).append((old, new))
        for (path, method), edits in grouped.items():
            owner = root
            for part in path.split(".") if path else ():
                owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
            rewrite_method(owner, method, edits)


# Every rule that a decision-identity test must be able to see broken.
RULES = (
    "victim",
    "resumption order",
    "no admission after preemption",
    "eviction order",
    "hit rule",
    "last-token rule",
    "chunk cap",
    "token budget",
    "watermark",
    "admission check",
    "waiting order",
    "memory accounting",
)

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
    ),
    Mutation(
        "preempts the earliest of the least urgent",
        "victim",
        (("", "schedule", "(r.priority, r.arrival_time)", "(r.priority, -r.arrival_time)"),),
    ),
    Mutation(
        "breaks a victim tie by the last in the batch",
        "victim",
        (
            (
                "",
                "schedule",
                "self.running,\n                            key=",
                "reversed(self.running),\n                            key=",
            ),
        ),
    ),
    Mutation(
        "keeps the budget of a victim that was already served",
        "token budget",
        (("", "schedule", "token_budget += restored", "pass"),),
    ),
    Mutation(
        "sends victims to the back of the queue",
        "resumption order",
        (("waiting", "prepend_request", "self.appendleft(request)", "self.append(request)"),),
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
        "does not refresh a block that is hit while free",
        "eviction order",
        (
            (
                _POOL,
                "touch",
                "self.free_block_queue.remove(block)",
                "self.free_block_queue.remove(block); block.reset_hash()",
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
                "            total_computed_tokens + num_new_tokens,\n            request.num_tokens,",
                "            total_computed_tokens,\n            request.num_tokens,",
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
