"""The class that `vllm serve` loads as one of our schedulers."""


def scheduler_class(asynchronous: bool) -> str:
    """Return the value for `--scheduler-cls`, with the engine's scheduling mode."""
    kind = "PolicyAsyncScheduler" if asynchronous else "PolicyScheduler"
    return f"twinserve.backends.live.serving.scheduler.{kind}"
