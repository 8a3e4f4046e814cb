"""Host time: what an engine's processor does between two steps (schedule, prepare inputs, collect
what was sampled), while the GPU has nothing to do.

An engine that schedules asynchronously does this work while the step before runs. One that
schedules synchronously adds it to every step: `--host-time`.
"""

import re
from decimal import Decimal

from pydantic.dataclasses import dataclass

from twinserve.profiles.specs import STRICT, ProfileError

UNITS = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}  # of times, in seconds
_LONGEST_S = 10.0  # a host that needs longer for a step is a mistake
_TIME = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us)\s*")


@dataclass(frozen=True, config=STRICT)
class HostTime:
    """Seconds that the GPU waits for the host: a step, and each request in it."""

    step_s: float
    request_s: float

    def __str__(self) -> str:
        return f"{1e3 * self.step_s:g} ms a step and {1e6 * self.request_s:g} us a request"


NO_HOST_TIME = HostTime(0.0, 0.0)
# A rough figure: steps of servers with synchronous scheduling took about 1.4 ms longer than these
# profiles say with 8 requests, 3 with 64, 6 with 128. Neither the runs nor their hosts are public.
# The line of least squares; it leaves 0.2 to 0.4 ms. A host of our own was quicker, 1.5 ms and
# 11 us (vLLM 0.25.1), but others' servers were not (docs/profiles.md).
VLLM_SYNCHRONOUS = HostTime(0.9e-3, 39e-6)


def host_time(text: str, asynchronous: bool) -> HostTime:
    """What `--host-time TEXT` means: `auto`, which is nothing with asynchronous scheduling and
    vLLM's with synchronous; `none`; or STEP+REQUEST with units. ProfileError, one line, for what is
    neither."""
    if text == "auto":
        return NO_HOST_TIME if asynchronous else VLLM_SYNCHRONOUS
    if text == "none":
        return NO_HOST_TIME
    parts = [_TIME.fullmatch(part) for part in re.split("[+,]", text)]
    if len(parts) != 2 or None in parts:
        raise ProfileError(
            f"--host-time {text!r} is not understood; write auto, none, or the time of a step and "
            "of each request in it, as 0.9ms+39us"
        )
    step_s, request_s = (float(Decimal(part[1]) * UNITS[part[2]]) for part in parts if part)
    if max(step_s, request_s) > _LONGEST_S:
        raise ProfileError(
            f"--host-time {text!r}: is more than {_LONGEST_S:g} s; give the time of a step and of "
            "each request in it, as 0.9ms+39us"
        )
    return HostTime(step_s, request_s)
