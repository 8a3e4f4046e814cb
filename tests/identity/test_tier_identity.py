"""KV offloaded to the host: policy `vllm` decides on a ledger with a tier what vLLM's scheduler
decides with its OffloadingConnector, transfer for transfer, and the same chunks have the same
places on the host.

`tests/identity/regimes.py --of tiers` runs more of it, and asks for everything that can happen."""

from collections import Counter

import pytest

from tests.identity.mutations import Mutation
from tests.identity.offload import TIER_REGIMES, TierRegime, compare_tiers
from tests.parameters import mostly_nightly

# lru; arc, asynchronous; prompts only, asynchronous
IN_CI = [TIER_REGIMES[i] for i in (0, 6, 9)]
SCENARIOS = (("preemption", 1), ("mixed", 1))  # the nightly part `identity` has all


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(
    "regime", mostly_nightly(TIER_REGIMES, *IN_CI), ids=lambda regime: regime.name
)
def test_a_host_tier_is_used_as_vllm_uses_it(regime):
    steps, seen = 0, Counter()
    for generate, seed in SCENARIOS:
        report, more = compare_tiers(regime, generate, seed)
        assert report.mismatches == 0, f"{generate} {seed}: {report.first_mismatch}"
        steps += report.steps
        seen += more
    assert steps > 3_000
    assert all(seen[name] for name in ("loads", "stores", "evicted", "flushed")), seen


LRU, ARC, LATE, LARGE = (TIER_REGIMES[i] for i in range(4))
AHEAD, ARC_AHEAD, PROMPTS = TIER_REGIMES[5], TIER_REGIMES[6], TIER_REGIMES[4]
OFFLOAD, STORE, EVICTION = "offload", "store", "eviction"
BROKEN: tuple[tuple[TierRegime, Mutation], ...] = tuple(
    (regime, Mutation(name, "memory accounting", witness, ((path, method, old, new),)))
    for regime, name, witness, path, method, old, new in (
        (LRU, "use counts from the start of a text", ("preemption", 1),
         EVICTION, "used", "reversed(keys)", "keys"),
        (LRU, "evicts what was used last", ("preemption", 1),
         EVICTION, "evict", "in self._order.items()", "in reversed(self._order.items())"),
        (ARC, "what is used again stays among the recent", ("preemption", 1),
         EVICTION, "used", "self.frequent[key] = self.recent.pop(key)",
         "self.recent.move_to_end(key)"),
        (ARC, "what was stored counts as used again", ("preemption", 1),
         EVICTION, "used", "if key in inserted:", "if False:"),
        (LATE, "admits at the first offer", ("preemption", 1),
         STORE, "reserve", "self._offers.get(key, 0) >= self.threshold", "True"),
        (LRU, "gives no answer until a store has ended, and takes it for a miss", ("preemption", 1),
         OFFLOAD, "lookup", "pending |= found is Found.PENDING",
         "if found is Found.PENDING: break"),
        (LRU, "loads what is being loaded", ("mixed", 1),
         OFFLOAD, "lookup", "if self.loading and any(", "if False and any("),
        (LARGE, "loads less than a chunk", ("mixed", 1),
         OFFLOAD, "lookup", "if loaded < size:", "if loaded < 1:"),
        (LRU, "stores again what it has loaded", ("preemption", 1),
         OFFLOAD, "load", "upto // size, upto", "0, upto"),
        (PROMPTS, "stores outputs, too", ("preemption", 1),
         OFFLOAD, "_store", "if self.prompt_only:", "if False:"),
        (LRU, "lets others write where a store reads", ("preemption", 1),
         OFFLOAD, "ended", "if job.store:", "if False:"),
        (LRU, "preempts without waiting for stores", ("preemption", 1),
         OFFLOAD, "begin", "made.flush.update(request.jobs)", "pass"),
        (ARC_AHEAD, "use counts before the others have stored", ("preemption", 1),
         OFFLOAD, "begin", "self._store(row, self._requests[row], self._requests[row].upto, made)",
         "self._store(row, self._requests[row], self._requests[row].upto, made);"
         " self.store.ended(self._requests[row].access, self._requests[row].keys)"),
        (AHEAD, "asks while its own transfers go on", ("preemption", 1),
         OFFLOAD, "lookup", "if request.jobs:", "if False:"),
        (LRU, "loads take what prompts under way still need", ("mixed", 1),
         "ledger", "admit_load", "keep_free + beside", "keep_free"),
        (LRU, "a load needs room for itself alone", ("preemption", 2),
         "ledger", "admit_load", "if reserve_tokens and", "if False and"),
        (LRU, "computes the last token of no loaded text", ("mixed", 1),
         "core", "loaded", "int(requests.known_tokens(row)) - 1",
         "int(requests.known_tokens(row)) - 2"),
    )
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(("regime", "mutation"), BROKEN, ids=lambda v: getattr(v, "name", ""))
def test_a_broken_tier_is_caught(regime, mutation):
    report, _ = compare_tiers(regime, *mutation.witness, mutation)
    assert report.mismatches == 1
