"""What `vllm serve` calls a scheduler of ours."""

from __future__ import annotations


def scheduler_class(asynchronous: bool) -> str:
    """For `--scheduler-cls`, with scheduling as the engine has it."""
    kind = "PolicyAsyncScheduler" if asynchronous else "PolicyScheduler"
    return f"twinserve.backends.live.serving.scheduler.{kind}"
