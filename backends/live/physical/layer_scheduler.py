"""A steered scheduler for an engine whose layers lie apart. vLLM's block numbers are names; a table
has the page of each layer of a named block.

vLLM's own manager gives out as many names as the ledger can have blocks, on the device and on the
host together. Imports vLLM: load it by name.
"""

from dataclasses import replace

import numpy as np

from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.engine.scheduler import SteeredScheduler
from twinserve.backends.live.physical.layers import NULL_PAGES
from twinserve.backends.live.physical.scheduler import on_paper
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.kv.free import FreeStack

CONNECTOR = {
    "kv_connector": "LayerConnector",
    "kv_connector_module_path": "twinserve.backends.live.physical.layer_connector",
    "kv_role": "kv_producer",
}


class LayerScheduler(SteeredScheduler):
    """Plans with a layout are carried out on it. Steps without one (to warm up, or of requests that
    have the engine to themselves) get whole blocks, all layers on the device; the two kinds must
    not be mixed while a request holds memory.

    A request whose KV is on the host stays what it is for vLLM, computed and merely not scheduled.
    """

    def __init__(self, vllm_config, kv_cache_config, *args, **kwargs) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        names = 1 + extra["named_blocks"]
        super().__init__(vllm_config, replace(kv_cache_config, num_blocks=names), *args, **kwargs)
        if getattr(self, "use_v2_model_runner", False):
            raise LiveEngineError(
                "layers that move need vLLM's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self._layers, self._blocks = extra["layers"], extra["device_blocks"]
        # what the worker's table says: pages of each name, by layer
        self._told = np.zeros((self._layers, names), np.int32)
        self._whole: dict[str, np.ndarray] = {}  # of requests without a layout: their blocks
        self._spare = FreeStack(self._blocks)

    @property
    def device_blocks(self) -> int:
        return self._blocks

    def schedule(self, *args, **kwargs):
        planned = self.planned or PlannedStep()
        layout = planned.layout
        if layout is not None:
            self.planned = on_paper(planned, self.requests)
        output = super().schedule(*args, **kwargs)
        self._give_up(output.finished_req_ids)
        orders = output.kv_connector_metadata
        if layout is not None:
            orders.stages, orders.streams = list(layout.stages), layout.streams
            self.last.free_blocks = layout.free_blocks
        names, pages = [], []
        for request_id in output.num_scheduled_tokens:
            (blocks,) = self.kv_cache_manager.get_block_ids(request_id)
            known = layout.tables if layout is not None else self._whole_blocks(request_id, blocks)
            self._tell(request_id, np.array(blocks), known[request_id], names, pages)
        if names:
            orders.names, orders.pages = np.concatenate(names), np.concatenate(pages, 1)
        output.has_sync_kv_loads = True  # start_load_kv comes before the forward pass
        return output

    def _tell(self, request_id: str, blocks, table, names: list, pages: list) -> None:
        if len(blocks) > table.shape[1]:
            raise LiveEngineError(
                f"{request_id} needs {len(blocks)} blocks, and the ledger has {table.shape[1]} "
                "for it"
            )
        table = table[:, : len(blocks)]
        new = (self._told[:, blocks] != table).any(0)
        if new.any():
            names.append(blocks[new])
            pages.append(table[:, new])
            self._told[:, blocks[new]] = table[:, new]

    def _whole_blocks(self, request_id: str, blocks: list[int]) -> dict[str, np.ndarray]:
        mine = self._whole.get(request_id, np.empty(0, np.int64))
        lacking = len(blocks) - len(mine)
        if lacking > self._spare.free:
            raise LiveEngineError(
                f"{request_id} needs {lacking} more blocks of the device, and {self._spare.free} "
                "are free"
            )
        mine = self._whole[request_id] = np.concatenate([mine, self._spare.take(lacking)])
        layers = np.arange(self._layers)[:, None]
        return {request_id: (NULL_PAGES + mine * self._layers + layers).astype(np.int32)}

    def _give_up(self, finished) -> None:
        for request_id in finished:
            blocks = self._whole.pop(request_id, None)
            if blocks is not None:
                self._spare.put(blocks)
