"""Which moves of KV plans asked for, by kind, and which of them a vLLM engine has no mechanism for.

requests  all KV of a request leaves the device, or comes back: the engine's KV connector copies it
          (docs/live_memory.md)
layers    single layers of a request, which stays or goes on running
parts     some tokens of a request: slots, blocks copied ahead of time

The last two are made on simulated hardware, and by an engine with a physical layout: `layers` of
the layer-wise ledger (docs/live_memory.md), `parts` of the bidirectional one (docs/live_memory.md).
Elsewhere the ledger accounts for them, and the engine's memory stays as it is.
"""

from collections.abc import Collection, Mapping

from twinserve.policies.plan import DEVICE, HOST, KvMove, Place
from twinserve.policies.requests import State

REQUESTS, LAYERS, PARTS = "requests", "layers", "parts"
LAYERS_STAY_TOGETHER = (
    "vLLM keeps all layers of a block together, under one block table; replay --physical takes "
    "them apart"
)
MISSING = {
    LAYERS: LAYERS_STAY_TOGETHER,
    PARTS: "vLLM's KV connector copies whole requests, when they leave and return",
}

_SWAPPED = int(State.SWAPPED)
Counts = dict[str, dict[str, int]]  # kind -> moves, to_host_bytes, to_device_bytes
_BYTES = {HOST: "to_host_bytes", DEVICE: "to_device_bytes"}


def kind_of(move: KvMove, state: int, swapped_in: Collection[int], layered: bool) -> str:
    """state: of the move's request, after the plan; swapped_in: rows whose KV all comes back with
    it; layered: the ledger moves layers, all of a request's at times."""
    whole = move.row in swapped_in if move.target == DEVICE else state == _SWAPPED
    return REQUESTS if whole else LAYERS if layered else PARTS


def count(counts: Counts, kind: str, target: Place, size: float) -> None:
    """Add a move of `size` bytes to `target`."""
    found = counts.setdefault(kind, {"moves": 0, "to_host_bytes": 0, "to_device_bytes": 0})
    found["moves"] += 1
    found[_BYTES[target]] += int(size)


def not_made(counts: Mapping, physical: bool) -> Counts:
    """Return the moves that a live engine did not make. physical: it has the ledger's layout."""
    return {} if physical else {kind: counts[kind] for kind in (LAYERS, PARTS) if kind in counts}


def not_made_lines(found: Counts) -> list[tuple[str, str]]:
    """Return a name and a sentence for each kind, to be read."""
    return [
        (
            f"not made: moves of {kind}",
            f"{c['moves']:,}, {c['to_host_bytes'] / 1e6:,.1f} MB to the host and "
            f"{c['to_device_bytes'] / 1e6:,.1f} MB back, "
            f"accounted only: {MISSING[kind]}",
        )
        for kind, c in found.items()
    ]
