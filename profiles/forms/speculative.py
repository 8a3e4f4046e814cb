"""Step times of an engine that speculates: verification, and what drafting adds.

Verification is a query of 1 + k tokens a row on the row's KV. A model that times prompts in chunks
times it as such a chunk: the KV is read once, all 1 + k tokens are multiplied. Fits may extrapolate
to so short chunks, so a step takes at least as long as without drafts. Kernel tables know decodes
from chunks, and time verification themselves (profiles/operators/model.py, `verifying_terms`).

A draft model computes all tokens of the step once, for its own KV. Then it computes k - 1 times one
token of each row that drafts (vLLM 0.32, `v1/spec_decode/llm_base_proposer.py` `propose`). A head
(EAGLE, MTP) is taken to need a share of the target's own time for the same work; n-grams need
nothing.

Left out: the output projection over the 1 + k sampled rows of a request, but for kernel tables;
rejection sampling; a CPU's time for n-grams.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinserve.profiles.composition import AroundModel, StepComposition, StepTimeModel
from twinserve.profiles.specs import ModelSpec

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class VerifyingComposition(StepComposition):
    """A step whose decodes verify drafts.

    verify_new, verify_resident  int64[decode_requests]: tokens computed, one and the drafts, and
                                 resident tokens, by decoding request
    drafters, drafts             requests that get drafts after the step, and how many each
    """

    verify_new: np.ndarray = field(default_factory=lambda: _NONE)
    verify_resident: np.ndarray = field(default_factory=lambda: _NONE)
    drafters: int = 0
    drafts: int = 0

    @property
    def new_tokens(self) -> int:
        return int(self.verify_new.sum()) + int(self.prefill_new.sum())

    @property
    def verifies(self) -> bool:
        """Whether any row has drafts in it."""
        return bool(len(self.verify_new)) and int(self.verify_new.max()) > 1

    def plain(self) -> StepComposition:
        """Return the same work as a model without drafts sees it: a row with more than one token is
        a chunk."""
        if not self.verifies:
            return self.undrafted()
        return StepComposition(
            prefill_new=np.concatenate([self.verify_new, self.prefill_new]),
            prefill_resident=np.concatenate([self.verify_resident, self.prefill_resident]),
            churn=self.churn,
        )

    def undrafted(self) -> StepComposition:
        """Return the same step without drafts."""
        return StepComposition(
            self.decode_requests,
            self.decode_context,
            self.decode_context_max,
            self.prefill_new,
            self.prefill_resident,
            self.churn,
        )


class Drafter(Protocol):
    def draft_seconds(self, work: VerifyingComposition) -> float:
        """What drafting adds to a step."""
        ...


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Looks drafts up in the text itself."""

    def draft_seconds(self, work: VerifyingComposition) -> float:
        return 0.0


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """A model of its own; share: of its time that drafting takes. Of a head, `model` is the target
    and `share` the head's part of it."""

    model: StepTimeModel
    share: float = 1.0

    def draft_seconds(self, work: VerifyingComposition) -> float:
        if not work.drafts:
            return 0.0
        seconds = verified_seconds(self.model, work)
        if work.drafters:
            # contexts of the rows that draft: at least what is resident
            context = work.decode_context if work.decode_requests else 0
            again = StepComposition(work.drafters, context, work.decode_context_max)
            seconds += (work.drafts - 1) * self.model.step_seconds(again)
        return self.share * seconds


class SpeculativeModel(AroundModel):
    """The times of `model` with drafts verified, and made by `drafter`."""

    def __init__(self, model: StepTimeModel, drafter: Drafter) -> None:
        super().__init__(model)
        self.drafter = drafter

    def allreduce_seconds(self, work: StepComposition) -> float:
        if isinstance(work, VerifyingComposition) and not self.model.knows_drafts:
            work = work.plain()
        return self.model.allreduce_seconds(work)

    def step_seconds(self, work: StepComposition) -> float:
        seconds = verified_seconds(self.model, work)
        if isinstance(work, VerifyingComposition):
            seconds += self.drafter.draft_seconds(work)
        return seconds

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        """Without drafts, as `step_seconds` of a plain composition."""
        return self.model.decode_run_seconds(n, context, context_max, steps)


def verified_seconds(model: StepTimeModel, work: StepComposition) -> float:
    """Return the seconds of a step without what drafting adds."""
    if model.knows_drafts or not isinstance(work, VerifyingComposition):
        return model.step_seconds(work)
    seconds = model.step_seconds(work.plain())
    return max(seconds, model.step_seconds(work.undrafted())) if work.verifies else seconds


def head_share(llm: ModelSpec) -> float:
    """Return the share of the target's matrices that a head has: one decoder layer, and the output
    projection that it shares with the target (EAGLE, Li et al. 2024, Sec. 3.1; DeepSeek-V3 2024,
    Sec. 2.2). Its times are taken to have the same share."""
    return (_active_layer(llm) + llm.head_parameters) / llm.active_parameters


def head_bytes(llm: ModelSpec, method: str) -> float:
    """Weights of such a head: a layer, and a projection of two hidden states to one. Embeddings and
    output projection are the target's.

    An MTP module (mtp) comes with the target: its layer has all experts, in the target's format. An
    EAGLE head is trained apart: its layer is taken to be dense, as wide as the experts that a token
    passes, and not quantised.
    """
    projection = 2 * llm.hidden * llm.hidden * llm.dtype_bytes
    if method != "mtp":
        return _active_layer(llm) * llm.dtype_bytes + projection
    mlps = max(llm.experts, 1) * llm.mlp_parameters
    of_all, of_mlps = llm.matrix_bytes
    return (llm.layer_matrix_parameters - mlps) * of_all + mlps * of_mlps + projection


def _active_layer(llm: ModelSpec) -> float:
    """Parameters of a layer's matrices that a token passes, the mean of all layers."""
    return (llm.active_parameters - llm.head_parameters) / llm.layers
