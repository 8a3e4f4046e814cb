"""Step times of an engine whose layers lie on several stages: the roofline of each stage, and what
it takes to send activations from one to the next.

    host       the term of that name, once a batch (`roofline.py`)
    stage i    the other terms, of its own layers; output projection and its gather on the last
    transfer   between two stages: latency of an all-reduce + 2 x hidden values a token / link rate

Two values: vLLM sends hidden states and residuals apart (`IntermediateTensors`). Each
tensor-parallel rank sends its share and gathers the others' (`all_gather_group`), which together
takes its link as long as all of it. Sends over NVLink within a server were not measured.
"""

from dataclasses import replace

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.kernels import rank_model
from twinserve.profiles.forms.roofline import Efficiency, pcie_sharing
from twinserve.profiles.ranks import check_stages, stage_models
from twinserve.profiles.specs import GpuSpec, ModelSpec


class PipelineModel(StepTimeModel):
    """From a model, a GPU, ranks (`ranks.py`) and an Efficiency. A step is one batch that has all
    stages to itself; `stages` and the next functions give its parts. Raises ProfileError if the
    model cannot be split so."""

    knows_host = True

    def __init__(
        self,
        llm: ModelSpec,
        gpu: GpuSpec,
        tp: int,
        pp: int,
        efficiency: Efficiency,
        ep: bool = False,
        release: tuple[int, ...] = (),
    ) -> None:
        check_stages(llm, gpu.name, tp, pp)
        self.efficiency = efficiency
        without_host = replace(efficiency, host_s=0.0, host_request_s=0.0)
        self.stages = [
            rank_model(part, gpu, tp, without_host, 1, ep, head=i == pp - 1, release=release)
            for i, part in enumerate(stage_models(llm, pp))
        ]
        link = gpu.link_bytes_per_s * efficiency.link_share * pcie_sharing(gpu, tp)
        self._sent_token = 2.0 * llm.hidden * llm.dtype_bytes / link

    @property
    def under_way(self) -> int:
        return len(self.stages)

    def interval_seconds(self, work: StepComposition) -> float:
        """Return the time of the slowest stage, or of the host if that is longer."""
        return max(self.step_host_seconds(work), *self.stage_seconds(work))

    def stage_seconds(self, work: StepComposition) -> list[float]:
        return [stage.step_seconds(work) for stage in self.stages]

    def transfer_seconds(self, tokens: int) -> float:
        """Between one stage and the next."""
        return self.efficiency.allreduce_s + self._sent_token * tokens

    def step_host_seconds(self, work: StepComposition) -> float:
        return self.host_seconds(work.decode_requests + len(work.prefill_new))

    def step_seconds(self, work: StepComposition) -> float:
        sent = (len(self.stages) - 1) * self.transfer_seconds(work.new_tokens)
        return self.step_host_seconds(work) + sum(self.stage_seconds(work)) + sent

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        works = (StepComposition(n, context + n * j, context_max + j) for j in range(steps))
        return np.array([self.step_seconds(work) for work in works])

    def host_seconds(self, requests: int) -> float:
        return self.efficiency.host_s + self.efficiency.host_request_s * requests

    def allreduce_seconds(self, work: StepComposition) -> float:
        return sum(stage.allreduce_seconds(work) for stage in self.stages)
