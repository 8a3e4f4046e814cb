"""The simulated backend of an engine that speculates."""

import numpy as np

from twinserve.backends.acceptance import Acceptance, RecordedAcceptance
from twinserve.backends.base import Executed
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.drafting import Drafting
from twinserve.policies.plan import StepOutcome, StepPlan, Verified
from twinserve.policies.requests import FIRST_ROWS, RequestTable
from twinserve.profiles.forms.speculative import SpeculativeModel, VerifyingComposition


class SpeculatingBackend(SimulatedBackend):
    """Each row of a step gets the drafts that are right, and one token more. Steps are single ones:
    how long a run would stay the same is not known.

    acceptance  which drafts are right
    """

    def __init__(
        self,
        acceptance: Acceptance | RecordedAcceptance,
        drafting: Drafting,
        requests: RequestTable,
        model: SpeculativeModel,
        *args,
        **settings,
    ) -> None:
        super().__init__(requests, model, *args, **settings)
        self.acceptance, self.drafting = acceptance, drafting
        self._keys = np.zeros(FIRST_ROWS, np.uint64)

    @property
    def draws_drafts(self) -> bool:
        return self.acceptance.drawn

    def expect(self, row: int, output_tokens: int) -> None:
        super().expect(row, output_tokens)
        if row >= len(self._keys):
            self._keys = np.concatenate([self._keys, np.zeros(len(self._keys), np.uint64)])
        self._keys[row] = self.acceptance.key(self.requests.ids[row])

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        work = self.composition(plan, emitting)
        moved = self.transfer(plan, now, overhead_s, work)
        start = max(now + overhead_s, moved.before)
        seconds = [self.model.step_seconds(work)]
        self._warm_up(seconds)
        self._delay(work, seconds, start, moved.beside, overhead_s)
        ends = np.array([max(start + seconds[0], moved.beside)])
        rows = plan.rows[emitting]
        verified = self.verify(rows, plan.tokens[emitting])
        left = self._outputs[rows] - self.requests.output_tokens[rows]
        finished = rows[verified.tokens == left].tolist()
        outcome = StepOutcome(now, ends, rows, finished, verified)
        return Executed(
            outcome, work, moved.to_host_bytes, moved.to_device_bytes, moved.ready_s, moved.lands_s
        )

    def verify(self, rows: np.ndarray, granted: np.ndarray) -> Verified:
        """What a step that grants `granted` tokens (int64[e]) to the rows that emit makes of their
        drafts, before it is booked."""
        requests = self.requests
        emitted = requests.output_tokens[rows]
        drafted = granted - (requests.known_tokens(rows) - requests.computed_tokens[rows])
        # padding is verified too, and wrong
        drafts = np.minimum(drafted, requests.draft_tokens[rows])
        accepted = self.acceptance.right(self._keys[rows], emitted, drafts)
        left = self._outputs[rows] - emitted
        tokens = np.minimum(accepted + 1, left)
        ahead = self.acceptance.ahead(self._keys[rows], emitted + tokens)
        return Verified(tokens, drafted, accepted, left == 1, ahead)

    def _pooled(self, plan: StepPlan, emitting: np.ndarray) -> VerifyingComposition:
        requests, rows, tokens = self.requests, plan.rows, plan.tokens
        resident = requests.computed_tokens[rows]
        # of rows that ended after they were planned, too: they are computed in vain; and of new
        # ones that lack a single token and are padded to the length of a decode
        decode = (requests.output_tokens[rows] > 0) | (tokens > 1)
        decode &= requests.known_tokens(rows) - resident <= 1
        alone, prefill = resident[decode].tolist(), ~decode
        return VerifyingComposition(
            len(alone),
            sum(alone),
            max(alone, default=0),
            tokens[prefill],
            resident[prefill],
            verify_new=tokens[decode],
            verify_resident=resident[decode],
            drafters=int(np.count_nonzero(emitting)),
            drafts=self.drafting.after(len(rows)),
        )
