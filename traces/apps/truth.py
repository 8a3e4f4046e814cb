"""A workload's true demand, for oracles (`predictor=perfect`). No policy sees it otherwise."""

import numpy as np

from twinserve.traces.workload import Workload


class TrueDemand:
    """What `workload`'s requests will really need. Keeps lengths, not the workload."""

    def __init__(self, workload: Workload) -> None:
        self._outputs = dict(zip(workload.ids, workload.output_tokens.tolist(), strict=True))
        self._pool = workload.pool
        order = np.argsort(workload.group, kind="stable")
        groups, starts = np.unique(workload.group[order], return_index=True)
        pairs = np.stack([workload.prompt_tokens[order], workload.output_tokens[order]], axis=1)
        parts = np.split(pairs, starts[1:]) if len(order) else []
        self._groups = {int(g): part for g, part in zip(groups, parts, strict=True) if g >= 0}

    def application(self, group: int) -> np.ndarray | None:
        """Return int64[n, 2]: prompt and output tokens of a group's requests; None: no such
        group."""
        return self._groups.get(group)

    def output_tokens(self, request_id: str) -> int | None:
        """Return the output tokens of a listed request, or of one of the best-effort pool
        (`be-BATCH-NUMBER`); None for any other."""
        known = self._outputs.get(request_id)
        if known is None and self._pool is not None:
            name, *numbers = request_id.split("-")
            if name == "be" and len(numbers) == 2:
                batch, i = map(int, numbers)
                known = int(self._pool.draw(batch)[1][i])
        return known
