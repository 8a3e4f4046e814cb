"""Sessions stay on a replica that their name gives, whatever its load.

As the session routing of vLLM's production-stack: a consistent hash of the session's id, and
requests without a session to the least loaded replica. The hash is that of highest random weights
(Thaler, Ravishankar, IEEE/ACM Trans. Networking 1998): where a replica comes or goes, no session
changes its place but those that must.
"""

from __future__ import annotations

from hashlib import blake2b

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Shedding, fewest
from twinserve.sim.fleet.view import FleetView


class Session(Router[Shedding]):
    """A session that has begun stays while its replica is up. An application is one, too."""

    name = "session"
    Options = Shedding

    def setup(self) -> None:
        self._home: dict[int, int] = {}  # session -> replica

    def on_forgotten(self, affinity: int) -> None:
        self._home.pop(affinity, None)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        session = request.affinity
        if session < 0:
            return fewest(view)
        home = self._home.get(session)
        if home is None or not view.takes[home]:
            home = max(view.up, key=lambda i: weight(session, i))
            self._home[session] = home
        return home


def weight(session: int, replica: int) -> bytes:
    """A random number for the pair; the session is where it is highest."""
    return blake2b(f"{session}/{replica}".encode(), digest_size=8).digest()
