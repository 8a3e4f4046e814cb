"""A vLLM V1 engine in this process, with the steered scheduler, one step a call."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from twinserve.backends.live.engine.planned import PlannedStep, ScheduledStep
from twinserve.backends.live.needs import require
from twinserve.backends.live.physical.layers import NULL_PAGES
from twinserve.backends.live.versions import LiveEngineError, installed_vllm

_WARM_TOKENS = 1024  # longer steps take so long that preparing them is lost in it

CONNECTOR = {
    "kv_connector": "TwinserveConnector",
    "kv_connector_module_path": "twinserve.backends.live.transfer.connector",
    # with "both" vLLM would hold back freed blocks; this one copies both ways as well
    "kv_role": "kv_producer",
}
_LLVM = "llvmlite.binding.ffi"


@dataclass(frozen=True)
class LiveSettings:
    """How the engine is built.

    model           folder with a config.json
    weights         "safetensors": the folder's; "dummy": random
    num_blocks      KV blocks to use; None: as many as memory holds
    block_tokens    tokens a KV block
    max_step_tokens tokens the engine can compute in one step (room for them is set aside)
    swap_blocks     blocks of host memory for swapped KV; 0: no swapping
    keeps_texts     no text leaves the prefix cache for a copy of another; the pool has room for all
    physical        plans have a layout, which KV follows (docs/live_memory.md)
    layers          of a physical layout: those of the model, which move one by one
                    (docs/live_memory.md); 0: slots move, of all layers at once
    staging         then: pages for the layers that a step streams
    graphs          CUDA graphs and compilation (GPU only)
    drafts          most n-gram drafts of a request; 0: no speculation
    lookup          then: tokens of the shortest and the longest n-gram that is looked up
    threads         of the CPU engine; small models are fastest with one
    extra           further vLLM engine arguments
    """

    model: Path
    num_blocks: int | None
    block_tokens: int
    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    weights: str = "safetensors"
    dtype: str = "float32"
    prefix_caching: bool = False
    swap_blocks: int = 0
    keeps_texts: bool = False
    physical: bool = False
    layers: int = 0
    staging: int = 0
    graphs: bool = False
    drafts: int = 0
    lookup: tuple[int, int] = (5, 5)
    threads: int = 1
    kv_gib: int = 1
    scheduler: str = "twinserve.backends.live.engine.scheduler.SteeredScheduler"
    extra: dict = field(default_factory=dict)


@dataclass(slots=True)
class StepAnswer:
    """What one step gave. scheduled: None of a scheduler of vLLM's own; tokens: request id ->
    token ids emitted; finished: ids, in order of the
    batch; logprobs: request id -> {token id: log probability} of the best ones, where asked for;
    transfers: copies of KV that have ended since the step before
    (transfer.copy.TransferReport); accepted: request id -> drafts that were right, those behind its
    last token included; found: request id -> drafts of its next step."""

    scheduled: ScheduledStep | None
    tokens: dict[str, list[int]]
    finished: list[str]
    logprobs: dict[str, dict[int, float]]
    transfers: list
    accepted: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)


def uses_of(settings: LiveSettings) -> tuple[str, ...]:
    """Return what the engine is used for, by the names of needs.NEEDS."""
    if settings.physical:
        return ("physical",)
    swaps, drafts = bool(settings.swap_blocks), bool(settings.drafts)
    return ("engine", *["swapping"] * swaps, *["drafts"] * drafts)


@contextlib.contextmanager
def engine_environment(settings: LiveSettings) -> Iterator[None]:
    """What the engine needs from its process, taken back afterwards: vLLM sets environment
    variables of its own, and on a CPU puts a no-op in place of `torch.set_num_threads`."""
    before = dict(os.environ)
    os.environ.update(
        {
            # else the engine core steps in a process of its own
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # The CPU engine prepares its kernels for each number of rows; by default it forgets
            # them after a few hundred.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "100000",
            "HF_HUB_OFFLINE": "1",
        }
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        if torch.cuda.is_available():
            yield
        else:
            set_threads(settings.threads)
            # vLLM ranks logprobs in a compiled function; compiling takes seconds and a C++ compiler
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def llvm_out_of_sight() -> Iterator[None]:
    """For building an engine: without llvmlite's module of its library in `sys.modules`. A CPU
    worker of vLLM 0.32 looks for kernels in all that are loaded (`triton_utils/dispatcher.py`), and
    fails on that library's object. An earlier look-up of n-grams in this process has loaded
    it, with numba."""
    module = sys.modules.pop(_LLVM, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[_LLVM] = module


class VllmEngine:
    """Submit requests, give a plan, get its outcome. Greedy sampling, no end-of-text token: answers
    have the length asked for. Raises LiveEngineError where vLLM is missing, not supported, or
    changed a setting. Call `close()` at the end."""

    def __init__(self, settings: LiveSettings) -> None:
        self.settings = settings
        self.version = installed_vllm()
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(engine_environment(settings))
        try:
            require(*uses_of(settings))
            self._engine = self._build()
            self._client = self._engine.engine_core
            self.scheduler = self._client.engine_core.scheduler
            self.scheduler.keeps_texts = settings.keeps_texts
            self._check_settings()
        except BaseException:
            self._exit.close()
            raise

    def _build(self):
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings = self.settings
        arguments = {
            "model": str(settings.model),
            "load_format": settings.weights,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": settings.dtype,
            "enforce_eager": not settings.graphs,
            "disable_log_stats": True,
            "async_scheduling": False,
            "scheduler_cls": settings.scheduler,
            "block_size": settings.block_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_step_tokens,
            "max_model_len": settings.max_model_len,
            "enable_prefix_caching": settings.prefix_caching,
            "enable_chunked_prefill": True,
            "watermark": 0.0,
            "use_tqdm_on_load": False,
        }
        if settings.num_blocks is not None:
            # one is vLLM's null block
            arguments["num_gpu_blocks_override"] = settings.num_blocks + 1
        if settings.swap_blocks:
            extra = {"host_blocks": settings.swap_blocks}
            arguments["kv_transfer_config"] = KVTransferConfig(
                **CONNECTOR, kv_connector_extra_config=extra
            )
        if settings.physical:
            arguments |= self._layered() if settings.layers else self._physical()
        if settings.drafts:
            arguments["speculative_config"] = self._ngrams()
        arguments |= settings.extra
        known = {
            name: value
            for name, value in arguments.items()
            if name in EngineArgs.__dataclass_fields__
        }
        config = EngineArgs(**known).create_engine_config()
        parallel = config.parallel_config
        alone = parallel.world_size == 1 and "distributed_executor_backend" not in known
        if alone and parallel.distributed_executor_backend == "mp":
            parallel.distributed_executor_backend = "uni"  # else the worker is another process
        with llvm_out_of_sight():
            return LLMEngine.from_vllm_config(config, disable_log_stats=True)

    def _ngrams(self) -> dict:
        """As vLLM's --speculative-config."""
        shortest, longest = self.settings.lookup
        return {
            "method": "ngram",
            "num_speculative_tokens": self.settings.drafts,
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": longest,
        }

    def _physical(self) -> dict:
        """Arguments of an engine whose layout is the ledger's. Engines built later are as usual."""
        from vllm.config import KVTransferConfig

        from twinserve.backends.live.attention import backend, registration
        from twinserve.backends.live.physical.scheduler import CONNECTOR as PHYSICAL_CONNECTOR

        # One request may lie in more blocks than its length needs; the worker's tables are as wide
        # as this allows.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        # physical/scheduler.py knows how V1 is told of a changed table
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        registration.register()
        self._exit.callback(registration.unregister)
        extra = {"host_blocks": max(self.settings.swap_blocks, 1)}
        return {
            "scheduler_cls": "twinserve.backends.live.physical.scheduler.PhysicalScheduler",
            "kv_transfer_config": KVTransferConfig(
                **PHYSICAL_CONNECTOR, kv_connector_extra_config=extra
            ),
            "attention_backend": registration.BACKEND_NAME,
            "worker_extension_cls": registration.WORKER_EXTENSION,
            "additional_config": {backend.PARTIAL_BLOCKS: True},
        }

    def _layered(self) -> dict:
        """Arguments of an engine whose layers lie apart, in a pool of the ledger's cells, a null
        page and the staging pages."""
        from vllm.config import KVTransferConfig

        from twinserve.backends.live.physical.layer_scheduler import CONNECTOR as LAYER_CONNECTOR

        settings = self.settings
        found = json.loads((settings.model / "config.json").read_text())["num_hidden_layers"]
        if found != settings.layers:
            raise LiveEngineError(
                f"the model has {found} layers, and the ledger moves {settings.layers}: simulate "
                "with a profile of this model (MODEL@GPU takes its folder, or twinserve calibrate)"
            )
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        extra = {
            "host_blocks": max(settings.swap_blocks, 1),
            "layers": settings.layers,
            "device_blocks": settings.num_blocks,
            "named_blocks": settings.num_blocks + settings.swap_blocks,
        }
        beside = NULL_PAGES + settings.staging
        return {
            "num_gpu_blocks_override": settings.num_blocks + -(-beside // settings.layers),
            "scheduler_cls": "twinserve.backends.live.physical.layer_scheduler.LayerScheduler",
            "kv_transfer_config": KVTransferConfig(
                **LAYER_CONNECTOR, kv_connector_extra_config=extra
            ),
        }

    def _check_settings(self) -> None:
        scheduler, settings = self.scheduler, self.settings
        in_force = {
            "block_tokens": scheduler.block_size,
            "max_step_tokens": scheduler.max_num_scheduled_tokens,
            "max_model_len": scheduler.max_model_len,
            "prefix_caching": scheduler.kv_cache_manager.enable_caching,
            "num_blocks": self.num_blocks if settings.num_blocks is not None else None,
        }
        if settings.drafts:
            in_force["drafts"] = scheduler.num_spec_tokens
        for name, value in in_force.items():
            if value != getattr(settings, name):
                raise LiveEngineError(
                    f"the engine runs with {name}={value!r}, not the {getattr(settings, name)!r} "
                    "asked for; choose one it keeps"
                )

    @property
    def num_blocks(self) -> int:
        """KV blocks of the engine's pool, vLLM's null block not counted."""
        scheduler = self.scheduler
        if hasattr(scheduler, "device_blocks"):  # one of ours, whose pool may be of another size
            return scheduler.device_blocks
        return scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    @property
    def on_one_core(self) -> bool:
        """Whether the calling thread does all of a step, so that others have its core if it is
        off."""
        import torch

        return self.settings.threads == 1 and not torch.cuda.is_available()

    @property
    def vocab(self) -> int:
        return self._engine.model_config.get_vocab_size()

    @property
    def core(self):
        """vLLM's EngineCore, in this process."""
        return self._client.engine_core

    @property
    def executor(self):
        """vLLM's, in this process."""
        return self._engine.model_executor

    @property
    def worker(self):
        """vLLM's worker, which is in this process."""
        return self.executor.driver_worker.worker

    @property
    def kv_tensors(self) -> list:
        """One torch tensor a layer: the KV cache itself."""
        return self.worker.model_runner.kv_caches

    def cycle(self) -> None:
        """Make one call of vLLM's own loop, in which its scheduler decides."""
        self._client.get_output()

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        output_tokens: int,
        arrival_s: float = 0.0,
        logprobs: int | None = None,
        attributes: dict | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request of `prompt` token ids. Its outputs come under `request_id`. attributes:
        as a client's `vllm_xargs`, for schedulers that read them."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        parameters = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
            extra_args=attributes,
        )
        # some releases want to know the token that ends a text
        no_end = {"eos_token_id": None} if hasattr(EngineCoreRequest, "eos_token_id") else {}
        self._client.add_request(
            EngineCoreRequest(
                **no_end,
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=arrival_s,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=priority,
            )
        )

    def abort(self, request_id: str) -> None:
        """Withdraw a request, between two steps."""
        self._client.abort_requests([request_id])

    def step(self, planned: PlannedStep) -> StepAnswer:
        """Schedule, run and sample `planned`. Raises LiveEngineError if the engine fails."""
        self.scheduler.planned = planned
        try:
            outputs = self._client.get_output().outputs
        except LiveEngineError:
            raise
        except Exception as error:  # vLLM's, torch's, or of a plan that makes no sense to it
            raise LiveEngineError(self._stopped(error)) from error
        tokens = {output.request_id: list(output.new_token_ids) for output in outputs}
        finished = [output.request_id for output in outputs if output.finish_reason is not None]
        connector = self.scheduler.connector
        transfers = connector.take_transfers() if connector is not None else []
        last = getattr(self.scheduler, "last", None)  # a scheduler of vLLM's own tells nothing
        answer = StepAnswer(last, tokens, finished, _logprobs(outputs), transfers)
        if self.settings.drafts:
            answer.accepted, answer.found = dict(self.scheduler.accepted), self._found(tokens)
        return answer

    def _found(self, names: Iterable[str]) -> dict[str, int]:
        """Drafts of these requests, less those that have ended."""
        requests = self.scheduler.requests
        return {name: len(requests[name].spec_token_ids) for name in names if name in requests}

    def _stopped(self, error: Exception) -> str:
        scheduler = self.scheduler
        parted = f" after it parted from its plans at {scheduler.first_drift}"
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return (
            f"the engine stopped in step {scheduler.steps + 1}"
            f"{parted if scheduler.drift else ''}: {said}"
        )

    def warm_up(self) -> None:
        """Run once what will be measured, so that no measured step is the first of its kind. The
        CPU engine prepares kernels for each number of tokens, so each number occurs once."""
        import torch

        longest = min(self.settings.max_step_tokens, self.settings.max_model_len - 1)
        counts = (
            [longest] if torch.cuda.is_available() else range(1, min(longest, _WARM_TOKENS) + 1)
        )
        for tokens in counts:
            self.submit("warm-up", [1] * tokens, 1)
            self.step(PlannedStep({"warm-up": tokens}))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; no request may be running."""
        if not self._engine.reset_prefix_cache():
            raise LiveEngineError("the prefix cache cannot be emptied while a request holds blocks")

    def close(self) -> None:
        """Stop the engine and give the process back as it was."""
        with self._exit:
            self._client.shutdown()
            del self._engine, self._client, self.scheduler
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def _logprobs(outputs) -> dict[str, dict[int, float]]:
    found = {}
    for output in outputs:
        if output.new_logprobs is not None:
            ids, values = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
            found[output.request_id] = dict(zip(ids[-1].tolist(), values[-1].tolist(), strict=True))
    return found
