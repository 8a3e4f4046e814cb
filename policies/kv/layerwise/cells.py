"""Cells: the unit of memory of the layer-wise ledger, the KV of one block of tokens in one layer.

Source: Xiong et al., "LayerKV", Sec. 4: one tensor for the whole KV memory instead of one a layer,
so that any block of it can hold any layer's part of a request.
"""

from collections.abc import Callable

import numpy as np

from twinserve.policies.kv.free import FreeStack


class CellPool:
    """`num_cells` cells of the device; any of them is as good as any other. `free`: how many no row
    has."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._free = FreeStack(num_cells)
        # how to take back what was done, newest last
        self.undo: list[Callable[[], object]] | None = None

    @property
    def free(self) -> int:
        return self._free.free

    def take(self, n: int) -> np.ndarray:
        """int64[n]: cells, of those that are free; the caller has asked whether there are so
        many."""
        cells = self._free.take(n)
        if self.undo is not None:
            self.undo.append(lambda: self._free.put(cells))
        return cells

    def give(self, cells: np.ndarray) -> None:
        self._free.put(cells)
        if self.undo is not None:
            self.undo.append(lambda: self._free.lift(len(cells)))

    def is_partition(self, taken: list[np.ndarray]) -> bool:
        """Whether the free cells and the `taken` ones are all cells there are, each once."""
        everything = np.sort(np.concatenate([self._free.units(), *taken]))
        return np.array_equal(everything, np.arange(self.num_cells))


def offload_order(layers: int, interleaved: bool = True) -> tuple[int, ...]:
    """Layer indices in the order in which a request's layers leave the device.

    interleaved  evenly spread at any number of layers, every other one first (Sec. 3.1.2): while a
                 layer on the host is fetched, the one before it, on the device, is computed. Sorted
                 by their bits read backwards, so that to offload more never means to bring one
                 back.
    """
    if not interleaved:
        return tuple(range(layers))
    bits = max(1, (layers - 1).bit_length())
    return tuple(sorted(range(layers), key=lambda layer: int(f"{layer:0{bits}b}"[::-1], 2)))
