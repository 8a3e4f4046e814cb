"""The whole vLLM V1 engine in this process: scheduler, worker, model and KV tensors, one step a
call."""

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


# Float32 sums taken in another order may turn an argmax whose margin is smaller than this, and may
# move a logprob by less than that. (As measured on x86 with one thread, they moved nothing.)
TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3


def same_answer(alone: Output, output: Output) -> str:
    """'same', 'tie' (they part where the best two tokens are as good as equal), or the fault."""
    for position, (a, b) in enumerate(zip(alone.tokens, output.tokens, strict=True)):
        if a != b:
            margin = alone.margin(position)
            return "tie" if margin < TIE else f"token {position} is {b}, alone {a} by {margin:.2g}"
        moved = abs(alone.logprob(position) - output.logprob(position))
        if moved > LOGPROB_TOLERANCE:
            return f"the logprob of token {position} moved by {moved:.2g}"
    return "same"


class LiveEngine(VllmEngine):
    """vLLM under `limits` (sizes, prefix caching, reserve_full_isl), greedy and in float32, with a
    log of its own scheduler. extra: further engine arguments.

    Requests have names of one length, so that names decide ties as their order does. Call `close()`
    before another one is built.
    """

    def __init__(self, limits: EngineSettings, model: Path, **extra) -> None:
        self.limits = limits
        self.outputs: dict[str, Output] = {}  # by name; complete when the request has finished
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
                extra={"scheduler_reserve_full_isl": limits.reserve_full_isl} | extra,
            )
        )

    def submit(self, name: str, prompt: list[int], output_tokens: int) -> None:
        """Queue a request of `prompt` token ids."""
        super().submit(name, prompt, output_tokens, 0.0, logprobs=2)

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
