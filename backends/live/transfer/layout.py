"""The place of a token slot in an engine's KV tensors.

Attention backends shape a layer's cache differently:

    [blocks, 2, slots, heads, dim]       FlashAttention, Triton, FlashInfer (vLLM 0.25)
    [2, blocks, slots, heads, dim]       older ones
    [blocks, heads, slots, 2 * dim]      CPU backend (0.25); every backend's view in vLLM 0.32
    [blocks, slots, latent]              multi-head latent attention

and any of them may lie in memory in another order of axes. A kernel's block may be a fraction of
the scheduler's; then the tensor has so many times more blocks, numbered in order. What holds for
all: the two axes that number blocks and slots multiply to the pool's token slots. If two axes alone
do, those are they. If not (as many heads as slots, say), the backend is asked for the shape of a
cache with unmistakable sizes.

The CPU kernels interleave the tokens of a block in an order that depends on the processor, so that
no axis numbers slots, whatever the shape says (cpu.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PROBE = {"num_blocks": 8191, "block_size": 2048, "num_kv_heads": 3, "head_size": 128}


def slot_axes(
    shape: tuple[int, ...], blocks: int, block_tokens: int, backend: Any = None
) -> tuple[int, int]:
    """(axis that numbers blocks, axis that numbers slots in a block) of a cache tensor of `shape`.

    blocks, block_tokens  the pool, as the scheduler counts it
    backend               the layer's vLLM attention backend class, asked where sizes do not tell

    Raises ValueError when no axes fit, or several do and the backend does not tell.
    """
    fits = [
        (i, j)
        for i, j in itertools.combinations(range(len(shape)), 2)
        if shape[i] * shape[j] == blocks * block_tokens and block_tokens % shape[j] == 0
    ]
    if len(fits) == 1:
        return fits[0]
    if fits:
        told = _told(backend, len(shape))
        if told is None and len(shape) == 4:
            told = 0, 2  # backends without get_kv_cache_shape: [blocks, heads, slots, content]
        if told in fits:
            return told
    raise ValueError(
        f"a KV cache of shape {tuple(shape)} with {blocks} blocks of {block_tokens} slots: "
        + (f"the axes of blocks and slots may be any of {fits}" if fits else "no axes number them")
    )


def _told(backend: Any, ndim: int) -> tuple[int, int] | None:
    """Return the axes by the backend's own shape function; None if it has none that fits."""
    try:
        shape = tuple(backend.get_kv_cache_shape(**_PROBE))
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    if len(shape) != ndim or shape.count(8191) != 1 or shape.count(2048) != 1:
        return None
    return shape.index(8191), shape.index(2048)


class Strided:
    """A layer whose slots are places along one axis: any but a packed one. `words`: by word."""

    def __init__(self, tensor: torch.Tensor, block_axis: int, slot_axis: int) -> None:
        view = tensor.movedim((block_axis, slot_axis), (0, 1))
        dense = [axis for axis in range(2, view.dim()) if view.stride(axis) == 1]
        self.view = view.movedim(dense[-1], -1) if dense else view
        self.device = tensor.device

    def words(self, word: torch.dtype) -> Strided | None:
        """The same with its bytes read as `word`; None when shape or strides forbid it."""
        try:
            return Strided(self.view.view(word), 0, 1)
        except RuntimeError:
            return None

    @property
    def width(self) -> int:
        return math.prod(self.view.shape[2:])

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(self.view[self._place(slots)].reshape(into.shape))

    def scatter(self, slots: torch.Tensor, source: torch.Tensor) -> None:
        self.view[self._place(slots)] = source.reshape(len(slots), *self.view.shape[2:])

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernel blocks may be smaller, and differ between layers; a slot's number does not."""
        size = self.view.shape[1]
        return slots // size, slots % size


class Packed:
    """A layer whose kernel stores the tokens of a block interleaved: which elements make up a slot
    is a table.

    tensor    [blocks, heads, slots, content], the last two axes dense
    elements  int64[slots, content]: a slot's elements within the last two axes, in one order for
              all slots
    """

    def __init__(self, tensor: torch.Tensor, elements: torch.Tensor) -> None:
        self.tensor, self.elements, self.device = tensor, elements.to(tensor.device), tensor.device
        self._flat = tensor.flatten(2)

    def words(self, word: torch.dtype) -> Packed | None:
        if word.itemsize != self.tensor.element_size():
            return None
        return Packed(self.tensor.view(word), self.elements)

    @property
    def width(self) -> int:
        return self.tensor.shape[1] * self.tensor.shape[3]

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(self._flat[self._place(slots)].reshape(into.shape))

    def scatter(self, slots: torch.Tensor, source: torch.Tensor) -> None:
        blocks, heads, elements = self._place(slots)
        shape = len(slots), self.tensor.shape[1], self.tensor.shape[3]
        self._flat[blocks, heads, elements] = source.reshape(shape)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self.tensor.shape[2]
        heads = torch.arange(self.tensor.shape[1], device=self.device)
        return (slots // size)[:, None, None], heads[:, None], self.elements[slots % size][:, None]


class SlotTable:
    """The KV tensors of all layers as a table: a row a token slot, the same columns as a host row.

    layers  share memory with the caches
    """

    def __init__(self, layers: list[Strided | Packed]) -> None:
        if not layers:
            raise ValueError("the engine registered no KV cache")
        for word in _WORDS:
            read = [layer.words(word) for layer in layers]
            if all(layer is not None for layer in read):
                break
        else:
            raise ValueError("the layers' KV caches have no machine word in common")
        self.word, self.layers, self.device = word, read, layers[0].device
        ends = list(itertools.accumulate(layer.width for layer in read))
        self._columns = list(zip([0, *ends[:-1]], ends, strict=True))
        self.width = ends[-1]  # words a slot, all layers
        self.slot_bytes = self.width * word.itemsize

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the contents of `slots` (int64[n], on the device) to `into` (words[n, width])."""
        for layer, (low, high) in zip(self.layers, self._columns, strict=True):
            layer.gather(slots, into[:, low:high])

    def scatter(self, slots: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` (words[n, width]) to `slots` (int64[n], on the device)."""
        for layer, (low, high) in zip(self.layers, self._columns, strict=True):
            layer.scatter(slots, source[:, low:high])


def table_of(
    caches: dict[str, torch.Tensor],
    blocks: int,
    block_tokens: int,
    backends: dict[str, Any],
    packing: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: None,
) -> SlotTable:
    """`caches` as a table; layers that share one tensor count once.

    backends  attention backend class by layer
    packing   (layer, tensor) -> Packed's `elements` if that layer's kernel interleaves tokens,
              else None
    """
    layers, seen = [], set()
    for name, tensor in caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"layer {name} keeps no paged KV cache but {type(tensor).__name__}")
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key in seen:
            continue
        seen.add(key)
        elements = packing(name, tensor)
        if elements is not None:
            layers.append(Packed(tensor, elements))
        else:
            pair = slot_axes(tuple(tensor.shape), blocks, block_tokens, backends.get(name))
            layers.append(Strided(tensor, *pair))
    return SlotTable(layers)


def expand(runs: list[tuple[int, int]]) -> np.ndarray:
    """int64[n]: the indices that runs of (first, count) stand for."""
    if not runs:
        return np.zeros(0, np.int64)
    first, count = np.array(runs, np.int64).T
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(count.sum())
