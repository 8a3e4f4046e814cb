"""The same rules broken on our side, in policy and ledger (paths from `ours.OurScheduler`)."""

from __future__ import annotations

from tests.identity.mutations import Mutation

_POOL = "ledger.pool"


def _in_policy(method: str, old: str, new: str) -> tuple[str, str, str, str]:
    return ("policy", method, old, new)


OUR_MUTATIONS = (
    Mutation(
        "preempts the last but one",
        "victim",
        ("preemption", 3),
        (
            _in_policy(
                "_victim", "return len(self.running) - 1", "return max(0, len(self.running) - 2)"
            ),
        ),
    ),
    Mutation(
        "preempts the earliest of the least urgent",
        "victim",
        ("priority", 2),
        (_in_policy("_victim", "requests.arrival_s[", "-requests.arrival_s["),),
    ),
    Mutation(
        "breaks a victim tie by the last in the batch",
        "victim",
        ("priority", 2),
        (_in_policy("_victim", "range(len(rows))", "reversed(range(len(rows)))"),),
    ),
    Mutation(
        "sends victims to the back of the queue",
        "resumption order",
        ("preemption", 3),
        (("policy.waiting", "put_back", "self._rows.appendleft(row)", "self._rows.append(row)"),),
    ),
    Mutation(
        "admits in a step that preempted",
        "no admission after preemption",
        ("preemption", 5),
        (_in_policy("plan", "if not plan.preempted and budget > 0", "if budget > 0"),),
    ),
    Mutation(
        "serves the newest arrival first",
        "waiting order",
        ("preemption", 3),
        (("policy.waiting", "add", "self._rows.append(row)", "self._rows.insert(1, row)"),),
    ),
    Mutation(
        "forgets urgency in the queue",
        "waiting order",
        ("priority", 2),
        (("policy.waiting", "add", "int(requests.priority[row])", "0"),),
    ),
    Mutation(
        "breaks a queue tie by order of arrival instead of by name",
        "waiting order",
        ("priority", 2),
        (("policy.waiting", "add", "requests.ids[row], row)", "row, row)"),),
    ),
    Mutation(
        "plans one token less than the budget",
        "token budget",
        ("partial_chunks", 0),
        (
            _in_policy(
                "_grant_running",
                "budget = self.limits.max_num_batched_tokens",
                "budget = self.limits.max_num_batched_tokens - 1",
            ),
        ),
    ),
    Mutation(
        "keeps the budget of a victim that was already served",
        "token budget",
        ("priority", 5),
        (
            _in_policy(
                "_grant_one_by_one", "budget += granted.pop(victim) + slots", "granted.pop(victim)"
            ),
        ),
    ),
    Mutation(
        "caps chunks one token higher",
        "chunk cap",
        ("partial_chunks", 1),
        (
            _in_policy(
                "_long_prefill_cap",
                "else self.options.long_prefill_token_threshold",
                "else self.options.long_prefill_token_threshold + 1",
            ),
        ),
    ),
    Mutation(
        "caps the chunks of a request that is alone",
        "chunk cap",
        ("partial_chunks", 1),
        (_in_policy("_long_prefill_cap", "<= 1", "<= 0"),),
    ),
    Mutation(
        "admits when the first chunk fits",
        "admission check",
        ("preemption", 0),
        (_in_policy("_admit", "reserve = known if", "reserve = 0 if"),),
    ),
    Mutation(
        "ignores the watermark",
        "watermark",
        ("preemption", 2),
        (_in_policy("_kept_free", "return int(", "return 0 * int("),),
    ),
    Mutation(
        "takes the watermark of the blocks without the null block",
        "watermark",
        ("preemption", 6),
        (_in_policy("_kept_free", "(ledger.num_blocks + 1)", "ledger.num_blocks"),),
    ),
    Mutation(
        "keeps the watermark for the first request too",
        "watermark",
        ("preemption", 6),
        (_in_policy("_kept_free", "if self.running else 0", "if True else 0"),),
    ),
    Mutation(
        "does not count an idle hit block as memory",
        "memory accounting",
        ("mixed", 0),
        (("ledger", "_admit", "must_fit + idle + keep_free", "must_fit + keep_free"),),
    ),
    Mutation(
        "reuses the most recently freed cached blocks first",
        "eviction order",
        ("preemption", 1),
        ((_POOL, "release", "self._order.append(", "self._order.appendleft("),),
    ),
    Mutation(
        "evicts a prefix from its head",
        "eviction order",
        ("preemption", 1),
        (("ledger", "_give_back", "self.pool.release(blocks[::-1])", "self.pool.release(blocks)"),),
    ),
    Mutation(
        "evicts a cached block while a blank one is left",
        "eviction order",
        ("preemption", 1),
        (
            (
                _POOL,
                "take",
                "from_blank = min(n, self._blank.free)",
                "from_blank = max(0, min(n, self.blank) - 1, n - self.cached)",
            ),
        ),
    ),
    Mutation(
        "serves a duplicate from the newest copy",
        "hit rule",
        ("preemption", 1),
        (
            (
                _POOL,
                "publish",
                "self._found_at[contents[fresh]] = places[fresh]",
                "self._found_at[contents] = places",
            ),
        ),
    ),
    Mutation(
        "publishes the blocks of an admission one step late",
        "hit rule",
        ("mixed", 2),
        (("ledger", "admit", "self._publish(row, tokens // self.block_tokens)", "pass"),),
    ),
    Mutation(
        "a returning request finds no block of its output",
        "hit rule",
        ("preemption", 1),
        (
            (
                "ledger",
                "hit_tokens",
                "self.table.known_tokens(row)",
                "self.table.prompt_tokens[row]",
            ),
        ),
    ),
    Mutation(
        "takes a whole prompt from the cache",
        "last-token rule",
        ("preemption", 3),
        (("ledger", "hit_tokens", "(known - 1) //", "known //"),),
    ),
    Mutation(
        "leaves two tokens to compute",
        "last-token rule",
        ("preemption", 1),
        (("ledger", "hit_tokens", "(known - 1) //", "(known - 2) //"),),
    ),
)
