"""The whole vLLM V1 engine in this process: scheduler, worker, model and KV tensors, one step a
call."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.identity.protocol import EngineSettings, Observed
from twinserve.backends.live.engine.engine import llvm_out_of_sight

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the engine core steps in a process of its own
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB on offer; the number of blocks is set apart
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the test process keeps its cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def engine_environment() -> Iterator[None]:
    """What the engine needs from its process, taken back afterwards: it sets environment variables
    of its own, LD_PRELOAD among them, and puts a no-op in place of `torch.set_num_threads`."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    import torch

    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    # Matrices this small gain nothing from threads; where cores are shared, waiting for one another
    # makes a step 30 times slower.
    set_threads(1)
    try:
        # vLLM ranks logprobs in a compiled function; compiling takes seconds and a C++ compiler
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)
        os.environ.clear()
        os.environ.update(before)


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


class LiveEngine:
    """vLLM's `LLMEngine` under `settings`, greedy and in float32, with the recording scheduler.

    Requests go by the caller's names; keep them of one length, so that the suffix vLLM adds to a
    name never decides a tie that the names decide. Raises RuntimeError when vLLM changed a setting.
    Call `close()` before another one is built.
    """

    def __init__(self, settings: EngineSettings, model: Path) -> None:
        self.settings = settings
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(engine_environment())
        try:
            with llvm_out_of_sight():
                self.engine = self._build(model)
            self.scheduler = self.engine.engine_core.engine_core.scheduler
            self._refuse_changed_settings()
        except BaseException:
            self._exit.close()
            raise
        self.outputs: dict[str, Output] = {}  # by name; complete when the request has finished
        self._names: dict[str, str] = {}  # vLLM's id -> name

    def _build(self, model: Path):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings = self.settings
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                load_format="safetensors",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype="float32",
                enforce_eager=True,
                disable_log_stats=True,
                async_scheduling=False,
                scheduler_cls=f"{__package__}.recording_scheduler.RecordingScheduler",
                num_gpu_blocks_override=settings.num_blocks + 1,  # one is vLLM's null block
                block_size=settings.block_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                enable_prefix_caching=settings.enable_prefix_caching,
                enable_chunked_prefill=settings.enable_chunked_prefill,
                scheduling_policy=settings.policy,
                watermark=settings.watermark,
                scheduler_reserve_full_isl=settings.reserve_full_isl,
            )
        )

    def _refuse_changed_settings(self) -> None:
        scheduler, config = self.scheduler, self.scheduler.scheduler_config
        in_force = {
            "num_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "block_tokens": scheduler.block_size,
            "max_num_seqs": getattr(scheduler, "max_num_active_reqs", None)
            or scheduler.max_num_running_reqs,
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "max_model_len": scheduler.max_model_len,
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
            "enable_prefix_caching": scheduler.kv_cache_manager.enable_caching,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "policy": scheduler.policy.value,
            "watermark": config.watermark,
            "reserve_full_isl": scheduler.scheduler_reserve_full_isl,
        }
        for name, value in in_force.items():
            if value != getattr(self.settings, name):
                raise RuntimeError(
                    f"the engine runs with {name}={value!r}, not the "
                    f"{getattr(self.settings, name)!r} asked for; choose a setting it keeps"
                )
        if config.async_scheduling:
            raise RuntimeError("the engine schedules asynchronously; it must step synchronously")

    # -- running -----------------------------------------------------------------------------------
    def submit(
        self,
        name: str,
        prompt: list[int],
        output_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
    ) -> None:
        """Queue a request of `prompt` token ids; `arrival` in seconds, any origin."""
        from vllm import SamplingParams

        inner = self.engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            SamplingParams(
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
            ),
            arrival_time=arrival,
            priority=priority,
        )
        self._names[inner] = name

    @property
    def unfinished(self) -> int:
        return self.engine.get_num_unfinished_requests()

    def step(self) -> Observed:
        """One engine step, forward pass included, as its scheduler saw it."""
        logged = len(self.scheduler.log)
        outputs = self.engine.step()
        if len(self.scheduler.log) != logged + 1:
            raise RuntimeError(f"one call took {len(self.scheduler.log) - logged} scheduler steps")
        for output in outputs:
            (answer,) = output.outputs
            self.outputs[output.request_id] = Output(
                list(answer.token_ids),
                [{token: p.logprob for token, p in best.items()} for best in answer.logprobs],
            )
        return self._observed(self.scheduler.log[-1])

    def _observed(self, step: Observed) -> Observed:
        """`step` with the callers' names."""
        names = self._names
        values = {part.name: getattr(step, part.name) for part in dataclasses.fields(Observed)}
        for part, value in values.items():
            if isinstance(value, dict):
                values[part] = {names[inner]: tokens for inner, tokens in value.items()}
            elif isinstance(value, tuple):
                values[part] = tuple(names[inner] for inner in value)
        return Observed(**values)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; no request may be running."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be emptied while a request holds blocks")

    @property
    def kv_tensors(self) -> list:
        """One torch tensor a layer: the KV cache itself."""
        return self.engine.model_executor.driver_worker.worker.model_runner.kv_caches

    def close(self) -> None:
        """Stop the engine and give the process back as it was."""
        with self._exit:
            self.engine.engine_core.shutdown()
            del self.engine, self.scheduler
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
