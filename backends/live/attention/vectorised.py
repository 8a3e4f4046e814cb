"""The same attention with whole-tensor PyTorch operations, for the CPU engine."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from twinserve.backends.live.attention.slots import slot_mapping, tokens_of_batch


@dataclass(frozen=True)
class Span:
    """A sequence with several new tokens: their place in the batch, its slots, what each sees."""

    begin: int
    end: int
    slots: torch.Tensor  # int64[length], in order of its text
    seen: torch.Tensor  # bool[end - begin, length]


@dataclass(frozen=True)
class Plan:
    """What all layers of one step share.

    new_slots     int64[t]: of the new tokens
    decode_tokens int64[d]: tokens that are their sequence's only new one
    decode_slots  int64[d, longest]: their sequence's slots, padded with its own first slot
    decode_seen   bool[d, longest]: which of these count
    spans         the other sequences
    """

    new_slots: torch.Tensor
    decode_tokens: torch.Tensor
    decode_slots: torch.Tensor
    decode_seen: torch.Tensor
    spans: tuple[Span, ...]


def plan(table, seq_lens, query_start, block_tokens: int, first=None) -> Plan:
    """Of NumPy arrays; shapes as in `reference.paged_attention`."""
    lengths = np.asarray(seq_lens, np.int64)
    new = np.diff(query_start)
    rows, positions = tokens_of_batch(query_start, lengths)
    new_slots = slot_mapping(table, rows, positions, block_tokens, first)

    decodes = np.flatnonzero(new == 1)
    longest = int(lengths[decodes].max(initial=0))
    places = np.broadcast_to(np.arange(longest), (len(decodes), longest))
    seen = places < lengths[decodes, None]
    of_row = np.broadcast_to(decodes[:, None], places.shape).ravel()
    slots = slot_mapping(table, of_row, np.where(seen, places, 0).ravel(), block_tokens, first)

    spans = []
    for i in np.flatnonzero(new > 1):
        length, count = int(lengths[i]), int(new[i])
        text = np.arange(length)
        spans.append(
            Span(
                int(query_start[i]),
                int(query_start[i + 1]),
                torch.from_numpy(
                    slot_mapping(table, np.full(length, i), text, block_tokens, first)
                ),
                torch.from_numpy(text <= np.arange(length - count, length)[:, None]),
            )
        )
    return Plan(
        torch.from_numpy(new_slots),
        torch.from_numpy(np.asarray(query_start, np.int64)[decodes]),
        torch.from_numpy(slots.reshape(places.shape)),
        torch.from_numpy(seen),
        tuple(spans),
    )


def attend(out, query, keys, values, step: Plan, scale: float) -> None:
    """Write new tokens' attention into `out` [t, heads, head_size]; they are stored already."""
    block_tokens = keys.shape[1]

    def read(cache, slots):
        # [..., kv_heads, length, head]
        return cache[slots // block_tokens, slots % block_tokens].transpose(-3, -2)

    if len(step.decode_tokens):
        slots, seen = step.decode_slots, step.decode_seen[:, None, None]
        answers = scaled_dot_product_attention(
            query[step.decode_tokens][:, :, None],
            read(keys, slots),
            read(values, slots),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        out[step.decode_tokens] = answers[:, :, 0]
    for span in step.spans:
        answers = scaled_dot_product_attention(
            query[span.begin : span.end].transpose(0, 1)[None],
            read(keys, span.slots)[None],
            read(values, span.slots)[None],
            attn_mask=span.seen,
            scale=scale,
            enable_gqa=True,
        )
        out[span.begin : span.end] = answers[0].transpose(0, 1)
