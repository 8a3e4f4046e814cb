"""vLLM's balancer of data-parallel engines (vllm/v1/engine/core_client.py, 0.32:
`get_core_engine_for_request`).

An engine's score is the larger of two: this client's unfinished requests there times the number of
clients, and waiting + running of the last snapshot. If requests wait, their number times 6 max(0,
KV use - 0.5) is added. The engine with the lowest score gets the request. The scan begins one
engine further each time, so that ties do not favour any; `waiting` of the chosen one grows by the
number of clients until the next snapshot.

Snapshots are of every 100 ms. vLLM's coordinator sends one 100 ms after the last one at the
earliest, when counts have changed (vllm/v1/engine/coordinator.py); here they are of multiples of
that time.
"""

from collections.abc import Sequence

from pydantic import Field

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Measured, PerRequest
from twinserve.sim.fleet.view import FleetView

_WAITING_WEIGHT, _KV_FREE = 6.0, 0.5


class VllmDpOptions(Measured):
    """clients  API servers that vLLM would have, each of which picks by itself; here one picks for
    all, and counts as so many"""

    interval: float = Field(0.1, ge=0, le=3600)
    clients: int = Field(1, ge=1)


class VllmDp(PerRequest[VllmDpOptions]):
    name = "vllm-dp"
    Options = VllmDpOptions

    def setup(self) -> None:
        self._counts: dict[int, list[float]] = {}  # replica -> waiting, running, KV use
        self._measured_s: dict[int, float] = {}
        self._start = 0

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        for replica in view.up:
            at_s = view.measured_s(replica)
            if self._measured_s.get(replica) != at_s:
                self._measured_s[replica] = at_s
                load = view.load(replica)
                self._counts[replica] = [load.waiting, load.running, load.used / load.total]
        counts = [self._counts[replica] for replica in view.up]
        under_way = [view.in_flight[replica] for replica in view.up]
        clients = self.options.clients
        chosen = pick(counts, under_way, self._start % len(counts), clients)
        counts[chosen][0] += clients
        self._start = (self._start % len(counts) + 1) % len(counts)
        return view.up[chosen]


def pick(
    counts: Sequence[Sequence[float]], under_way: Sequence[int], start: int, clients: int
) -> int:
    """The place of the engine with the lowest score, the first of them from `start` on. counts:
    waiting, running, KV use (0 to 1) of each."""
    order = [*range(start, len(counts)), *range(start)]
    return min(order, key=lambda i: score(counts[i], clients * under_way[i]))


def score(counts: Sequence[float], under_way: int) -> float:
    waiting, running, kv_use = counts
    penalty = waiting * _WAITING_WEIGHT * max(0.0, kv_use - _KV_FREE) if waiting else 0.0
    return max(under_way, waiting + running) + penalty
