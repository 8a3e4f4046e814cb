"""Offline requests next to the online ones, the best candidates by eq. 4 first, while SLO and
memory hold: `offline=rank`."""

import numpy as np

from twinserve.policies.echo.parts import OfflineDecodes, StepInProgress
from twinserve.policies.echo.selection import Selection


class Rank(Selection):
    """A decode leaves for the bound or for memory, never because the ratio of eq. 4 falls.

    Sec. 4.1 evicts "to accommodate an online request or fit the tight SLOs", selects the best
    candidate by eq. 4 and "will prefer scheduling more offline requests".
    """

    rising = tries = False

    def serve(self, step: StepInProgress, decodes: np.ndarray, prompts: np.ndarray) -> None:
        """Decodes, the shortest contexts first, as many as the bound allows: all count the same and
        the longest takes longest, so it is the best to leave out. Then prompts by eq. 4.

        While a decode waits, no other row is begun: prompts rank above decodes, and the longest
        decode would wait for as long as there are any.
        """
        ready = OfflineDecodes(decodes, step.requests.computed_tokens, step.ledger)
        before, under_way = len(step), prompts.tolist()
        fitting = self.offline.fitting(step, ready.resident)
        self.offline.decode(step, ready.rows, ready.resident, fitting)
        waiting = len(step) < before + len(ready) and any(
            row not in step.granted and row not in step.dropped for row in ready.rows.tolist()
        )
        self.pool.keep()
        self.add_prompts(step, ready, under_way, [], begin=not waiting)
        self.keep_added(step)
        if len(step) == before and not waiting:
            self.serve_whoever(step, prompts)
