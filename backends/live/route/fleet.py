"""The fleet that a live router sees: its router, its view, and its events, without HTTP.

It is to the front what `twinserve.sim.fleet.fleet.Fleet` is to the simulator: a router gets its
events in the same order. A worker that comes back is a new replica, as there, and its former state
is forgotten.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from twinserve.backends.live.route.measured import KvMemory
from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict, chosen_without
from twinserve.sim.fleet.view import FleetView, Signals
from twinserve.sim.results.recorder import Load
from twinserve.sim.results.routing import fields_of, without_nan

Note = Callable[..., None]  # `RoutingWriter.note`


@dataclass(slots=True)
class LiveView(FleetView):
    """loads  by replica that is up: what was measured of it last, and when"""

    loads: dict[int, Load] = field(default_factory=dict)

    def measured_s(self, replica: int) -> float:
        return self.loads[replica].at_s


@dataclass(slots=True, eq=False)
class Stay:
    """A request at a worker. left: it has been counted out."""

    request: Request
    worker: int
    replica: int
    begun: bool = False
    left: bool = False


class RoutedFleet:
    """workers  how many there may be, none of which is up yet
    now      seconds; never goes back
    model    what is known of step times of workers; None: nothing

    remembers  whether a session is not forgotten
    note       called with all inputs of the router; None: not recorded
    """

    def __init__(
        self,
        router: Router,
        workers: int,
        now: Callable[[], float],
        model: StepTimeModel | None = None,
    ) -> None:
        self.router, self._now, self._model = router, now, model
        self._replica: list[int | None] = [None] * workers  # of each worker that is up
        self._worker: list[int] = []  # of each replica that there was
        self.in_flight = 0
        self._noted = 0  # requests that have numbers
        self._sizes: set[int] = set()  # tokens in a KV block, of all replicas that there were
        self._noted_before = 0  # requests that were noted without the last of these
        self.remembers: Callable[[int], bool] = lambda session: True
        self.note: Note | None = None
        view = LiveView(now(), [], [], [], Signals(), lambda i, at_s: view.loads[i])
        self.view = router.view = view

    @property
    def up(self) -> list[int]:
        """Return the workers that take requests, ascending."""
        return [worker for worker, replica in enumerate(self._replica) if replica is not None]

    def is_up(self, worker: int) -> bool:
        return self._replica[worker] is not None

    def at(self, worker: int) -> int:
        """Return the requests at a worker."""
        replica = self._replica[worker]
        return 0 if replica is None else self.view.in_flight[replica]

    def came(self, worker: int, memory: KvMemory, load: Load | None = None) -> None:
        """A worker takes requests from now on. load: its first; None: it counts as idle."""
        if self.is_up(worker):
            return
        view, replica = self.view, len(self._worker)
        view.now = self._now()
        self._worker.append(worker)
        self._replica[worker] = replica
        view.add(memory.num_blocks, memory.block_tokens, self._model)
        view.loads[replica] = load or Load(view.now, 0, 0, 0, memory.num_blocks)
        if self.note:
            self.note(view.now, "came", replica, worker, *memory, fields_of(view.loads[replica]))
        view.takes[replica] = True
        view.up.append(replica)
        self.router.on_came(replica)

    def failed(self, worker: int) -> None:
        """A worker takes no further requests."""
        replica, view = self._replica[worker], self.view
        if replica is None:
            return
        view.now = self._now()
        self._replica[worker] = None
        if self.note:
            self.note(view.now, "failed", replica)
        view.takes[replica] = False
        view.up.remove(replica)
        del view.loads[replica]
        self.router.on_failed(replica)

    def measured(self, worker: int, load: Load) -> None:
        replica = self._replica[worker]
        if replica is not None and load.at_s >= self.view.loads[replica].at_s:
            self.view.loads[replica] = load
            if self.note:
                self.note(self._now(), "measured", replica, fields_of(load))

    def heard(self, worker: int, stored: bool, contents: np.ndarray) -> None:
        """A worker sent KV events. contents: int64[n], as of `Prompts.numbers`."""
        replica = self._replica[worker]
        if replica is not None and self.router.hears_kv_events():
            self.view.now = self._now()
            if self.note:
                self.note(self.view.now, "heard", replica, stored, contents.tolist())
            hear = self.router.on_stored if stored else self.router.on_removed
            hear(replica, contents)

    def age_s(self, worker: int) -> float | None:
        """Return the age of what is known of a worker that is up (seconds)."""
        replica = self._replica[worker]
        return None if replica is None else self._now() - self.view.loads[replica].at_s

    def choose(self, request: Request, avoid: Collection[int] = ()) -> int | Verdict:
        """Return the router's worker for a request. avoid: chosen only if no other is up."""
        view = self.view
        view.now = self._now()
        if not view.up:
            return Verdict.HOLD
        avoided = [i for i in view.up if self._worker[i] in avoid]
        if len(avoided) == len(view.up):
            avoided = []
        choice = chosen_without(self.router, request, view, avoided)
        if self.note:
            self._note_request(request)
            said = choice.name if isinstance(choice, Verdict) else choice
            seen = [[i, view.in_flight[i], fields_of(view.load(i))] for i in view.up]
            self.note(view.now, "asked", request.number, avoided, said, seen)
        return self._worker_of(choice)

    def _note_request(self, request: Request) -> None:
        """Before its number is used, and where KV blocks of another size have come since."""
        assert self.note
        sizes = set(self.view.block_tokens)
        if sizes != self._sizes:
            self._sizes, self._noted_before = sizes, self._noted
        if request.number >= self._noted_before:
            return
        if request.number < 0:
            request.number = self._noted
            self._noted += 1
        contents = {}
        for size in sorted(sizes):
            blocks = request.contents(size)
            contents[size] = [] if blocks is None else blocks.tolist()
        values = without_nan(request.values)
        of_whom = request.group, request.affinity
        self.note(self.view.now, "request", request.number, request.id, values, *of_whom, contents)

    def _worker_of(self, choice: int | Verdict) -> int | Verdict:
        if isinstance(choice, Verdict):
            return choice
        if choice not in self.view.up:
            raise ValueError(
                f"router {self.router.name!r} sent a request to {choice!r}, which is no replica "
                "and no Verdict; give one of view.up"
            )
        return self._worker[choice]

    def sent(self, request: Request, worker: int) -> Stay:
        """A request goes to a worker that is up."""
        replica = self._replica[worker]
        assert replica is not None
        view = self.view
        view.now = self._now()
        view.in_flight[replica] += 1
        self.in_flight += 1
        if self.note:
            self.note(view.now, "sent", request.number, replica)
        self.router.on_dispatched(request, replica)
        return Stay(request, worker, replica)

    def forgotten(self, session: int) -> None:
        """A session was silent for long, so the router may forget its worker."""
        if self.note:
            self.note(self._now(), "forgotten", session)
        self.router.on_forgotten(session)

    def stands(self, stay: Stay) -> bool:
        """Return whether the stay's worker is still up and has not restarted as another replica."""
        return self._replica[stay.worker] == stay.replica

    def first_token(self, stay: Stay) -> None:
        if not (stay.begun or stay.left):
            stay.begun = True
            self.view.now = self._now()
            if self.note:
                self.note(self.view.now, "first token", stay.request.number, stay.replica)
            self.router.on_first_token(stay.request, stay.replica)

    def ended(self, stay: Stay) -> None:
        """The stay has ended, for whatever reason. A second call changes nothing."""
        if stay.left:
            return
        stay.left = True
        view = self.view
        view.now = self._now()
        view.in_flight[stay.replica] -= 1
        self.in_flight -= 1
        if self.note:
            self.note(view.now, "ended", stay.request.number, stay.replica)
        self.router.on_ended(stay.request, stay.replica)
        session = stay.request.affinity
        if session >= 0 and not self.remembers(session):  # forgotten while this was under way
            self.forgotten(session)
