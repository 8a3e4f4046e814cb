"""Our side of the comparison: policy `vllm` on the paged ledger, stepped without a clock."""

import numpy as np

from tests.identity.mutations import Mutation
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.release import installed_release
from twinserve.policies.baselines.vllm import Release


def vllm_stepper(
    num_blocks: int,
    block_tokens: int,
    limits,
    prefix_caching: bool,
    asynchronous: bool = False,
    stages: int = 1,
    policy: str = "vllm:VllmPolicy",
    ledger_class=None,
    **options,
):
    """A stepper with policy `vllm` on a paged ledger; `options` are VllmOptions. policy: module of
    `policies.baselines` and class. ledger_class: of PagedLedger's kind, which is the default."""
    from importlib import import_module

    from tests.sim.stepper import Stepper
    from twinserve.policies.baselines.vllm import VllmOptions
    from twinserve.policies.kv.paged.ledger import PagedLedger
    from twinserve.policies.requests import RequestTable

    module, _, name = policy.partition(":")
    kind = getattr(import_module(f"twinserve.policies.baselines.{module}"), name)
    requests = RequestTable()
    ledger_class = ledger_class or PagedLedger
    ledger = ledger_class(requests, num_blocks, block_tokens, prefix_caching=prefix_caching)
    return Stepper(requests, kind(limits, VllmOptions(**options)), ledger, asynchronous, stages)


class OurScheduler:
    """`tests.sim.stepper` behind the `Side` protocol.

    The ledger wants dense content ids, so each new content id of a scenario gets the next number.
    `policy` and `ledger` are what mutations break. release: whose rules; None: the installed one's.
    """

    def __init__(
        self,
        settings: EngineSettings,
        mutation: Mutation | None = None,
        release: Release | None = None,
        policy: str = "vllm:VllmPolicy",
        ledger_class=None,
    ) -> None:
        self.settings = settings
        limits = {
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_model_len": settings.max_model_len,
        }
        options = {
            "scheduling": settings.policy,
            "enable_chunked_prefill": settings.enable_chunked_prefill,
            "long_prefill_token_threshold": settings.long_prefill_token_threshold,
            "watermark": settings.watermark,
            "scheduler_reserve_full_isl": settings.reserve_full_isl,
            "release": release or installed_release(),
        }
        self.stepper = self.made(limits, options, policy, ledger_class)
        self.policy = self.stepper.core.policy
        self.ledger = self.stepper.core.ledger
        self._dense: dict[int, int] = {}
        if mutation is not None:
            self.ledger._kernel = None  # it breaks the Python
            mutation.apply(self)

    def made(self, limits: dict, options: dict, policy: str, ledger_class):
        """limits: of the engine; options: VllmOptions."""
        from twinserve.policies.base import EngineLimits

        settings = self.settings
        return vllm_stepper(
            settings.num_blocks,
            settings.block_tokens,
            EngineLimits(**limits),
            settings.enable_prefix_caching,
            settings.async_scheduling,
            settings.pipeline_stages,
            policy,
            ledger_class,
            **options,
        )

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        prefix: np.ndarray | None = None,
        priority: int = 0,
        arrival: float = 0.0,
    ) -> None:
        """As `Side.submit`; `arrival` in seconds."""
        full = None
        if prefix is not None and self.settings.enable_prefix_caching:
            full = self._dense_ids(prefix[: prompt_tokens // self.settings.block_tokens])
        self.stepper.submit(
            request_id,
            prompt_tokens,
            output_tokens,
            prefix=full,
            priority=priority,
            arrival_s=arrival,
            **self.more(request_id, prompt_tokens),
        )

    def more(self, request_id: str, prompt_tokens: int) -> dict[str, int]:
        """Further columns of its row."""
        return {}

    def _dense_ids(self, ids: np.ndarray) -> np.ndarray:
        dense = self._dense
        for content in ids.tolist():
            if content not in dense:
                dense[content] = self.ledger.pool.new_contents(1)
        return np.array([dense[content] for content in ids.tolist()], np.int64)

    def withdraw(self, request_id: str) -> None:
        self.stepper.withdraw(self.stepper.requests.ids.index(request_id))

    def step(self) -> Observed:
        seen = self.stepper.step()
        ids = self.stepper.requests.ids
        return Observed(
            scheduled=seen.scheduled,
            preempted=tuple(seen.preempted),
            free_blocks=seen.free_blocks,
            hits=seen.hits,
            finished=tuple(seen.finished),
            running=tuple(ids[row] for row in self.policy.running),
            waiting=seen.waiting,
        )
