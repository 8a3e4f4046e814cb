"""Steps that verify drafts: their extra columns, and the summary's section on them."""

import numpy as np

from twinserve.backends.base import Executed
from twinserve.policies.requests import RequestTable
from twinserve.sim.results.decisions import DecisionRecorder
from twinserve.sim.results.recorder import StepRecorder
from twinserve.sim.results.steps import Steps

# Further columns of STEPS in runs that speculate: requests that verified drafts, the drafts, of
# these the right ones, and tokens given to requests.
DRAFT_COLUMNS = ("verifying_requests", "draft_tokens", "accepted_tokens", "emitted_tokens")


class DraftRecorder(StepRecorder):
    """Record single steps whose outcomes have verified drafts."""

    def __init__(self, replica: int = 0, timed: bool = False) -> None:
        super().__init__(replica, timed)
        self._drafts: list[tuple[int, ...]] = []  # one a step, in the order of DRAFT_COLUMNS

    def completed(self, executed: Executed, first_gaps: np.ndarray, requests: RequestTable) -> None:
        super().completed(executed, first_gaps, requests)
        verified = executed.outcome.verified
        assert verified is not None, "this backend does not support drafts"
        self._drafts.append(
            (
                int(np.count_nonzero(verified.drafted)),
                int(verified.drafted.sum()),
                int(verified.accepted.sum()),
                int(verified.tokens.sum()),
            )
        )

    def run_columns(self) -> dict[str, np.ndarray]:
        columns = np.array(self._drafts, np.int64).reshape(-1, len(DRAFT_COLUMNS)).T
        return super().run_columns() | dict(zip(DRAFT_COLUMNS, columns, strict=True))


class DraftDecisionRecorder(DecisionRecorder, DraftRecorder):
    """Record the plans too, each with the outcome of its drafts."""


def describe_drafts(steps: Steps) -> dict:
    """Return `speculation` of summary.json, from steps with DRAFT_COLUMNS. As vLLM counts
    (`v1/spec_decode/metrics.py`), the mean length includes the token after the accepted drafts."""
    drafts, drafted, accepted, _ = (
        int((steps.first(name) * steps.lengths).sum()) for name in DRAFT_COLUMNS
    )
    return {
        "speculation": {
            "drafts": drafts,
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        }
    }
