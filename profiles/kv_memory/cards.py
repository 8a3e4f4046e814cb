"""What depends on the card: its total memory as the driver reports it, and what lies outside of
torch's allocator."""

from dataclasses import dataclass

from twinserve.profiles.gpus import GPUS, MULTIPROCESSORS, REPORTED_GIB
from twinserve.profiles.kv_memory.releases import V1_ENGINE, Release
from twinserve.profiles.specs import GpuSpec, ModelSpec

GIB, MIB = 2**30, 2**20
HOPPER = ("hopper", "hopper-capped")
BLACKWELL = ("blackwell",)


@dataclass(frozen=True)
class Card:
    """A GPU as far as memory goes. symmetric: it has NVLink through a switch, so that vLLM has
    buffers of symmetric memory and FlashInfer's all-reduce (`symm_mem.py`)."""

    total_bytes: float
    multiprocessors: int
    symmetric: bool
    hopper: bool

    @property
    def cublas_bytes(self) -> float:
        """torch's workspace of cuBLAS: `getChosenWorkspaceSize` (`CUDABlas.cpp`)."""
        return 32 * MIB if self.symmetric else 8.125 * MIB


def card_of(gpu: GpuSpec) -> Card:
    """The card of a profile's GPU; one that is not known by name has 80 multiprocessors."""
    known = GPUS.get(gpu.name)
    total = gpu.memory_bytes
    if known is not None and known.memory_bytes == total:
        total = REPORTED_GIB.get(gpu.name, total / GIB) * GIB
    return Card(
        total,
        MULTIPROCESSORS.get(gpu.name, 80),
        gpu.family in (*HOPPER, *BLACKWELL, "gb200"),
        gpu.family in HOPPER,
    )


# First release -> {ranks: (GiB, what it may be off)}: `non-torch` of logs.
_Table = dict[Release, dict[int, tuple[float, float]]]
# From 0.18 on with the workspace of FlashInfer's all-reduce. From 0.11 on NCCL's buffers are
# allocated before the first snapshot, and so are outside (vllm-project/vllm#10511 prints 1.8 GiB
# for two ranks). From 0.27 on the fall of free memory counts, 0.15 GiB more (`mem_utils.py`).
_SYMMETRIC: _Table = {
    (0, 9, 2): {1: (0.07, 0.06), 2: (1.9, 0.6), 4: (1.9, 0.6), 8: (1.9, 0.8)},
    (0, 11, 0): {1: (0.13, 0.03), 2: (0.54, 0.1), 4: (0.6, 0.3), 8: (0.7, 0.5)},
    (0, 18, 0): {1: (0.25, 0.03), 2: (2.07, 0.1), 4: (2.16, 0.12), 8: (2.3, 0.4)},
    (0, 27, 0): {1: (0.40, 0.2), 2: (2.2, 0.3), 4: (2.3, 0.3), 8: (2.4, 0.5)},
}
_OTHER: _Table = {
    (0, 9, 2): {1: (0.03, 0.03), 2: (0.2, 0.12), 4: (0.2, 0.12), 8: (0.21, 0.12)},
    (0, 18, 0): {1: (0.07, 0.08), 2: (0.3, 0.2), 4: (0.3, 0.2), 8: (0.3, 0.2)},
    (0, 27, 0): {1: (0.22, 0.15), 2: (0.45, 0.3), 4: (0.45, 0.3), 8: (0.45, 0.3)},
}
# Engine V1 until 0.9.1: the snapshot was before CUDA's context. V0: after it.
_WITH_CONTEXT = {1: (0.55, 0.3), 2: (1.1, 0.8), 4: (1.2, 0.8), 8: (1.3, 0.8)}
_V0 = {1: (0.09, 0.08), 2: (0.25, 0.1), 4: (0.25, 0.1), 8: (0.25, 0.15)}


def non_torch(card: Card, release: Release, ranks: int) -> tuple[float, float]:
    """Bytes outside of torch's allocator (`MemoryProfilingResult.non_torch_increase`), and by how
    many they may be off. ranks: that talk to each other."""
    if release < V1_ENGINE:
        of_ranks = _V0
    elif release < (0, 9, 2):
        of_ranks = _WITH_CONTEXT
    else:
        table = _SYMMETRIC if card.symmetric else _OTHER
        of_ranks = table[max(first for first in table if first <= release)]
    size, spread = of_ranks[min((n for n in of_ranks if n >= ranks), default=8)]
    return size * GIB, spread * GIB


def graph_estimate(
    llm: ModelSpec, card: Card, release: Release, requests: int, tp: int, v2: bool
) -> float:
    """Bytes set aside for CUDA graphs: `GPUModelRunner.profile_cudagraph_memory`, subtracted from
    0.21 on, with Model Runner V2 from 0.28 on.

    The first graph of each kind is captured and measured: 100 MiB for a piecewise one; for a full
    one what FlashAttention 3 splits keys and values into (32 parts in fp32). Each further graph
    takes 0.2 MiB a layer, a full one 0.16. Rests on five logs.
    """
    if release < ((0, 28, 0) if v2 else (0, 21, 0)):
        return 0.0
    most = min(2 * requests, 512)
    full = min(requests, most)
    parts = 32 * full * llm.heads // tp * llm.head_dim * 4 if card.hopper else 20 * MIB
    further = (_sizes(most) - 1) * 0.2 + (_sizes(full) - 1) * 0.16
    return 100 * MIB + parts + further * llm.layers * MIB


def _sizes(most: int) -> int:
    """Batch sizes that are captured up to `most`: 1, 2, 4, then every 8th, from 256 on every
    16th (`VllmConfig._set_cudagraph_sizes`)."""
    return 3 + min(most, 256) // 8 + max(most - 256, 0) // 16
