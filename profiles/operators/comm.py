"""Times of collective operations where neither model tables nor NVLink give them: two RTX PRO 6000
over PCIe.

Points of the tables that ship with aiconfigurator-core 0.12.0 (Apache-2.0), bf16, two GPUs of this
kind, microseconds by message bytes. vLLM's own all-reduce, inside CUDA graphs, was measured under
0.19.0 and 0.24.0 on two hosts that differ by 2.4 in bandwidth (7.7 and 18.5 GB/s), as PCIe
topologies do. Which of them another host resembles cannot be known; the geometric mean is taken,
which is wrong by the same factor (1.5) at either. From 8 MB, where vLLM leaves all-reduces to NCCL,
it is NCCL 2.29.2's time, which is less.
"""

from __future__ import annotations

import numpy as np

from twinserve.profiles.operators.interpolation import Curve
from twinserve.profiles.specs import ModelSpec

CUSTOM_LIMIT_BYTES = 8 * 2**20  # max_size of vLLM's custom all-reduce
MICRO = 1e-6

BYTES = np.array([2.0**k for k in range(12, 28)])  # 4 KiB to 128 MiB
# the last size of vLLM's own, then NCCL
ALLREDUCE_BYTES = np.sort([*BYTES, CUSTOM_LIMIT_BYTES - 1.0])
_V019 = (19.1, 20.5, 20.6, 22.3, 27.5, 39.3, 55.5, 91.5, 157.5, 295.9, 567.2, 1117.6)
_V024 = (4.5, 5.1, 5.4, 6.2, 8.2, 11.1, 17.6, 30.1, 55.7, 106.0, 244.5, 474.9)
_NCCL = (473.5, 930.6, 1839.9, 3620.3, 7106.1)
PCIE_PAIR_ALLREDUCE_S = MICRO * np.array([*np.sqrt(np.multiply(_V019, _V024)), *_NCCL])
_GATHER = (
    6.2,
    6.2,
    6.3,
    8.3,
    10.3,
    14.6,
    24.0,
    31.2,
    47.2,
    80.2,
    145.5,
    277.1,
    539.9,
    1066.6,
    2112.6,
    4188.5,
)
_SCATTER = (
    6.2,
    6.2,
    7.3,
    7.9,
    8.4,
    13.6,
    22.2,
    31.2,
    48.6,
    84.0,
    153.6,
    293.6,
    574.3,
    1131.6,
    2205.6,
    4207.8,
)
PCIE_PAIR_GATHER_S = MICRO * np.array(_GATHER)
PCIE_PAIR_SCATTER_S = MICRO * np.array(_SCATTER)


def tensor_parallel_pair(llm: ModelSpec):
    """(seconds of all all-reduces by tokens, seconds to gather logits by rows) of two ranks over
    PCIe.

    One all-reduce after the embedding and two a layer. Past the largest message time goes on as
    between the last two.
    """
    allreduce = Curve(ALLREDUCE_BYTES, PCIE_PAIR_ALLREDUCE_S)

    def comm(tokens: np.ndarray) -> np.ndarray:
        size = tokens * llm.hidden * llm.dtype_bytes
        return (2 * llm.layers + 1) * allreduce.of(size)

    def gather(rows: np.ndarray) -> np.ndarray:
        return np.interp(rows * llm.vocab * llm.dtype_bytes, BYTES, PCIE_PAIR_GATHER_S)

    return comm, gather


def expert_parallel_pair(llm: ModelSpec):
    """Seconds of all layers' gathers and scatters by the tokens of one of two expert-parallel
    ranks, which both bring as many: hidden states and router logits are gathered, expert outputs
    reduced and scattered."""

    def comm(tokens: np.ndarray) -> np.ndarray:
        hidden, logits = (
            2 * tokens * width * llm.dtype_bytes for width in (llm.hidden, llm.experts)
        )
        layer = np.interp(hidden, BYTES, PCIE_PAIR_GATHER_S) + np.interp(
            hidden, BYTES, PCIE_PAIR_SCATTER_S
        )
        return llm.layers * (layer + np.interp(logits, BYTES, PCIE_PAIR_GATHER_S))

    return comm
