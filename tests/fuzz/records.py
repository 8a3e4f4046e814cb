"""A routing record and a fleet file with a push, well formed, to be damaged."""

import json

from twinserve.sim.results.routing import ROUTING

_IDLE = [0.0, 0, 0, 0, 0]

FLEET_OF_PUSH = """router: least-requests
pools:
  - {name: p, role: prefill, profile: llama-3.1-8b@h100}
  - {name: d, role: decode, profile: llama-3.1-8b@h100}
connector: {transfer: push, push_poll_ms: 1.0, push_timeout_s: 9, lease_s: 30}
local_prefill: llm-d:threshold=512
"""


def routing_record() -> str:
    """The lines of a record of two workers and three requests, as `twinserve route --record` writes
    them before they are compressed."""
    workers = ["http://a:1", "http://b:1"]
    lines: list = [
        {"routing": ROUTING.version, "router": "least-requests", "profile": None,
         "workers": workers},
    ]  # fmt: skip
    for replica in (0, 1):
        lines.append([0.1 * replica, "came", replica, replica, 500, 16, _IDLE])
    loads = [_IDLE, _IDLE]  # as last heard of
    for number in range(3):
        at, replica = 1.0 + number, 0  # the first of equals
        values = {"prompt_tokens": 40 + number, "arrival_s": at}
        view = [[each, 0, loads[each]] for each in (0, 1)]
        loads[replica] = [at, 0, 0, 0, 0]
        lines += [
            [at, "request", number, f"r{number}", values, -1, number, {"16": [number]}],
            [at, "asked", number, [], replica, view],
            [at, "sent", number, replica],
            [at, "heard", replica, True, [number]],
            [at + 0.1, "first token", number, replica],
            [at + 0.2, "measured", replica, loads[replica]],
            [at + 0.3, "ended", number, replica],
        ]
    return "".join(json.dumps(line) + "\n" for line in lines)
