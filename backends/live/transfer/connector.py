"""Swapping KV between device and host inside a vLLM engine: a KV connector, driven by the engine's
scheduler.

vLLM makes one connector for its scheduler and one in every worker. It carries the first one's
orders to the others with each step, and calls them before the forward pass. So engine core and
workers may be in this process or in others, and every copy is ordered with its step. Choose it with

    KVTransferConfig(kv_connector="TwinserveConnector", kv_role="kv_producer",
                     kv_connector_module_path="twinserve.backends.live.transfer.connector",
                     kv_connector_extra_config={"host_blocks": 4096})

    host_blocks or host_tokens  room on the host
    staging_bytes               device memory for copies under way, on a GPU (256 MiB)

Imports vLLM: name it by path.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from twinserve.backends.live.transfer.copy import STAGING_BYTES, SlotCopier, TransferReport
from twinserve.backends.live.transfer.host import HostKv, Orders
from twinserve.backends.live.transfer.layout import SlotTable, table_of
from twinserve.policies.plan import Place


@dataclass
class SwapOrders(KVConnectorMetadata):
    """Scheduler to workers, with every step."""

    orders: Orders


@dataclass
class SwapReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: transfers that ended since the last step, of all workers."""

    reports: list[TransferReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return SwapReports(self.reports + other.reports)


class Connector(KVConnectorBase_V1):
    """Checks its settings' names. The hooks of vLLM that few need do nothing: KV is there before
    the forward pass, and device blocks are free when they have been read."""

    settings: ClassVar[set[str]]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = self._kv_transfer_config.kv_connector_extra_config
        if unknown := sorted(set(self._settings) - self.settings):
            raise ValueError(
                f"{type(self).__name__} has no setting {unknown[0]}; it has {sorted(self.settings)}"
            )
        self._block_tokens = block_tokens_of(vllm_config, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class TwinserveConnector(Connector):
    """Scheduler's side (`scheduler.connector`): `swap_out`, `swap_in`, `forget`, `free_tokens`,
    `unfilled` (host.HostKv says what they do), `take_transfers`. Call them in `schedule()`, before
    vLLM's own; a victim's `swap_out` before `_preempt_request` frees its blocks.

    A request whose `swap_in` stands is resumed by vLLM's own admission: its tokens count as found
    outside. One that is resumed without (or is finished, aborted) loses its copy. Requests that
    never swap are treated as without connector.

    Raises ValueError at start where slots are not all there is to a request's KV: more than one KV
    cache group, other than full attention, context parallelism.
    """

    settings: ClassVar[set[str]] = {"host_blocks", "host_tokens", "staging_bytes"}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._host_tokens = _host_tokens(self._settings, self._block_tokens)
        self._staging_bytes = int(self._settings.get("staging_bytes", STAGING_BYTES))
        self._copier: SlotCopier | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.host = HostKv(self._host_tokens, self._block_tokens)
            self._workers = vllm_config.parallel_config.world_size
            self._reports: dict[tuple[int, Place], list[TransferReport]] = {}
            self._transfers: list[TransferReport] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a preempted request hands nothing over, its output in flight need not be dropped."""
        return False

    # -- for our scheduler -----------------------------------------------------------------------
    def swap_out(self, request_id: str, block_ids: list[int], tokens: int) -> None:
        self.host.swap_out(request_id, block_ids, tokens)

    def swap_in(self, request_id: str) -> int:
        return self.host.swap_in(request_id)

    def forget(self, request_id: str) -> None:
        self.host.drop(request_id)

    @property
    def free_tokens(self) -> int:
        return self.host.free_tokens

    @property
    def unfilled(self) -> tuple[str, ...]:
        """Requests whose swap_in the last step did not take up; their copies stay."""
        return self.host.unfilled

    def take_transfers(self) -> list[TransferReport]:
        """Transfers that have ended on all workers since the last call: bytes of all workers,
        seconds of the slowest. Those of the last step before an idle time are reported with the
        next step."""
        taken, self._transfers = self._transfers, []
        return taken

    # -- vLLM, scheduler's side ------------------------------------------------------------------
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        known = request.num_tokens
        return self.host.missing(request.request_id, num_computed_tokens, known), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # also after the host was passed over (a request that may not read caches): then it is
        # computed anew
        self.host.resumed(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return SwapOrders(self.host.take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        for report in meta.reports if isinstance(meta, SwapReports) else ():
            key = report.order, report.target
            of_all = self._reports.setdefault(key, [])
            of_all.append(report)
            if len(of_all) == self._workers:
                self._transfers.append(_slowest(self._reports.pop(key)))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.host.drop(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        self.host.drop_all()
        return True

    # -- vLLM, worker's side ---------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        table = self._table(kv_caches, self._kv_cache_config.num_blocks)
        self._copier = SlotCopier(table, self._host_tokens, self._staging_bytes)

    def _table(self, kv_caches: dict[str, Any], blocks: int) -> SlotTable:
        return slot_table(self._vllm_config, self._kv_cache_config, kv_caches, blocks)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # The one call that both model runners make before every forward pass and before they touch
        # freed blocks. (start_load_kv may come after the forward pass.)
        if isinstance(kv_connector_metadata, SwapOrders) and kv_connector_metadata.orders.number:
            if self._copier is None:
                raise RuntimeError(
                    "a KV swap was requested before the engine registered its KV cache"
                )
            self._copier.carry_out(kv_connector_metadata.orders)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = self._copier.reports() if self._copier is not None else []
        return SwapReports(reports) if reports else None

    def shutdown(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()


class LedgerConnector(TwinserveConnector):
    """For vLLM nothing is ever found on the host: the ledger knows the places. A request whose KV
    is on the host has merely not been scheduled for a while."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass


def slot_table(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], blocks: int
) -> SlotTable:
    """The KV tensors of a worker's layers, which have `blocks` blocks, as a table of slots."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(kv_caches))
    backends = {name: layer.get_attn_backend() for name, layer in layers.items()}
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec

    def packing(name: str, tensor: Any) -> Any:
        if name not in backends or backends[name].get_name() != "CPU_ATTN":
            return None
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        from twinserve.backends.live.transfer.cpu import slot_elements

        isa = getattr(layers[name], "isa", None)
        return slot_elements(
            tensor, isa or _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)
        )

    return table_of(kv_caches, blocks, spec.block_size, backends, packing)


def _slowest(reports: list[TransferReport]) -> TransferReport:
    first = reports[0]
    return TransferReport(
        first.order,
        first.target,
        first.tokens,
        sum(report.nbytes for report in reports),
        max(report.seconds for report in reports),
        max(report.held_s for report in reports),
    )


def block_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens a block. Raises ValueError for models and settings that cannot be swapped by slots."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        raise ValueError("KV cannot be swapped under context parallelism; set its sizes to 1")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ValueError(
            "KV is swapped for models with one group of full-attention layers; this one has "
            f"{len(groups)} ({kinds})"
        )
    return groups[0].kv_cache_spec.block_size


def _host_tokens(settings: dict[str, Any], block_tokens: int) -> int:
    if ("host_blocks" in settings) == ("host_tokens" in settings):
        raise ValueError(
            "TwinserveConnector needs to know the room on the host: set host_blocks or "
            "host_tokens (one of them) in "
            "kv_connector_extra_config"
        )
    name, unit = ("host_blocks", block_tokens) if "host_blocks" in settings else ("host_tokens", 1)
    if int(settings[name]) < 1:
        raise ValueError(f"{name} is {settings[name]}; it must be 1 or more")
    return int(settings[name]) * unit
