"""The request whose first token is due first; written against the guide, with a slip in line 20."""

import numpy as np

from twinserve.policies.base import Options, Policy
from twinserve.policies.parts.fill import fill
from twinserve.policies.requests import State


class Chunked(Options):
    chunk: int = 512


class Slip(Policy[Chunked]):
    name, Options = "slip", Chunked

    def on_arrival(self, row, requests): ...
    def on_finish(self, row): ...
    def due(self, view):
        return view.requests.arrival_s + view.requests.slo_ttft_s - view.now_s

    def plan(self, view, ledger):
        r = view.requests
        ledger.begin_step()
        wanted = r.computed_tokens < r.prompt_tokens + r.output_tokens
        rows = np.flatnonzero((r.state != State.FINISHED) & wanted)
        order = rows[np.argsort(self.due(view)[rows], kind="stable")]
        seats = self.limits.max_num_seqs
        plan = fill(view, ledger, order, seats=seats, chunk=self.options.chunk)
        plan.moves = ledger.take_moves()
        return plan


class Mended(Slip):
    name = "mended"

    def due(self, view):
        return view.requests.arrival_s + view.requests.slo_ttft_s
