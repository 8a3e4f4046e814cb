"""A policy's estimate of a batch whose decodes verify drafts.

Of a decode, `Batch.new` counts one token and its drafts. Two forms: BROS's own with a phase fitted
to decodes that verify as many drafts as there are, and the one that verifies none; and any other
model's times of just such steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinserve.policies.drafting import Drafting
from twinserve.policies.parts.estimators import Batch, LinearEstimator, ModelEstimator
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.profiles.forms.speculative import SpeculativeModel, VerifyingComposition
from twinserve.profiles.sampling import decode_steps, prefill_steps


@dataclass(frozen=True)
class VerifyingLinear(LinearEstimator):
    """BROS's form. A decode phase costs what lies between that of decodes without drafts and that
    of decodes that verify `most` each, by the share of drafts in it.

    verified  the phase where each request verifies `most` drafts; by requests, as `model.decode`
    """

    verified: PhaseCost
    most: int

    @classmethod
    def fit(
        cls, truth: SpeculativeModel, swap: SwapTimeModel, drafting: Drafting
    ) -> VerifyingLinear:
        """Each phase by itself, as without drafts; what drafting takes is in each of them."""
        prefills, decodes = list(prefill_steps()), list(decode_steps())
        tokens = np.array([work.new_tokens for work in prefills])
        requests = np.array([work.decode_requests for work in decodes])
        contexts = np.array([work.decode_context for work in decodes])
        prompts, plain, full = (
            np.array([truth.step_seconds(_verifying(work, drafts, drafting)) for work in works])
            for works, drafts in ((prefills, 0), (decodes, 0), (decodes, drafting.tokens))
        )
        model = BrosLinearModel(
            PhaseCost.fit(tokens, tokens, prompts),
            PhaseCost.fit(requests, contexts + requests, plain),
        )
        attended = contexts + requests * (1 + drafting.tokens)
        return cls(model, swap, PhaseCost.fit(requests, attended, full), max(drafting.tokens, 1))

    def prefixes(self, batch: Batch, behind: Batch | None = None) -> np.ndarray:
        whole = batch if behind is None else behind + batch
        if not np.count_nonzero(_drafts(whole)):
            return super().prefixes(batch, behind)
        prompt, decode = whole.is_prefill, ~whole.is_prefill
        n, drafts = decode.cumsum(), _drafts(whole).cumsum()
        new, attended = (whole.new * prompt).cumsum(), (whole.context * prompt).cumsum()
        total = self._decodes(n, (whole.context * decode).cumsum(), drafts)
        total += np.where(new > 0, self.model.prefill.seconds(new, attended), 0.0)
        swapped = whole.swapped.cumsum()
        if np.count_nonzero(swapped):
            swap_s = self.swap.base_s + swapped * self.swap.seconds_per_byte
            total = np.where(swapped > 0, np.maximum(total, swap_s), total)
        return total[len(whole) - len(batch) :]

    def seconds(self, batch: Batch, behind: Batch | None = None) -> float:
        whole = batch if behind is None else behind + batch
        if not np.count_nonzero(_drafts(whole)):
            return super().seconds(batch, behind)
        return float(self.prefixes(whole)[-1])

    def _decodes(self, n: np.ndarray, context: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """float64[m]: seconds of the decodes of m batches; int64[m] each. context: resident and
        new tokens, drafts among them."""
        plain = self.model.decode.seconds(n, context - drafts)
        full = np.maximum(self.verified.seconds(n, context), plain)  # fits may cross
        share = np.minimum(drafts / np.maximum(n * self.most, 1), 1.0)
        return np.where(n > 0, plain + (full - plain) * share, 0.0)


@dataclass(frozen=True)
class VerifyingModel(ModelEstimator):
    """Any step-time model's, of steps that verify drafts and make the next ones."""

    drafting: Drafting

    def prefixes(self, batch: Batch, behind: Batch | None = None) -> np.ndarray:
        return np.array([self.seconds(batch[: n + 1], behind) for n in range(len(batch))])

    def seconds(self, batch: Batch, behind: Batch | None = None) -> float:
        whole = batch if behind is None else behind + batch
        decode = ~whole.is_prefill
        resident = whole.context - whole.new
        alone = resident[decode]
        # a prompt that this step ends gets drafts, too; all are taken to end
        work = VerifyingComposition(
            len(alone),
            int(alone.sum()),
            int(alone.max(initial=0)),
            whole.new[~decode],
            resident[~decode],
            verify_new=whole.new[decode],
            verify_resident=alone,
            drafters=len(whole),
            drafts=self.drafting.after(len(whole)),
        )
        return max(self.model.step_seconds(work), self.swap.seconds(int(whole.swapped.sum())))


def _drafts(batch: Batch) -> np.ndarray:
    """int64[n]: drafts that each row verifies."""
    return np.where(batch.is_prefill, 0, batch.new - 1)


def _verifying(work: StepComposition, drafts: int, drafting: Drafting) -> VerifyingComposition:
    """A step of equal requests in which each decode verifies `drafts`, and the next are made."""
    n = work.decode_requests
    rows = n + len(work.prefill_new)
    return VerifyingComposition(
        n,
        work.decode_context,
        work.decode_context_max,
        work.prefill_new,
        work.prefill_resident,
        verify_new=np.full(n, 1 + drafts, np.int64),
        verify_resident=np.full(n, work.decode_context // max(n, 1), np.int64),
        drafters=rows,
        drafts=drafting.after(rows),
    )
