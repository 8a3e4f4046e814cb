"""An asynchronous KV connector between vLLM engines of one machine. One engine computes the prompt;
its KV is copied into the cache of another engine, which continues.

Both engines are started with

    KVTransferConfig(kv_connector="ApartConnector", kv_role="kv_producer" or "kv_consumer",
                     kv_connector_module_path="twinserve.backends.live.apart.connector",
                     kv_connector_extra_config={"folder": "/dev/shm/...", "name": "p0"})

    folder   the same for all engines that hand KV over to one another
    name     of this engine
    lease_s  how long unfetched KV is kept (30)

A request goes to the first engine with `kv_transfer_params` {"do_remote_decode": true} and one
token to emit. The answer's `kv_transfer_params` go to the second one with the request.

Scheduler's side and leases as in vLLM 0.32's `nixl/pull_scheduler.py`, `base_scheduler.py` and
`base_worker.py`; a load that finds nothing fails; vLLM would read other data. Imports vLLM: name it
by path.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.request import RequestStatus

from twinserve.backends.live.apart.shared import alive, attach, share
from twinserve.backends.live.apart.shelf import Shelf
from twinserve.backends.live.transfer.connector import Connector, slot_table
from twinserve.backends.live.transfer.layout import SlotTable

LEASE_S = 30.0  # vLLM's `kv_lease_duration`
_ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Fetch:
    """Blocks of the request on this engine, and the blocks that fill them, one for one."""

    request: str
    engine: str
    there: str  # the request's name in that engine
    blocks: list[int]
    sources: list[int]


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler to worker, with every step. keep: request -> when its lease runs out."""

    fetches: list[Fetch] = field(default_factory=list)
    keep: dict[str, float] = field(default_factory=dict)


class ApartConnector(Connector):
    """clock    seconds, the same for all engines
    handed_over  scheduler's side, for its caller: request -> what the other engine needs to
               know; None: no caller does, and none would empty it
    on_word    worker's side: a load has ended when `land` says so, not when it has been copied, and
               `ended` alone tells what has
    """

    settings: ClassVar[set[str]] = {"folder", "name", "lease_s"}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._settings
        if missing := sorted({"folder", "name"} - set(settings)):
            raise ValueError(f"ApartConnector needs {missing[0]} in kv_connector_extra_config")
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("KV is handed over between engines of one worker each")
        self._folder, self._name = Path(settings["folder"]), str(settings["name"])
        self._shelves: dict[str, Shelf] = {}
        self._shelf = self._shelf_of(self._name)
        self._lease_s = float(settings.get("lease_s", LEASE_S))
        self.clock: Callable[[], float] = time.monotonic  # of the machine, not of the process
        if role is KVConnectorRole.SCHEDULER:
            self.handed_over: dict[str, dict] | None = None
            self._orders = Orders()
            self._awaited: dict[str, tuple[str, str]] = {}  # request -> engine, its name there
            self._last_beat_s = float("-inf")
        else:
            self.on_word = False
            self._keeping: dict[str, float] = {}
            self._copies: dict[str, tuple[Fetch, Future]] = {}  # under way, or ended in silence
            self._landed: list[str] = []
            self._bad: set[int] = set()
            self._told_bad: set[int] = set()
            self._others: dict[str, tuple[dict, SlotTable]] = {}
            self._lane = ThreadPoolExecutor(1)

    def _shelf_of(self, engine: str) -> Shelf:
        if engine not in self._shelves:
            self._shelves[engine] = Shelf(self._folder, engine)
        return self._shelves[engine]

    def take_transfers(self) -> list:
        """Return no swaps between device and host, since there are none."""
        return []

    # -- scheduler's side ------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            place = params["remote_engine_id"], params["remote_request_id"]
            self._awaited[request.request_id] = place
            self._beat(first=len(self._awaited) == 1)

    def _beat(self, first: bool = True) -> None:
        """One for all that is waited for, a sixth of the lease after the last one."""
        now = self.clock()
        if first and self._awaited and now - self._last_beat_s >= self._lease_s / 6:
            self._last_beat_s = now
            for engine, request in self._awaited.values():
                self._shelf_of(engine).beat(request, now)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = len(request.prompt_token_ids or []) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # KV is fetched once
        engine, there = self._awaited[request.request_id]
        if not num_external_tokens:
            self._shelf_of(engine).done(there)
            return
        own, sources = blocks.get_unhashed_block_ids(), params["remote_block_ids"]
        first = len(blocks.get_block_ids()[0]) - len(own)
        wanted = sources[first : first + len(own)]
        self._orders.fetches.append(Fetch(request.request_id, engine, there, own, wanted))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._beat()
        orders, self._orders = self._orders, Orders()
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        for request in connector_output.finished_recving or ():
            self._awaited.pop(request, None)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        params, name = request.kv_transfer_params or {}, request.request_id
        if params.get("do_remote_prefill"):  # it left before it had blocks
            params["do_remote_prefill"] = False
            engine, there = self._awaited.pop(name)
            self._shelf_of(engine).done(there)
        if not params.get("do_remote_decode") or request.status not in _ENDED or not block_ids:
            return False, None
        self._orders.keep[name] = self.clock() + self._lease_s
        self._shelf.put(name)
        told = {
            "do_remote_prefill": True,
            "remote_engine_id": self._name,
            "remote_request_id": name,
            "remote_block_ids": list(block_ids),
        }
        if self.handed_over is not None:
            self.handed_over[name] = told
        return True, told

    # -- worker's side ---------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        blocks = self._kv_cache_config.num_blocks
        layers = {name: share(tensor) for name, tensor in kv_caches.items()}
        self._own = slot_table(self._vllm_config, self._kv_cache_config, kv_caches, blocks)
        self._shelf.tell({"blocks": blocks, "block_tokens": self._block_tokens, "layers": layers})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self._keeping |= orders.keep
        for fetch in orders.fetches:
            self._copies[fetch.request] = fetch, self._lane.submit(self._fetch, fetch)

    def _fetch(self, fetch: Fetch) -> bool:
        """In the connector's own thread. False: it is not there, or was given up meanwhile."""
        shelf = self._shelf_of(fetch.engine)
        if len(fetch.blocks) != len(fetch.sources) or not shelf.has(fetch.there):
            return False
        try:
            table = self._other(fetch.engine)
        except FileNotFoundError:
            return False
        slots = [self._slots(blocks) for blocks in (fetch.sources, fetch.blocks)]
        rows = torch.empty((len(slots[0]), table.width), dtype=table.word)
        table.gather(slots[0], rows)
        if not shelf.has(fetch.there):
            return False
        self._own.scatter(slots[1], rows)
        return True

    def _slots(self, blocks: list[int]) -> torch.Tensor:
        first = np.array(blocks, np.int64)[:, None] * self._block_tokens
        return torch.from_numpy((first + np.arange(self._block_tokens)).reshape(-1))

    def _other(self, engine: str) -> SlotTable:
        """The KV tensors of another engine. Raises FileNotFoundError if it has gone, and
        ValueError if its layers are others."""
        known = self._others.get(engine)
        if known is not None and all(alive(layer) for layer in known[0]["layers"].values()):
            return known[1]
        about = self._shelf_of(engine).about()
        caches = {name: attach(layer) for name, layer in about["layers"].items()}
        table = slot_table(self._vllm_config, self._kv_cache_config, caches, about["blocks"])
        same = (table.width, table.word, about["block_tokens"])
        if same != (self._own.width, self._own.word, self._block_tokens):
            raise ValueError(f"engine {engine} keeps KV in another layout; give both one model")
        self._others[engine] = about, table
        return table

    def land(self, request: str) -> bool:
        """Wait for the copy of a load, which then has ended. Returns whether all arrived."""
        fetch, copy = self._copies.pop(request)
        whole = copy.result()
        if not whole:
            self._bad.update(fetch.blocks)
        self._shelf_of(fetch.engine).done(fetch.there)
        self._landed.append(request)
        return whole

    def ended(self) -> tuple[list[str], list[str], set[int]]:
        """Return, since the last call: requests whose KV is no longer kept, loads that have ended,
        and blocks that these should have filled and did not. They are lists, because sets have no
        fixed order."""
        over = [name for name in self._keeping if self._is_over(name)]
        for name in over:
            del self._keeping[name]
            self._shelf.take_away(name)
        landed, self._landed = self._landed, []
        bad, self._bad = self._bad, set()
        return over, landed, bad

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        if self.on_word:  # the giver of the word asks `ended`
            return None, None
        for request in [name for name, (_, copy) in self._copies.items() if copy.done()]:
            self.land(request)
        over, landed, self._told_bad = self.ended()
        return over, landed

    def _is_over(self, request: str) -> bool:
        """Its KV is no longer wanted, or its lease has run out."""
        renewed_s = self._shelf.last_beat(request) + self._lease_s * 2 / 3
        expires_s = max(self._keeping[request], renewed_s)
        return self._shelf.is_done(request) or expires_s <= self.clock()

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._told_bad = self._told_bad, set()
        return bad

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._lane.shutdown()
