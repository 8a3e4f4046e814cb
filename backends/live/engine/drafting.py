"""The live backend of an engine that speculates: vLLM's own n-gram proposer looks drafts up, and
the model says which of them are right."""

import numpy as np

from twinserve.backends.acceptance import DraftsPartedError, RecordedAcceptance
from twinserve.backends.live.engine.backend import LiveBackend
from twinserve.backends.live.engine.engine import StepAnswer, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.versions import LiveEngineError
from twinserve.backends.speculating import SpeculatingBackend
from twinserve.policies.plan import Verified
from twinserve.policies.requests import RequestTable


class DraftingLiveBackend(LiveBackend):
    """`acceptance` has what each step found and accepted, and `twin` books it from there, as a
    simulation of this run would."""

    def __init__(
        self,
        requests: RequestTable,
        engine: VllmEngine,
        twin: SpeculatingBackend,
        texts: PromptTexts,
        pace=None,
    ) -> None:
        super().__init__(requests, engine, twin, texts, pace)
        self.acceptance = twin.acceptance = RecordedAcceptance()
        self._verifies = twin.verify

    def verified(self, granted: np.ndarray, rows: np.ndarray, answer: StepAnswer) -> Verified:
        """Raise LiveEngineError for other drafts than planned, or other tokens than booked."""
        names = [self.requests.ids[row] for row in rows.tolist()]
        scheduled = answer.scheduled
        drafts = {} if scheduled is None else scheduled.drafts
        for name, position in zip(names, self.requests.output_tokens[rows].tolist(), strict=True):
            self.acceptance.note(name, position, drafts.get(name, 0), answer.accepted.get(name, 0))
            given = position + len(answer.tokens[name])
            self.acceptance.note_found(name, given, answer.found.get(name, 0))
        try:
            verified = self._verifies(rows, granted)
        except DraftsPartedError as error:
            raise LiveEngineError(
                f"the engine verified other drafts than planned, {error.where} ({self.drift()})"
            ) from error
        for name, tokens in zip(names, verified.tokens.tolist(), strict=True):
            if tokens != len(answer.tokens[name]):
                raise LiveEngineError(
                    f"{name}: {tokens} tokens of a step are booked, and the engine gave "
                    f"{len(answer.tokens[name])} ({self.drift()})"
                )
        return verified
