"""Made-up measurements and a small trace, for the tests of the campaign."""

import json

import numpy as np

from twinserve.profiles.composition import StepComposition
from twinserve.profiles.measured.samples import Measurement, StepSample

TRACE = "\n".join(
    json.dumps(
        {
            "timestamp": 250 * i,
            "input_length": 40 + 13 * (i % 9),
            "output_length": 4 + i % 7,
            "hash_ids": [i],
        }
    )
    for i in range(40)
)


def seconds(work: StepComposition) -> float:
    """A made-up engine: 2 ms a step, 20 us a prompt token, 0.1 ms a decode, 1 us a context
    token."""
    return (
        2e-3
        + 2e-5 * int(work.prefill_new.sum())
        + 1e-4 * work.decode_requests
        + 1e-6 * work.decode_context
    )


def sample(
    kind: str, point: int, number: int, decodes: int, context: int, new: tuple[int, ...] = ()
) -> StepSample:
    fresh = np.array(new, np.int64)
    work = StepComposition(
        decodes, decodes * context, context * (decodes > 0), fresh, np.zeros(len(new), np.int64)
    )
    took = seconds(work) * (1 + 0.01 * (number % 3))
    return StepSample(kind, point, number, work, took, exec_s=0.8 * took)


def measured() -> Measurement:
    steps, point = [], 0
    for decodes in (1, 2, 4, 8):
        for context in (16, 64, 256):
            steps += [sample("decode", point, i, decodes, context) for i in range(4)]
            point += 1
    for new in ((16,), (64,), (128,), (64, 64)):
        steps += [
            sample("prefill" if len(new) == 1 else "prefills", point, i, 0, 0, new)
            for i in range(4)
        ]
        point += 1
    for decodes in (2, 6):
        steps += [sample("mixed", point, i, decodes, 64, (64,)) for i in range(4)]
        point += 1
        steps += [sample("check", point, i, decodes, 100, (32,)) for i in range(4)]
        point += 1
    facts = {
        "device": "Made up",
        "device_type": "cpu",
        "memory_bytes": 8e9,
        "matmul_flops": 1e11,
        "memory_bytes_per_s": 2e10,
        "link_bytes_per_s": 1e10,
        "vllm": "0.25.1",
        "torch": "2.11.0",
        "python": "3.12",
        "date": "2026-01-01",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "dtype": "float32",
        "num_blocks": 160,
        "block_tokens": 32,
        "seed": 0,
        "rounds": 4,
        "elapsed_s": 1.0,
        "empty_s": 1e-4,
        "submit_s": 5e-5,
        "settings": {
            "graphs": False,
            "threads": 1,
            "prefix_caching": True,
            "max_num_seqs": 8,
            "max_step_tokens": 256,
            "max_model_len": 512,
        },
    }
    return Measurement(steps, [], facts)
