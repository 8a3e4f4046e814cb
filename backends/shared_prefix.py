"""The simulated backend of an engine whose attention reads shared prefixes once."""

import numpy as np

from twinserve.backends.base import Executed
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepPlan
from twinserve.profiles.forms.shared_prefix import SharedPrefixModel


class SharedPrefixBackend(SimulatedBackend):
    """Decodes share the text in common blocks, which the ledger knows. It stays the same in a run
    of steps, which ends when a request joins or leaves.

    ledger  of the engine
    """

    def __init__(self, ledger: KvLedger, model: SharedPrefixModel, *args, **settings) -> None:
        super().__init__(ledger.table, model, *args, **settings)
        self.ledger = ledger
        self._attention = model

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        rows = plan.rows
        decode = emitting & (plan.tokens == 1) & (self.requests.output_tokens[rows] > 0)
        self._attention.shared = self.ledger.shared_tokens(rows[decode])
        return super().execute(plan, emitting, now, overhead_s)
