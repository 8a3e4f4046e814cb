"""The connector of an engine whose KV lies as the bidirectional ledger says. To TwinserveConnector
it adds relocations within the device, host copies that are kept when they come back, and the counts
of blocks that are left early; all of it travels with the step that needs it. Imports vLLM: name it
by path."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from twinserve.backends.live.attention import cells
from twinserve.backends.live.physical.host import DeviceStage, SlotHost
from twinserve.backends.live.physical.layout import SlotStage
from twinserve.backends.live.transfer.connector import LedgerConnector
from twinserve.backends.live.transfer.copy import SlotCopier
from twinserve.backends.live.transfer.host import Orders
from twinserve.backends.live.transfer.layout import expand


@dataclass
class LayoutOrders(KVConnectorMetadata):
    """Scheduler to workers. entries, counts: blocks whose number of tokens has changed
    (backends/live/attention/cells.py)."""

    stages: list[DeviceStage] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class PhysicalConnector(LedgerConnector):
    """Scheduler's side: `carry` the stages of a step, in order, and `tell` the counts."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.host = SlotHost(self._host_tokens, self._block_tokens)
            self._told = LayoutOrders()

    # -- for our scheduler -------------------------------------------------------------------------
    def carry(self, stage: SlotStage) -> None:
        self.host.carry(stage)

    def tell(self, entries: np.ndarray, counts: np.ndarray) -> None:
        """Blocks hold so many tokens from this step on."""
        self._told.entries += entries.tolist()
        self._told.counts += counts.tolist()

    # -- vLLM, scheduler's side --------------------------------------------------------------------
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._told = self._told, LayoutOrders()
        orders.stages = self.host.take_stages()
        return orders

    # -- vLLM, worker's side -----------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        # an engine before this one may have left its own
        self._counts().tensor.fill_(self._block_tokens)

    def _counts(self) -> cells.CellCounts:
        return cells.of_device(
            self._kv_cache_config.num_blocks, self._block_tokens, self._copier.table.device
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(kv_connector_metadata, LayoutOrders):
            return
        for stage in kv_connector_metadata.stages:
            orders = stage.orders
            self._copier.carry_out(Orders(orders.number, out=orders.out))
            for sources, targets in stage.relocations:
                _copy_slots(self._copier, expand(sources), expand(targets))
            self._copier.carry_out(Orders(orders.number, back=orders.back))
        if kv_connector_metadata.entries:
            self._counts().set(kv_connector_metadata.entries, kv_connector_metadata.counts)


def _copy_slots(copier: SlotCopier, sources: np.ndarray, targets: np.ndarray) -> None:
    """Within the device, in the model's lane; the two may overlap."""
    table = copier.table
    read, write = (torch.from_numpy(slots).to(table.device) for slots in (sources, targets))

    def copy() -> None:
        between = torch.empty((len(sources), table.width), dtype=table.word, device=table.device)
        table.gather(read, between)
        table.scatter(write, between)

    copier.compute.run(copy)
