"""Moves as tests write them down."""

from twinserve.policies.plan import DEVICE, HOST, KvMove

OUT, IN = (DEVICE, HOST), (HOST, DEVICE)  # source and target
_WAYS = {OUT: "d2h", IN: "h2d"}


def way(move: KvMove) -> str:
    """ "d2h" or "h2d": from the device to the host, or back."""
    return _WAYS[move.source, move.target]
