"""A steered scheduler whose block tables are the bidirectional ledger's: KV follows the ledger slot
by slot.

vLLM's own manager hands out nothing for such a step. The message to the worker is rewritten after
vLLM has made it: each request's table is the one in the plan's layout. Imports vLLM: load it by
name.
"""

from dataclasses import replace

import numpy as np
from vllm.v1.request import RequestStatus

from twinserve.backends.live.attention.slots import cell_of, entries_of
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.engine.scheduler import SteeredScheduler
from twinserve.backends.live.physical.layout import Layout, Table
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.plan import Preemption

CONNECTOR = {
    "kv_connector": "PhysicalConnector",
    "kv_connector_module_path": "twinserve.backends.live.physical.connector",
    "kv_role": "kv_producer",
}


class PhysicalScheduler(SteeredScheduler):
    """Plans with a layout are carried out on it. Plans without one (to warm up, or for requests
    that have the engine to themselves) are laid out by vLLM as usual; the two kinds must not be
    mixed while a request holds memory.

    A request whose KV is swapped out stays what it is for vLLM, computed and merely not scheduled:
    its slots come back before it is scheduled again. One that is dropped is preempted, as ever.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "use_v2_model_runner", False):
            raise LiveEngineError(
                "a physical layout needs vLLM's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self._layout: Layout | None = None
        self._sent: dict[str, np.ndarray] = {}  # request -> the entries that the worker has of it
        self._blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        # tokens by cell, as the worker believes
        self._told = np.full(2 * self._blocks, self.block_size)
        self._width = -(-self.max_model_len // self.block_size)
        self._own_allocation()

    def _own_allocation(self) -> None:
        """With a layout, memory is neither asked for nor refused."""
        manager = self.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(*args, **kwargs):
            return (
                allocate(*args, **kwargs) if self._layout is None else manager.empty_kv_cache_blocks
            )

        manager.allocate_slots = allocate_slots

    # -- one step ----------------------------------------------------------------------------------
    def schedule(self, *args, **kwargs):
        planned = self.planned or PlannedStep()
        self._layout = layout = planned.layout
        if layout is None:
            self._tell(np.arange(2 * self._blocks), np.full(2 * self._blocks, self.block_size))
            return super().schedule(*args, **kwargs)
        self.planned = on_paper(planned, self.requests)
        for stage in layout.stages:
            self.connector.carry(stage)
        for table in layout.tables.values():
            counts = table.counts.copy()
            counts[-1] = self.block_size  # the last block is open
            self._tell(cell_of(table.entries, self._blocks), counts)
        output = super().schedule(*args, **kwargs)
        for request_id in output.finished_req_ids:
            self._sent.pop(request_id, None)
        self._send_tables(output, layout.tables)
        self.last.free_blocks = layout.free_blocks
        return output

    def _tell(self, cells: np.ndarray, counts: np.ndarray) -> None:
        new = self._told[cells] != counts
        if new.any():
            cells, counts = cells[new], counts[new]
            self._told[cells] = counts
            backward, blocks = divmod(cells, self._blocks)
            self.connector.tell(entries_of(blocks, backward > 0), counts)

    def _send_tables(self, output, tables: dict[str, Table]) -> None:
        """Give requests in SchedulerOutput `output` tables: whole if new or changed, else what is
        new."""
        for request in output.scheduled_new_reqs:
            request.block_ids = (self._whole(request.req_id, tables),)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            entries, sent = tables[request_id].entries, self._sent.get(request_id)
            if (
                request_id in cached.resumed_req_ids
                or sent is None
                or not np.array_equal(entries[: len(sent)], sent)
            ):
                # The worker takes a request that is told as resumed out of its batch and puts it
                # back, with this table.
                cached.resumed_req_ids.add(request_id)
                cached.all_token_ids.setdefault(
                    request_id, list(self.requests[request_id].all_token_ids)
                )
                cached.new_block_ids[index] = (self._whole(request_id, tables),)
            else:
                added = entries[len(sent) :].tolist()
                cached.new_block_ids[index] = (added,) if added else None
                self._sent[request_id] = entries

    def _whole(self, request_id: str, tables: dict[str, Table]) -> list[int]:
        entries = self._sent[request_id] = tables[request_id].entries
        if len(entries) > self._width:
            raise LiveEngineError(
                f"{request_id} lies in {len(entries)} blocks, and the engine was built for "
                f"{self._width} a request: "
                f"give it max_model_len={len(entries) * self.block_size} or more"
            )
        return entries.tolist()


def on_paper(planned: PlannedStep, requests: dict) -> PlannedStep:
    """What vLLM hears of a plan with a layout: swaps are the layout's business. A request that is
    admitted begins anew, also after its swapped KV was given up. requests: vLLM's, by id."""
    dropped = {i: kind for i, kind in planned.preempted if kind is Preemption.RECOMPUTE}
    for request_id in planned.hits:
        request = requests[request_id]
        if request.status == RequestStatus.RUNNING and request.num_computed_tokens:
            dropped[request_id] = Preemption.RECOMPUTE
    return replace(planned, preempted=tuple(dropped.items()), swapped_in=(), forgotten=())
