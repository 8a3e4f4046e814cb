"""Simulated runs, and what `vllm bench serve` would have written of them."""

import json

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.error_bars import StepsOff, with_steps_off
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy

LOAD = "vllm:request_rate=20,num_prompts=60,random_input_len=400,random_output_len=40"


def run_of(decode=1.0, prefill=1.0, **settings):
    inputs = resolve(
        SimulationConfig(**{"trace": LOAD, "slo": "none", "async_scheduling": True, **settings})
    )
    return run_policy(with_steps_off(inputs, StepsOff("", decode, prefill)), inputs.policies[0])


def queued(arrival_s: list[float], service_s: float, streams_s: float = 0.05) -> str:
    """What vllm bench serve would have written of a server that answers one request at a time, in
    the order of arrival: service_s each, of which the last streams_s after the first token."""
    free, ends = 0.0, []
    for arrival in arrival_s:
        free = max(free, arrival) + service_s
        ends.append(free)
    latencies = [end - arrival for end, arrival in zip(ends, arrival_s, strict=True)]
    n = len(ends)
    content = {
        "request_throughput": 1.0,
        "total_output_tokens": 6 * n,
        "max_concurrency": None,
        "input_lens": [100] * n,
        "output_lens": [6] * n,
        "start_times": [700 + arrival for arrival in arrival_s],
        "ttfts": [latency - streams_s for latency in latencies],
        "itls": [[streams_s / 5] * 5] * n,
        "latencies": latencies,
        "errors": [""] * n,
    }
    return json.dumps(content)


def bench(result, **changes) -> str:
    """What vllm bench serve would have written of a run; gaps are even within a request."""
    r = result.rows.requests
    tokens = r["output_tokens"]
    ttft = r["first_token_s"] - r["arrival_s"]
    gap = (r["last_token_s"] - r["first_token_s"]) / (tokens - 1)
    content = {
        "request_throughput": 1.0,
        "total_output_tokens": int(tokens.sum()),
        "max_concurrency": None,
        "input_lens": r["prompt_tokens"].tolist(),
        "output_lens": tokens.tolist(),
        "start_times": (r["arrival_s"] + 700).tolist(),
        "ttfts": ttft.tolist(),
        "itls": [[g] * (n - 1) for g, n in zip(gap, tokens, strict=True)],
        "latencies": (r["last_token_s"] - r["arrival_s"]).tolist(),
        "errors": [""] * len(r),
    }
    return json.dumps(content | changes)
