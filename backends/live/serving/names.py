"""The names that a policy's scheduler takes from vLLM. `vllm serve` loads that scheduler by name,
so the release is checked here first. Then a missing name is one line and no failing import. Imports
vLLM."""

from twinserve.backends.live.needs import require

require("serving")

# ruff: noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from twinserve.backends.live.engine.scheduler import Steering

__all__ = [
    "AsyncScheduler",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "PauseState",
    "Request",
    "RequestStatus",
    "Scheduler",
    "Steering",
]
