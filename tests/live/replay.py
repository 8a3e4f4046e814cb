"""A recorded live run, taken again by policy `vllm` on the paged ledger, step by step."""

from __future__ import annotations

import numpy as np

from tests.identity.compare import difference
from tests.identity.mutations import Mutation
from tests.identity.ours import OurScheduler
from tests.live.workload import Recording


class TextScheduler(OurScheduler):
    """Our scheduler for requests that are token ids: blocks of equal text, from the first token on,
    get one content id, whether a user wrote the text or the model did."""

    def __init__(self, settings, mutation: Mutation | None = None) -> None:
        super().__init__(settings, mutation)
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def submit_text(
        self, name: str, prompt: list[int], answer: list[int], priority: int, arrival: float
    ) -> None:
        """`answer` is what the request will emit. The ledger looks a block up only once its text is
        known, so naming the answer's blocks now tells the policy nothing early."""
        self.stepper.submit(
            name,
            len(prompt),
            len(answer),
            prefix=self.contents(prompt + answer),
            priority=priority,
            arrival_s=arrival,
        )

    def contents(self, text: list[int]) -> np.ndarray:
        """int64[full blocks of `text`]: content ids."""
        size, chain, before = self.settings.block_tokens, [], -1
        for start in range(0, len(text) - size + 1, size):
            key = before, tuple(text[start : start + size])
            if key not in self._ids:
                self._ids[key] = self.ledger.pool.new_contents(1)
            before = self._ids[key]
            chain.append(before)
        return np.array(chain, np.int64)


def first_mismatch(recording: Recording, mutation: Mutation | None = None) -> str:
    """Empty when our scheduler took every decision of the recorded engine; else the first step that
    differs and how. `mutation` breaks one rule of ours. The ledger audits itself at the end."""
    ours = TextScheduler(recording.settings, mutation)
    arrivals = list(reversed(recording.submitted))
    for number, real in enumerate(recording.steps):
        while arrivals and arrivals[-1].step <= number:
            sent = arrivals.pop()
            name = sent.request.name
            ours.submit_text(
                name,
                sent.prompt,
                recording.outputs[name].tokens,
                sent.request.priority,
                sent.arrival,
            )
        try:
            found = difference(real, ours.step())
        except Exception as error:  # a broken rule may crash our side
            if mutation is None:
                raise
            found = f"our side raised {type(error).__name__}: {error}"
        if found:
            return f"step {number} of {len(recording.steps)}:\n{found}"
    if mutation is None:
        ours.ledger.check()
    return ""
