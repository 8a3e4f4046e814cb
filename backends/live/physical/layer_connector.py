"""The connector of an engine whose layers lie apart. vLLM 0.32 keeps all layers in one allocation.
Here every layer uses the whole of it as a pool of pages, and reads the pages that a table names.
Before a layer's attention, KV on the host is brought to staging pages; computed KV goes back to the
host afterwards. vLLM calls `wait_for_layer_load` and `save_kv_layer` at these points.

On a GPU copies run in streams of their own, ordered by events (transfer/copy.py); that is not
tested on a GPU yet. Imports vLLM: name it by path.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from twinserve.backends.live.transfer.connector import LedgerConnector
from twinserve.backends.live.transfer.copy import SlotCopier
from twinserve.backends.live.transfer.host import Orders


@dataclass
class LayerOrders(KVConnectorMetadata):
    """Scheduler to workers.

    stages   copies before the forward pass, in order
    streams  layer -> what comes before its attention (`back`), what leaves after it (`out`)
    names, pages  blocks whose pages have changed: int64[n], int32[layers, n]
    """

    stages: list[Orders] = field(default_factory=list)
    streams: dict[int, Orders] = field(default_factory=dict)
    names: np.ndarray | None = None
    pages: np.ndarray | None = None


class LayerConnector(LedgerConnector):
    """Scheduler's side: the scheduler fills in the orders (physical/layer_scheduler.py)."""

    settings: ClassVar[set[str]] = LedgerConnector.settings | {
        "layers",
        "device_blocks",
        "named_blocks",
    }

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._layers, self._named = extra["layers"], extra["named_blocks"]
        self._index: dict[str, int] = {}  # layer's name -> its number
        self._pages: torch.Tensor  # int32[layers, names]

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a captured layer would not be waited for

    # -- vLLM, scheduler's side --------------------------------------------------------------------
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return LayerOrders()

    # -- vLLM, worker's side -----------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        names = sorted(kv_caches, key=extract_layer_index)
        if len(names) != self._layers:
            raise ValueError(
                f"the ledger moves {self._layers} layers, and the model has KV in {len(names)}"
            )
        self._index = {name: number for number, name in enumerate(names)}
        pool = pool_of([kv_caches[name] for name in names])
        bound = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, names)
        for name, layer in bound.items():
            if layer.kv_cache.shape != kv_caches[name].shape:
                raise ValueError(
                    "vLLM splits blocks for its attention kernel: choose a block size that the "
                    "kernel takes whole"
                )
            layer.bind_kv_cache(pool)
        table = self._table({names[0]: pool}, len(pool))
        self._copier = SlotCopier(table, self._host_tokens * self._layers, self._staging_bytes)
        # a step runs in inference mode; what it made could not be changed outside
        with torch.inference_mode(False):
            self._pages = torch.zeros(
                (self._layers, 1 + self._named), dtype=torch.int32, device=pool.device
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        orders = kv_connector_metadata
        if not isinstance(orders, LayerOrders):
            return
        for stage in orders.stages:
            self._copier.carry_out(stage)
        if orders.names is not None:
            names = torch.from_numpy(orders.names).to(self._pages.device)
            self._pages[:, names] = torch.from_numpy(orders.pages).to(self._pages.device)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Every layer gets block table and slots of its own."""
        shared = forward_context.attn_metadata
        if shared is None:
            return  # no forward pass
        if not isinstance(shared, dict):
            raise ValueError("a step is split into micro-batches: layers that move have none")
        tables: dict[int, torch.Tensor] = {}  # of metadata -> pages, int32[layers, rows, width]
        for name, number in self._index.items():
            step = shared[name]
            if not hasattr(step, "block_table"):
                raise ValueError(
                    f"the attention backend works on no block table but {type(step).__name__}: "
                    "layers that move need one that does (CPU_ATTN, FLASH_ATTN, TRITON_ATTN)"
                )
            if id(step) not in tables:
                tables[id(step)] = self._pages[:, step.block_table.long()]
            mine = copy.copy(step)
            mine.block_table = tables[id(step)][number]
            slots = forward_context.slot_mapping.get(name, step.slot_mapping)
            mine.slot_mapping = self._slots(number, slots)
            shared[name], forward_context.slot_mapping[name] = mine, mine.slot_mapping

    def _slots(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Slots by the names of blocks as slots of this layer's pages; less than 0: none."""
        size = self._block_tokens
        pages = self._pages[layer][slots.clamp(min=0) // size]
        return torch.where(slots < 0, slots, pages.to(slots.dtype) * size + slots % size)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._stream(layer_name, "back")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._stream(layer_name, "out")

    def _stream(self, layer_name: str, way: str) -> None:
        orders = self._get_connector_metadata()
        streams = orders.streams if isinstance(orders, LayerOrders) else {}
        asked = streams.get(self._index[layer_name])
        if asked is not None:
            self._copier.carry_out(Orders(asked.number, **{way: getattr(asked, way)}))


def pool_of(caches: list[torch.Tensor]) -> torch.Tensor:
    """The allocation that `caches`, a tensor a layer, [blocks, ...] each, are parts of: [layers *
    blocks, ...], a page each.

    Raises ValueError if they do not fill one allocation page by page, as before vLLM 0.32.
    """
    first, storage = caches[0], caches[0].untyped_storage()
    word = first.element_size()
    page_bytes = first[0].numel() * word
    starts = [c.data_ptr() + np.arange(len(c)) * c.stride(0) * word for c in caches]
    found = np.sort(np.concatenate(starts)) - storage.data_ptr()
    pages = len(found)
    dense = storage.nbytes() == pages * page_bytes
    if not dense or not np.array_equal(found, np.arange(pages) * page_bytes):
        raise ValueError(
            "this vLLM keeps KV layer by layer: layers that move need one allocation of whole "
            "pages, as vLLM 0.32 makes it"
        )
    strides = (first[0].numel(), *first.stride()[1:])
    return first.as_strided((pages, *first.shape[1:]), strides, 0)
