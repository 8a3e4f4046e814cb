"""A vLLM worker whose forward pass only waits (docs/emulate.md): no weights and no KV tensors.
vLLM loads these classes by name. Imports vLLM."""

import logging
import multiprocessing
import signal
from dataclasses import asdict

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from twinserve.backends.live.emulate.settings import read_emulated
from twinserve.backends.live.emulate.steps import EmulatedSteps, Pace, TokenRange, WallPace
from twinserve.backends.live.serving.process import end_with_parent

logger = logging.getLogger("vllm.twinserve")

_LAYER = "emulated.attn"  # one for all: its pages are as large as theirs together
_LOG_STEPS = 5000


class _Launched(AsyncModelRunnerOutput):
    """The output of a step that was launched; it can be had when the step has ended."""

    def __init__(self, output: ModelRunnerOutput, pace: Pace, end_s: float) -> None:
        self._output, self._pace, self._end_s = output, pace, end_s

    def get_output(self) -> ModelRunnerOutput:
        self._pace.wait(self._end_s)
        return self._output


class EmulatedWorker(WorkerBase):
    """steps: what they compute and how long that takes; pace: when they end."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        given = read_emulated(self.vllm_config.additional_config)
        self.emulated = given
        self.asynchronous = bool(self.vllm_config.scheduler_config.async_scheduling)
        vocab = TokenRange.of_vocab(self.model_config.get_vocab_size(), given.named_tokens)
        self.steps = EmulatedSteps(given.model(), vocab, given.config.cold_start)
        self.pace: Pace = WallPace()
        self._launched: _Launched | ModelRunnerOutput | None = None

    def load_model(self, **_) -> None:
        """Do nothing: there are no weights."""

    # -- memory ------------------------------------------------------------------------------------
    def _spec(self) -> FullAttentionSpec:
        size = self.cache_config.block_size
        return FullAttentionSpec(
            block_size=size,
            num_kv_heads=1,
            head_size=self.emulated.kv_bytes_per_token // 2,  # of keys, and as much of values
            dtype=torch.uint8,
        )

    def get_kv_cache_spec(self) -> dict:
        return {_LAYER: self._spec()}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        """Return room for the profile's blocks and vLLM's null block."""
        return (self.emulated.num_blocks + 1) * self._spec().page_size_bytes

    def initialize_from_config(self, kv_cache_config) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self):
        """Nothing to warm up. Newer releases want the seconds of it, by part."""
        try:
            from vllm.v1.worker.worker_base import CompilationTimes
        except ImportError:
            return 0.0
        return CompilationTimes(language_model=0.0, encoder=0.0)

    # -- a step ------------------------------------------------------------------------------------
    def execute_model(self, scheduler_output):
        step = self.steps.take(scheduler_output)
        order = {name: i for i, name in enumerate(step.names)}
        output = ModelRunnerOutput(
            req_ids=step.names, req_id_to_index=order, sampled_token_ids=step.tokens
        )
        if not step.names:
            return output
        self.stepped(step)
        end_s = self.pace.launch(step.seconds, step.goes_on)
        if self.asynchronous:
            self._launched = _Launched(output, self.pace, end_s)
            return None
        self.pace.wait(end_s)
        return output

    def sample_tokens(self, grammar_output):
        launched, self._launched = self._launched, None
        return launched

    def stepped(self, step) -> None:
        """Log now and then whether the host keeps up."""
        lateness = getattr(self.pace, "lateness", None)
        if lateness is not None and lateness.steps % _LOG_STEPS == _LOG_STEPS - 1:
            logger.info("%s", lateness.line())

    def lateness(self) -> dict | None:
        """Return the counts of `Lateness` so far; None in virtual time. A development server
        answers it as /collective_rpc."""
        found = getattr(self.pace, "lateness", None)
        return None if found is None else asdict(found)

    # -- what an engine asks besides ---------------------------------------------------------------
    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model(self):
        raise NotImplementedError("an emulated GPU has no model")

    def take_draft_token_ids(self) -> None:
        return None

    def execute_dummy_batch(self) -> None:
        """Do nothing. vLLM calls this for data-parallel ranks without work."""

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no such cache."""

    def shutdown(self) -> None:
        lateness = getattr(self.pace, "lateness", None)
        if lateness is not None and lateness.steps:
            logger.info("%s", lateness.line())


class EmulatedExecutor(UniProcExecutor):
    """In the engine's own process, as for one GPU. vLLM's CPU platform switches asynchronous
    scheduling off; here it is as the emulated GPU has it."""

    def _init_executor(self) -> None:
        if multiprocessing.parent_process() is not None:
            end_with_parent(signal.SIGKILL)
        given = read_emulated(self.vllm_config.additional_config)
        self.scheduler_config.async_scheduling = given.config.async_scheduling
        super()._init_executor()
