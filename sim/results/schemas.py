"""Columns of the tables of a run, with the names of their types in Arrow."""

from __future__ import annotations

REQUESTS = {
    "request_id": "string",
    "service_class": "string",  # "rt" or "be"
    "group": "string",  # session or application; null where there is none
    "stage": "int64",
    "priority": "int64",
    "replica": "int64",  # that had it last; -1: none did
    "arrival_s": "double",  # NaN: never sent
    "first_scheduled_s": "double",  # NaN: never scheduled
    "first_token_s": "double",  # NaN: none yet
    "last_token_s": "double",  # the end of a finished request
    "prompt_tokens": "int64",
    "output_tokens": "int64",  # emitted
    "hit_tokens": "int64",
    "recomputes": "int64",
    "swaps": "int64",
    "swapped_tokens": "int64",
    "late_tokens": "int64",  # after the first, with a gap over slo_tpot_s
    "slo_ttft_s": "double",  # NaN: no objective
    "slo_tpot_s": "double",
    "finished": "bool",  # it got all its tokens, and its client was still there
    "outcome": "string",  # OUTCOMES; null: has not ended
    "ended_s": "double",  # NaN: has not ended
    "computed_tokens": "int64",  # with KV when it ended, prefix hits counted
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
    "replica": "int64",
    "start_s": "double",
    "end_s": "double",
    "prefill_requests": "int64",
    "prefill_tokens": "int64",
    "decode_requests": "int64",
    "running": "int64",
    "waiting": "int64",
    "kv_used_blocks": "int64",  # held by requests
    "kv_rt_blocks": "int64",
    "kv_be_blocks": "int64",
    "kv_cached_blocks": "int64",  # held by no request, but a prefix is kept in them
    "preempted_recompute": "int64",
    "preempted_swap": "int64",
    "to_host_bytes": "int64",
    "to_device_bytes": "int64",
    "hit_tokens": "int64",
}
PLACEMENTS = {
    "request_id": "string",
    "request": "int64",  # its number, in the order in which the fleet got requests
    "placement": "int64",  # 0: its first
    "replica": "int64",
    "role": "string",
    "placed_s": "double",
    "first_scheduled_s": "double",
    "ended_s": "double",
    "outcome": "string",  # OUTCOMES; null: has not ended
    "output_tokens": "int64",  # emitted there
    "hit_tokens": "int64",
    "computed_tokens": "int64",
    "recomputes": "int64",
    "swaps": "int64",
    "swapped_tokens": "int64",
}
REPLICAS = {
    "replica": "int64",
    "role": "string",
    "policy": "string",
    "ledger": "string",
    "profile": "string",
    "num_blocks": "int64",
    "block_tokens": "int64",
    "warming_s": "double",  # when it began to be so; NaN: it never was
    "up_s": "double",
    "draining_s": "double",
    "down_s": "double",
    "failed": "bool",
}
# Of runs in which something was to fail (sim/fleet/faults.py).
FAILURES = {
    "kind": "string",
    "of": "int64",  # replica by number in the beginning
    "replica": "int64",  # that it struck
    "successor": "int64",  # that took its place; -1: none did
    "at_s": "double",
    "end_s": "double",  # NaN: it lasts
    "seen_s": "double",  # when the router learned of a crash; NaN: of no crash
    "up_s": "double",  # when the successor took requests; NaN: none did
    "recovered_s": "double",  # docs/failures.md; NaN: not while requests arrived
    "requests": "int64",  # that a crash hit: these became, in part,
    "failed": "int64",
    "retried": "int64",
    "migrated": "int64",
    "left": "int64",  # their clients did, before the router knew
    "lost_kv_tokens": "int64",
    "discarded_tokens": "int64",  # output tokens
}
GAPS = {"service_class": "string", "gap_s": "double", "count": "int64"}
TABLES = {
    "requests": REQUESTS,
    "placements": PLACEMENTS,
    "replicas": REPLICAS,
    "steps": STEPS,
    "gaps": GAPS,
}
OPTIONAL_TABLES = {"failures": FAILURES}
