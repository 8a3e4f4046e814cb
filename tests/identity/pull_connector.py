"""A connector for vLLM's scheduler whose transfers happen on paper: it answers as the scheduler
side of vLLM's NIXL connector in pull mode does, and notes what it is asked for.

Source: vLLM 0.32, `nixl/pull_scheduler.py` (`get_num_new_matched_tokens`,
`update_state_after_alloc`, `request_finished`).
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus


class PullConnector(KVConnectorBase_V1):
    """begun  (request id, blocks to be written) of loads since the harness last looked
    kept   ids whose blocks stay, since then
    """

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.begun: list[tuple[str, list[int]]] = []
        self.kept: list[str] = []

    # -- scheduler side ----------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            count = len(request.prompt_token_ids or []) - num_computed_tokens
            if count > 0:
                return count, True
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            if num_external_tokens:
                self.begun.append((request.request_id, blocks.get_unhashed_block_ids()))
            params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self.kept.append(request.request_id)
        return len(block_ids) > 0, None

    # -- worker side: there is none ----------------------------------------------------------------
    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


class LeasingConnector(PullConnector):
    """nixl  vLLM's own scheduler side, which is asked for all; kept: as above"""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
            NixlPullConnectorScheduler,
        )

        self.nixl = NixlPullConnectorScheduler(vllm_config, "prefill", kv_cache_config)

    def on_new_request(self, request):
        self.nixl.on_new_request(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.nixl.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.nixl.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self.nixl.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output):
        self.nixl.update_connector_output(connector_output)

    def request_finished(self, request, block_ids):
        keeps, params = self.nixl.request_finished(request, (block_ids,))
        if keeps:
            self.kept.append(request.request_id)
        return keeps, params
