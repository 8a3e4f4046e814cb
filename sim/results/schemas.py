"""Columns of the tables of a run, with their types."""

from __future__ import annotations

import pyarrow as pa

REQUESTS = {
    "request_id": pa.string(),
    "service_class": pa.string(),  # "rt" or "be"
    "group": pa.string(),  # session or application; null where there is none
    "stage": pa.int64(),
    "priority": pa.int64(),
    "replica": pa.int64(),  # that had it last; -1: none did
    "arrival_s": pa.float64(),  # NaN: never sent
    "first_scheduled_s": pa.float64(),  # NaN: never scheduled
    "first_token_s": pa.float64(),  # NaN: none yet
    "last_token_s": pa.float64(),  # the end of a finished request
    "prompt_tokens": pa.int64(),
    "output_tokens": pa.int64(),  # emitted
    "hit_tokens": pa.int64(),
    "recomputes": pa.int64(),
    "swaps": pa.int64(),
    "swapped_tokens": pa.int64(),
    "late_tokens": pa.int64(),  # after the first, with a gap over slo_tpot_s
    "slo_ttft_s": pa.float64(),  # NaN: no objective
    "slo_tpot_s": pa.float64(),
    "finished": pa.bool_(),  # it got all its tokens, and its client was still there
    "outcome": pa.string(),  # OUTCOMES; null: has not ended
    "ended_s": pa.float64(),  # NaN: has not ended
    "computed_tokens": pa.int64(),  # with KV when it ended, prefix hits counted
}
# Further columns of REQUESTS in runs with a front end, whose other times are the clients'; seconds.
ENGINE_ARRIVAL, ENGINE_FIRST_TOKEN = "engine_arrival_s", "engine_first_token_s"
# Further column of REQUESTS with a host tier: prompt tokens that the first admission found there,
# behind those found on the device.
HOST_TOKENS = "host_tokens"
# Further columns of REQUESTS where prefill is apart from decode, each with `_s` behind it: seconds
# (sim/fleet/rows.py). With a front end there is one more.
TTFT_PARTS = ("router", "queue", "prefill", "transfer", "decode_queue", "first_step")
FRONT_END_PART = "front_end"
OUTCOMES = (
    "completed",
    "timed_out",
    "disconnected",
    "failed",
    "moved",
    "rejected",
    "never_sent",
    "handed_over",
)  # by requests.End, without NONE
STAYS = ("moved", "handed_over")  # of these, the ends of stays after which the request goes on
STEPS = {
    "replica": pa.int64(),
    "start_s": pa.float64(),
    "end_s": pa.float64(),
    "prefill_requests": pa.int64(),
    "prefill_tokens": pa.int64(),
    "decode_requests": pa.int64(),
    "running": pa.int64(),
    "waiting": pa.int64(),
    "kv_used_blocks": pa.int64(),  # held by requests
    "kv_rt_blocks": pa.int64(),
    "kv_be_blocks": pa.int64(),
    "kv_cached_blocks": pa.int64(),  # held by no request, but a prefix is kept in them
    "preempted_recompute": pa.int64(),
    "preempted_swap": pa.int64(),
    "to_host_bytes": pa.int64(),
    "to_device_bytes": pa.int64(),
    "hit_tokens": pa.int64(),
}
PLACEMENTS = {
    "request_id": pa.string(),
    "request": pa.int64(),  # its number, in the order in which the fleet got requests
    "placement": pa.int64(),  # 0: its first
    "replica": pa.int64(),
    "role": pa.string(),
    "placed_s": pa.float64(),
    "first_scheduled_s": pa.float64(),
    "ended_s": pa.float64(),
    "outcome": pa.string(),  # OUTCOMES; null: has not ended
    "output_tokens": pa.int64(),  # emitted there
    "hit_tokens": pa.int64(),
    "computed_tokens": pa.int64(),
    "recomputes": pa.int64(),
    "swaps": pa.int64(),
    "swapped_tokens": pa.int64(),
}
REPLICAS = {
    "replica": pa.int64(),
    "role": pa.string(),
    "policy": pa.string(),
    "ledger": pa.string(),
    "profile": pa.string(),
    "num_blocks": pa.int64(),
    "block_tokens": pa.int64(),
    "warming_s": pa.float64(),  # when it began to be so; NaN: it never was
    "up_s": pa.float64(),
    "draining_s": pa.float64(),
    "down_s": pa.float64(),
    "failed": pa.bool_(),
}
# Of runs in which something was to fail (sim/fleet/faults.py).
FAILURES = {
    "kind": pa.string(),
    "of": pa.int64(),  # replica by number in the beginning
    "replica": pa.int64(),  # that it struck
    "successor": pa.int64(),  # that took its place; -1: none did
    "at_s": pa.float64(),
    "end_s": pa.float64(),  # NaN: it lasts
    "seen_s": pa.float64(),  # when the router learned of a crash; NaN: of no crash
    "up_s": pa.float64(),  # when the successor took requests; NaN: none did
    "recovered_s": pa.float64(),  # docs/failures.md; NaN: not while requests arrived
    "requests": pa.int64(),  # that a crash hit: these became, in part,
    "failed": pa.int64(),
    "retried": pa.int64(),
    "migrated": pa.int64(),
    "left": pa.int64(),  # their clients did, before the router knew
    "lost_kv_tokens": pa.int64(),
    "discarded_tokens": pa.int64(),  # output tokens
}
GAPS = {"service_class": pa.string(), "gap_s": pa.float64(), "count": pa.int64()}
TABLES = {
    "requests": REQUESTS,
    "placements": PLACEMENTS,
    "replicas": REPLICAS,
    "steps": STEPS,
    "gaps": GAPS,
}
OPTIONAL_TABLES = {"failures": FAILURES}
