"""The whole vLLM V1 engine in this process: scheduler, worker, model and KV tensors, one step a
call."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.identity.protocol import EngineSettings, Observed
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep


@dataclass
class Output:
    """What one request got: tokens, and for each the logprobs of the token and of the best two."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def margin(self, position: int) -> float:
        """Logprob of the best token less that of the second best."""
        best, second = sorted(self.logprobs[position].values(), reverse=True)[:2]
        return best - second

    def logprob(self, position: int) -> float:
        """Logprob of the token given."""
        return self.logprobs[position][self.tokens[position]]


class LiveEngine(VllmEngine):
    """vLLM under `limits`, greedy and in float32, with its own scheduler and a log of that. extra:
    further engine arguments.

    Requests have names of one length, so that names decide ties as their order does. Raises
    RuntimeError when vLLM changed a setting. Call `close()` before another one is built.
    """

    def __init__(self, limits: EngineSettings, model: Path, **extra) -> None:
        self.limits = limits
        self.outputs: dict[str, Output] = {}  # by name; complete when the request has finished
        own = {
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "enable_chunked_prefill": limits.enable_chunked_prefill,
            "scheduling_policy": limits.policy,
            "watermark": limits.watermark,
            "scheduler_reserve_full_isl": limits.reserve_full_isl,
        }
        super().__init__(
            LiveSettings(
                model,
                limits.num_blocks,
                limits.block_tokens,
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                limits.max_model_len,
                prefix_caching=limits.enable_prefix_caching,
                scheduler=f"{__package__}.recording_scheduler.RecordingScheduler",
                extra=own | extra,
            )
        )

    def _check_settings(self) -> None:
        super()._check_settings()
        scheduler, config = self.scheduler, self.scheduler.scheduler_config
        in_force = {
            "max_num_seqs": getattr(scheduler, "max_num_active_reqs", None)
            or scheduler.max_num_running_reqs,
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "policy": scheduler.policy.value,
            "watermark": config.watermark,
            "reserve_full_isl": scheduler.scheduler_reserve_full_isl,
            "async_scheduling": config.async_scheduling,
        }
        for name, value in in_force.items():
            if value != getattr(self.limits, name):
                raise RuntimeError(f"the engine runs with {name}={value!r}")

    def submit(
        self,
        name: str,
        prompt: list[int],
        output_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
    ) -> None:
        """Queue a request of `prompt` token ids; `arrival` in seconds, any origin."""
        super().submit(name, prompt, output_tokens, arrival, logprobs=2, priority=priority)

    @property
    def unfinished(self) -> int:
        return self.scheduler.get_num_unfinished_requests()

    def step(self) -> Observed:
        """One engine step, forward pass included, as its scheduler saw it."""
        logged = len(self.scheduler.log)
        answer = super().step(PlannedStep())
        if len(self.scheduler.log) != logged + 1:
            raise RuntimeError(f"one call took {len(self.scheduler.log) - logged} scheduler steps")
        for name, tokens in answer.tokens.items():
            output = self.outputs.setdefault(name, Output())
            output.tokens += tokens
            output.logprobs += [answer.logprobs[name]] if tokens else []
        return self.scheduler.log[-1]
