"""What one worker's prefix cache holds, as its KV events tell it.

vLLM names a block by a hash that only it can make, and sends the tokens and the hash of the block
before it. So each hash is known by the chain that leads to it: its block gets the name that the
same tokens have in a prompt. vLLM tells of every block, copies too; a router is told of a text
when its first block comes, and when its last one is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinserve.backends.live.route.kv_wire import BlockRemoved, BlockStored
from twinserve.backends.live.route.names import Numbers, bytes_of, first_key, next_key, salt_of

Hash = bytes | int
_OF_ENGINES = (None, "GPU")  # media from which a prefix needs no load


class KvBlocks:
    """numbers       shared by all workers and prompts
    block_tokens  tokens in a block, as prompts are cut
    tell          called with what can be found from now on (True), or no more (False): int64[n]
    adapters      names of LoRA adapters that were seen, shared by all workers
    most          blocks that the worker has room for

    unnamed  blocks whose names are not known: what came before them was missed, or they are cut
             otherwise than prompts
    """

    def __init__(
        self,
        numbers: Numbers,
        block_tokens: int,
        tell: Callable[[bool, np.ndarray], None],
        adapters: set[str],
        most: int,
    ) -> None:
        self._numbers, self._block_tokens, self._tell = numbers, block_tokens, tell
        self._adapters, self._most = adapters, most
        self._held: dict[Hash, tuple[bytes, int]] = {}  # key of its text, blocks that have it
        self._blocks = 0  # of these, copies too
        self.unnamed = 0

    def __len__(self) -> int:
        """Contents that the worker has."""
        return len(self._held)

    @property
    def too_many(self) -> bool:
        """More than there can be: the worker told of some again, or does not tell what goes."""
        return self._blocks > self._most

    def stored(self, event: BlockStored) -> None:
        if not _counts(event):
            return
        hashes, size = event.block_hashes, event.block_size
        if size != self._block_tokens or len(event.token_ids) != size * len(hashes):
            self.unnamed += len(hashes)
            return
        before = self._before(event)
        if before is None:
            self.unnamed += len(hashes)
            return
        whole, width = bytes_of(event.token_ids), size * 8
        new = []
        for i, name in enumerate(hashes):
            before = next_key(before, whole[i * width : (i + 1) * width], _more(event, i))
            key, blocks = self._held.get(name, (before, 0))
            if not blocks:
                new.append(self._numbers.hold(key))
            self._held[name] = key, blocks + 1
            self._blocks += 1
        self._say(True, new)

    def removed(self, event: BlockRemoved) -> None:
        """Of blocks that it knows."""
        if not _counts(event):
            return
        gone = []
        for name in event.block_hashes:
            key, blocks = self._held.get(name, (b"", 0))
            self._blocks -= min(blocks, 1)
            if blocks > 1:
                self._held[name] = key, blocks - 1
            elif blocks:
                del self._held[name]
                gone.append(self._numbers.release(key))
        self._say(False, gone)

    def clear(self) -> None:
        """It has nothing, or what it has is unknown."""
        gone = [self._numbers.release(key) for key, _ in self._held.values()]
        self._held.clear()
        self._blocks = 0
        self._say(False, gone)

    def _before(self, event: BlockStored) -> bytes | None:
        """The key that the first of its blocks follows; None: it is not known."""
        parent = event.parent_block_hash
        if parent is None:
            adapter = event.lora_name or ""
            if adapter:
                self._adapters.add(adapter)
            return first_key(self._block_tokens, adapter=adapter)
        known = self._held.get(parent)
        return None if known is None else known[0]

    def _say(self, stored: bool, contents: list[int]) -> None:
        if contents:
            self._tell(stored, np.array(contents, np.int64))


def _counts(event: BlockStored | BlockRemoved) -> bool:
    """Of several groups of layers the first stands for all."""
    return (
        event.medium in _OF_ENGINES
        and event.group_idx in (None, 0)
        and event.locality in (None, "LOCAL")
    )


def _more(event: BlockStored, index: int) -> bytes:
    """Salts and pictures; an adapter is in the first key."""
    found = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
    parts = [one for one in found or () if one != event.lora_name]
    return salt_of(parts) if parts else b""
