"""The scheduler's side: put block-table entries with directions into the message that goes to the worker.

The worker keeps what it is sent, so this works alike for a worker in this process and in another.
"""

from __future__ import annotations

from collections.abc import Callable


def rewrite_blocks(output, entries: Callable[[str, list[int], bool], list[int]]) -> None:
    """Replace the block numbers in vLLM's SchedulerOutput `output`, in place.

    entries(request_id, blocks, anew) gives the entries to send instead of `blocks`, the request's new ones, in order
    of its text; anew: they replace what the worker has of the request, else they go behind it.

    One KV cache group only; raises ValueError for more.
    """
    cached = output.scheduled_cached_reqs
    for request in output.scheduled_new_reqs:
        request.block_ids = _rewritten(request.req_id, request.block_ids, True, entries)
    for index, request_id in enumerate(cached.req_ids):
        if (blocks := cached.new_block_ids[index]) is not None:
            anew = request_id in cached.resumed_req_ids
            cached.new_block_ids[index] = _rewritten(request_id, blocks, anew, entries)


def _rewritten(request_id: str, groups, anew: bool, entries) -> tuple[list[int]]:
    if len(groups) != 1:
        raise ValueError(f"request {request_id} has blocks in {len(groups)} KV cache groups; directions are for one")
    return ([int(entry) for entry in entries(request_id, list(groups[0]), anew)],)
