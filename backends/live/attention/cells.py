"""The tokens in each cell, if a block was left before it was full: the worker's copy.

A sequence's last block is open: its count is the block's size, whatever the block holds. Set the
count when the sequence continues in another block. Then stale numbers after a row of the block
table, which a worker does not clear, mislead no reader.
"""

import numpy as np
import torch

from twinserve.backends.live.attention.slots import block_of, cell_of, first_positions


class CellCounts:
    """tensor: int32[2 * num_blocks] on the worker's device, by cell (`slots`); first all open."""

    def __init__(self, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        # a step runs in that mode; what it makes could not be changed outside
        with torch.inference_mode(False):
            self.tensor = torch.full(
                (2 * num_blocks,), block_tokens, dtype=torch.int32, device=device
            )

    def set(self, entries, counts) -> None:
        """The blocks of `entries` (as in the block table) hold `counts` tokens of their sequence, 1
        to block_tokens.

        Raises ValueError, with nothing changed, for any other count and for blocks that the cache
        does not have.
        """
        entries, counts = np.asarray(entries, np.int64), np.asarray(counts, np.int64)
        if counts.size and not 1 <= counts.min() <= counts.max() <= self.block_tokens:
            raise ValueError(
                f"counts {counts.tolist()} of tokens in a block: each must be 1 to "
                f"{self.block_tokens}"
            )
        blocks = block_of(entries)
        if (blocks >= self.num_blocks).any():
            raise ValueError(
                f"block {blocks.max()} is not in the cache, which has {self.num_blocks} blocks"
            )
        cells, device = torch.from_numpy(cell_of(entries, self.num_blocks)), self.tensor.device
        self.tensor[cells.to(device)] = torch.from_numpy(counts).to(device, torch.int32)

    def first_positions(self, table: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`slots.first_positions` of these counts."""
        return first_positions(table, self.tensor, out)


_BY_DEVICE: dict[torch.device, CellCounts] = {}


def of_device(num_blocks: int, block_tokens: int, device: torch.device) -> CellCounts:
    """Return the counts of the engine on `device`; new ones, all open, for another cache size."""
    known = _BY_DEVICE.get(device)
    if known is None or (known.num_blocks, known.block_tokens) != (num_blocks, block_tokens):
        known = _BY_DEVICE[device] = CellCounts(num_blocks, block_tokens, device)
    return known
