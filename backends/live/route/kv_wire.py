"""KV events as vLLM 0.32 publishes them (vllm/distributed/kv_events.py): messages of three frames,
a topic, a sequence number of eight bytes, and a batch of events in msgpack.

What a server may add later is passed over; a batch of another form is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
_FRAMES = 3


class BlockStored(msgspec.Struct, tag=True):
    """token_ids: of all the blocks, one after the other. parent_block_hash: None for the first
    blocks of a text. medium: where they lie; None: in the engine's own memory."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]  # as names are made of
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    """ts: when it was published, seconds of the server's own wall clock."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Message(NamedTuple):
    """payload  a batch, not decoded yet"""

    number: int
    payload: bytes


class UnreadableError(Exception):
    """What came is no message of vLLM 0.32. One line."""


_DECODER = msgspec.msgpack.Decoder(Batch)


def message_of(frames: list[bytes]) -> Message | None:
    """None: the end of a replay. Raises UnreadableError."""
    if len(frames) != _FRAMES or len(frames[1]) != len(END):
        raise UnreadableError("a message that is not of a topic, a number and a batch")
    if frames[1] == END:
        return None
    return Message(int.from_bytes(frames[1], "big"), frames[2])


def decode(payload: bytes) -> Batch:
    """Raises UnreadableError."""
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise UnreadableError(f"a batch that cannot be read: {' '.join(str(error).split())}") from (
            None
        )
