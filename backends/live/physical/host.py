"""The scheduler's side of moving single slots. It keeps host copies by request and token position,
also after they are copied back, and makes a step's copies into orders for the workers. Needs
neither vLLM nor torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from twinserve.backends.live.physical.layout import SlotStage
from twinserve.backends.live.transfer.host import HostKv, Orders, Run, extend


@dataclass
class DeviceStage:
    """What every worker does for one plan: all of `orders.out`, the relocations one after another,
    all of `orders.back`.

    relocations  (slots read, slots written), runs
    """

    orders: Orders
    relocations: list[tuple[list[Run], list[Run]]] = field(default_factory=list)


class SlotHost(HostKv):
    """The tokens with a copy on the host. Room is exact: a dropped copy is free at once, since a
    plan never drops a copy that it reads. Workers read and write in order.

    KV does not change once it is written, so a copy stays valid when it is brought back, and the
    ledger counts on that.
    """

    def __init__(self, host_tokens: int, block_tokens: int) -> None:
        super().__init__(host_tokens, block_tokens)
        self._slots: dict[str, dict[int, tuple[int, int]]] = {}  # request -> token -> (row, order)
        self._stages: list[DeviceStage] = []

    def carry(self, stage: SlotStage) -> None:
        """Add the copies of `stage` to this step. Raises HostFull if they do not fit, KeyError for
        a copy that should return and is missing."""
        for request_id, tokens in stage.forgotten:
            self.forget(request_id, tokens.tolist())
        for request_id, tokens, slots in stage.out:
            self._copy_out(request_id, tokens.tolist(), slots)
        for request_id, tokens, slots in stage.back:
            held = self._slots[request_id]
            copies = [held[token] for token in tokens.tolist()]
            self._orders.back.add(
                _runs(slots), ((row, 1) for row, _ in copies), max(order for _, order in copies)
            )
        orders, self._orders = self._orders, Orders()
        if orders.out.rows or orders.back.rows:
            orders.number = self._number
            self._number += 1
        relocations = [(_runs(sources), _runs(targets)) for sources, targets in stage.relocations]
        if orders.number or relocations:
            self._stages.append(DeviceStage(orders, relocations))

    def _copy_out(self, request_id: str, tokens: list[int], slots: np.ndarray) -> None:
        self.forget(request_id, tokens)  # a copy given up and made again within one plan
        rows = self.host_rows.take(len(tokens))
        self._orders.out.add(_runs(slots), rows)
        places = (row for first, count in rows for row in range(first, first + count))
        held = self._slots.setdefault(request_id, {})
        held.update((token, (row, self._number)) for token, row in zip(tokens, places, strict=True))

    def forget(self, request_id: str, tokens: Iterable[int]) -> None:
        """Give up the copies of these tokens, if there are any."""
        held = self._slots.get(request_id, {})
        self.host_rows.give((held.pop(token)[0], 1) for token in tokens if token in held)
        if not held:
            self._slots.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        self.forget(request_id, list(self._slots.get(request_id, {})))

    def drop_all(self) -> None:
        for request_id in [*self._slots]:
            self.drop(request_id)

    def _held_rows(self) -> Iterator[Run]:
        return ((row, 1) for held in self._slots.values() for row, _ in held.values())

    def tokens_of(self, request_id: str) -> list[int]:
        """Positions of the tokens that have a copy, in order."""
        return sorted(self._slots.get(request_id, {}))

    def take_stages(self) -> list[DeviceStage]:
        """Return what this step does before its forward pass. The next step starts with nothing."""
        stages, self._stages = self._stages, []
        return stages


def _runs(slots: np.ndarray) -> list[Run]:
    runs: list[Run] = []
    for slot in slots.tolist():
        extend(runs, (slot, 1))
    return runs
