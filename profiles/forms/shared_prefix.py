"""Attention that reads a prefix which several decodes share once for all of them.

A kernel for single requests reads each context by itself, so decodes on one document read it once
each. Cascade attention computes the shared part as one batch of queries on one context. It then
merges the attention on each request's own part (FlashInfer, `flashinfer.cascade`; older releases of
vLLM for a prefix of the whole batch). A step then reads

    sum of contexts - tokens read once instead of several times

of KV, and all else is as it was. Left out: the merges, and the launches of the further kernels, so
both cost nothing here. Prompts in the same step attend as before.
"""

from dataclasses import replace

import numpy as np

from twinserve.profiles.composition import AroundModel, StepComposition, StepTimeModel


class SharedPrefixModel(AroundModel):
    """`model` with decodes that read shared prefixes once, wherever that is faster.

    shared  tokens that decodes of the next steps need not read, as one of them does already: of m
            decodes on a prefix of t tokens (m - 1) t. A caller that knows the requests sets it
            before it asks (`backends/shared_prefix.py`); 0: the times are those of `model`, value
            for value

    How far the longest context is above the mean stays as it is: the tail of a step is that of the
    requests' own parts.
    """

    def __init__(self, model: StepTimeModel) -> None:
        super().__init__(model)
        self.shared = 0

    def step_seconds(self, work: StepComposition) -> float:
        alone = self.model.step_seconds(work)
        if not self.shared:
            return alone
        n, context, longest = self._read(
            work.decode_requests, work.decode_context, work.decode_context_max
        )
        once = replace(work, decode_requests=n, decode_context=context, decode_context_max=longest)
        return min(alone, self.model.step_seconds(once))

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        alone = self.model.decode_run_seconds(n, context, context_max, steps)
        if not self.shared:
            return alone
        return np.minimum(
            alone, self.model.decode_run_seconds(*self._read(n, context, context_max), steps)
        )

    def _read(self, n: int, context: int, longest: int) -> tuple[int, int, int]:
        """Decodes, the tokens that they read together, and the longest of their contexts."""
        return n, context - self.shared, longest - self.shared // n
