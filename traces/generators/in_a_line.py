"""Workloads that are stated in a line, KIND:option=value,...: which kinds there are."""

from __future__ import annotations

from collections.abc import Callable

from twinserve.traces.generators.agents import agents
from twinserve.traces.generators.stated import KINDS as STATED
from twinserve.traces.generators.stated import stated
from twinserve.traces.generators.vllm_random import vllm_random
from twinserve.traces.workload import Workload, WorkloadError

KINDS: dict[str, Callable[[str, int], Workload]] = {
    "vllm": vllm_random,
    **dict.fromkeys(STATED, stated),
    "agents": agents,
}
DESCRIPTIONS = {
    "vllm:request_rate=4,...": "the random load of vllm bench serve, with its options and draws",
    "stages:2x60/5x120,...": "requests a second x seconds, one stage after another",
    "ramp:from=1,to=10,duration=600,...": "a rate that grows, or falls",
    "diurnal:low=1,high=6,...": "a rate that goes up and down with the day",
    "bursts:base=2,peak=20,every=60,length=5,duration=600,...": "a rate with bursts",
    "closed:concurrency=16,requests=200,...": "so many requests at once, whatever they take",
    "agents:sessions=50,rate=0.5,...": "sessions that wait for tools between calls",
}


def is_in_a_line(name: str) -> bool:
    return name.partition(":")[0] in KINDS and ":" in name


def in_a_line(name: str, seed: int = 0) -> Workload:
    """The workload of such a name. Raises WorkloadError."""
    if seed < 0 or seed >= 2**32:
        raise WorkloadError(f"seed {seed} is not within 0 .. 4294967295: change it")
    return KINDS[name.partition(":")[0]](name, seed)
