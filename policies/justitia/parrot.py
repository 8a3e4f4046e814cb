"""Parrot: applications first come, first served; the requests of one are not interleaved with those
of the next. Lin et al., "Parrot", OSDI 2024, as in Justitia's evaluation (Yang et al., Sec. II-B
and V-A).

A request that belongs to no application, or to a group without a class (a session,
a pool), is an application by itself.
"""

from dataclasses import replace

from twinserve.policies.justitia.demand import Presence
from twinserve.policies.justitia.queues import RankedQueue
from twinserve.policies.parts.queue_policy import QueueOptions, QueuePolicy
from twinserve.policies.requests import Application, RequestTable


class ParrotPolicy(QueuePolicy[QueueOptions]):
    name = "parrot"
    Options = QueueOptions
    traits = replace(QueuePolicy.traits, orders_applications=True)
    waiting: RankedQueue

    def setup(self) -> None:
        super().setup()
        self.waiting = RankedQueue()
        self._applications: dict[int, int] = {}  # group -> place, until it ends
        self._groups: dict[int, int] = {}  # row -> group
        self._here = Presence()
        self._numbers: dict[int, int] = {}  # row -> number of its application
        self._next = 0

    def on_application(self, application: Application) -> None:
        if application.kind is not None:
            self._applications[application.group] = self._next
            self._next += 1

    def on_application_end(self, group: int) -> None:
        if self._here.closes(group):
            self._applications.pop(group, None)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        group = int(requests.group[row])
        number = self._applications.get(group)
        if number is not None:
            self._groups[row] = group
            self._here.comes(group)
        else:
            number, self._next = self._next, self._next + 1
        self._numbers[row] = number
        self.waiting.add(row, self.rank(row))

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        del self._numbers[row]
        group = self._groups.pop(row, -1)
        if group >= 0 and self._here.goes(group):
            del self._applications[group]

    def rank(self, row: int) -> tuple:
        return self._numbers[row], row
