"""Columns of a run's tables, with their Arrow types (`columns.csv`)."""

from __future__ import annotations

from twinserve.formats import shipped_rows


def _columns(table: str) -> dict[str, str]:
    rows = shipped_rows(__package__, "columns.csv")
    return {row["column"]: row["type"] for row in rows if row["table"] == table}


TABLES = {name: _columns(name) for name in ("requests", "placements", "replicas", "steps", "gaps")}
REQUESTS, PLACEMENTS, REPLICAS, STEPS, GAPS = TABLES.values()
FAILURES = _columns("failures")  # of runs in which something was to fail (sim/fleet/faults.py)
OPTIONAL_TABLES = {"failures": FAILURES}

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
