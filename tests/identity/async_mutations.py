"""Rules of asynchronous scheduling, broken on either side (paths from `ours.OurScheduler`, or from
vLLM's scheduler)."""

from __future__ import annotations

from tests.identity.mutations import Mutation

_CORE = "stepper.core"

OUR_ASYNC_MUTATIONS = (
    Mutation(
        "forgets the token in flight",
        "placeholder",
        ("preemption", 3),
        (
            (_CORE, "begin", "requests.output_tokens[going_on] += 1", "pass"),
            (_CORE, "begin", "requests.in_flight[going_on] = 1", "pass"),
        ),
    ),
    Mutation(
        "schedules a request once more while its last token is computed",
        "length limit",
        ("preemption", 3),
        ((_CORE, "begin", "going_on = going_on[going_on != row]", "pass"),),
    ),
    Mutation(
        "gives up an ending request's place before its last token has come",
        "place of an ending request",
        ("preemption", 3),
        (
            (_CORE, "begin", "if self._ends_early:", "if True:"),
            (_CORE, "complete", "if not self._ends_early:", "if False:"),
        ),
    ),
    Mutation(
        "publishes a block before its last token is known",
        "publication",
        ("preemption", 3),
        (
            (
                "ledger",
                "_known_blocks",
                "(table.known_tokens(rows) - table.in_flight[rows])",
                "table.known_tokens(rows)",
            ),
        ),
    ),
    Mutation(
        "publishes a block only when its owner is granted tokens again",
        "publication",
        ("partial_chunks", 5),
        ((_CORE, "complete", "if self._publishes:", "if False:"),),
    ),
    Mutation(
        "loses the token that a victim had in flight",
        "victim's token",
        ("preemption", 3),
        (
            (
                _CORE,
                "plan",
                "output_tokens[row] -= requests.in_flight[row]",
                "output_tokens[row] -= 2 * requests.in_flight[row]",
            ),
        ),
    ),
    Mutation(
        "still counts the placeholder of a victim",
        "victim's token",
        ("preemption", 3),
        ((_CORE, "plan", "requests.output_tokens[row] -= requests.in_flight[row]", "pass"),),
    ),
    Mutation(
        "leaves a victim that has ended in the queue",
        "ended victim",
        ("preemption", 3),
        (("policy", "on_finish", "self.waiting.remove(row)", "pass"),),
    ),
)

VLLM_ASYNC_MUTATIONS = (
    Mutation(
        "schedules a request once more while its last token is computed",
        "length limit",
        ("preemption", 3),
        (
            (
                "",
                "schedule",
                ">= request.num_prompt_tokens + request.max_tokens",
                "> request.num_prompt_tokens + request.max_tokens",
            ),
        ),
    ),
    Mutation(
        "holds a request back a token too early",
        "length limit",
        ("preemption", 3),
        (
            (
                "",
                "schedule",
                ">= request.num_prompt_tokens + request.max_tokens",
                ">= request.num_prompt_tokens + request.max_tokens - 1",
            ),
        ),
    ),
    Mutation(
        "waits for the tokens before it grants the next one",
        "placeholder",
        ("preemption", 3),
        (
            (
                "",
                "schedule",
                "+ request.num_output_placeholders\n            - request.num_computed_tokens",
                "- request.num_computed_tokens",
            ),
        ),
    ),
    Mutation(
        "publishes a block only when its owner is granted tokens again",
        "publication",
        ("partial_chunks", 5),
        (("kv_cache_manager", "cache_blocks", "if self.enable_caching:", "if False:"),),
    ),
)
