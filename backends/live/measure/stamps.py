"""Scheduler classes that change nothing, and write down when the engine got each request and each
token: for `vllm serve --scheduler-cls`, with `stamps_path` in --additional-config.

Times are `time.monotonic`, which processes of one Linux host share, so that a client there can
compare its own with them. Imports vLLM: name it by path.
"""

import json
import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from twinserve.backends.live.serving.scheduler import PolicyAsyncScheduler, PolicyScheduler


def _note_arrivals() -> None:
    """The engine's process notes when its input thread got a request: its loop reads that thread's
    queue only between two steps."""
    taken = EngineCore.preprocess_add_request
    if taken.__name__ == "noting":
        return

    def noting(core, request):
        found = taken(core, request)
        found[0].reached_s = time.monotonic()
        return found

    EngineCore.preprocess_add_request = noting


class _Stamping:
    """Write a JSON line for each ended request. It has its name; prompt_tokens; came_s (to the API
    server, as vLLM's own metrics count); reached_s (the engine's process); queued_s (between two
    steps); scheduled_s (first). tokens_s has a time for each token, when its step's outcome was
    booked."""

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        _note_arrivals()
        path = vllm_config.additional_config["stamps_path"]
        self._stamps = open(path, "a", buffering=1)  # for as long as the engine lives
        self._stamped: dict[str, dict] = {}

    def add_request(self, request) -> None:
        super().add_request(request)
        self._stamped[request.request_id] = {
            "name": request.request_id,
            "prompt_tokens": request.num_prompt_tokens,
            "came_s": request.arrival_time - time.time() + time.monotonic(),
            "reached_s": request.reached_s,
            "queued_s": time.monotonic(),
            "tokens_s": [],
        }

    def schedule(self, *args, **kwargs):
        now = time.monotonic()
        scheduled = super().schedule(*args, **kwargs)
        for new in scheduled.scheduled_new_reqs:
            self._stamped[new.req_id].setdefault("scheduled_s", now)
        return scheduled

    def update_from_output(self, scheduler_output, model_runner_output):
        told = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        for output in (output for outputs in told.values() for output in outputs.outputs):
            stamped = self._stamped[output.request_id]
            stamped["tokens_s"] += [now] * len(output.new_token_ids)
            if output.finish_reason is not None:
                self._stamps.write(json.dumps(self._stamped.pop(output.request_id)) + "\n")
        return told


class StampingScheduler(_Stamping, Scheduler):
    """For engines that step synchronously."""


class StampingAsyncScheduler(_Stamping, AsyncScheduler):
    """For engines that schedule asynchronously, vLLM's default on GPUs."""


class StampingPolicyScheduler(_Stamping, PolicyScheduler):
    """Of ours."""


class StampingPolicyAsyncScheduler(_Stamping, PolicyAsyncScheduler):
    """Of ours, asynchronous."""
