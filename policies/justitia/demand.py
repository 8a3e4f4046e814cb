"""What Justitia and the shortest-first policies share: applications, and what they are believed to
need (Sec. IV-A and IV-B)."""

from collections.abc import Iterable
from typing import TypeVar

from twinserve.policies.parts.predictors import (
    COSTS,
    Cost,
    DemandOptions,
    Predictor,
    make_predictor,
)
from twinserve.policies.parts.queue_policy import QueueOptions, QueuePolicy
from twinserve.policies.requests import Application, RequestTable


class Presence:
    """Counts the requests of each application (or client) that are here, waiting or not.

    An application has ended when none is here and none will come; which of the two is said first
    does not matter.
    """

    def __init__(self) -> None:
        self._here: dict[int, int] = {}
        self._closed: set[int] = set()  # of these, to which no request will come; only asked

    def comes(self, number: int) -> None:
        self._here[number] = self._here.get(number, 0) + 1

    def goes(self, number: int) -> bool:
        """A request left. Returns whether its application has ended with it."""
        self._here[number] -= 1
        if self._here[number]:
            return False
        del self._here[number]
        if number not in self._closed:
            return number < 0  # a request that is an application by itself
        self._closed.remove(number)
        return True

    def closes(self, number: int) -> bool:
        """No request will come. Returns whether the application has ended."""
        if number in self._here:
            self._closed.add(number)
            return False
        return True

    def count(self, number: int) -> int:
        return self._here.get(number, 0)

    def __len__(self) -> int:
        """Applications with requests here."""
        return len(self._here)


class DemandQueueOptions(QueueOptions, DemandOptions):
    pass


OptionsOfDemand = TypeVar("OptionsOfDemand", bound=DemandQueueOptions)


class DemandPolicy(QueuePolicy[OptionsOfDemand]):
    """Keeps track of the application of each row, by a number: the group, or a number below 0 for a
    request that is an application by itself. A request is one by itself if its group has no class,
    or one that the predictor does not know. The whole demand of a session or a pool is unknown."""

    def setup(self) -> None:
        super().setup()
        self.predictor: Predictor = make_predictor(self.options)
        # groups that are served as one application, until they have ended
        self._kinds: dict[int, str] = {}
        self.here = Presence()
        self._requests: RequestTable  # from the first arrival on

    @property
    def cost(self) -> Cost:
        """What applications are charged for."""
        return COSTS["memory"]

    def prepare(self, kinds: Iterable[str]) -> None:
        self.predictor.prepare(kinds, self.cost)

    def application_of(self, row: int) -> int:
        """The number of the row's application."""
        group = int(self._requests.group[row])
        return group if group in self._kinds else ~row

    def begins(self, number: int, demand: int, arrival_s: float) -> None:
        """An application arrived; demand: as predicted, in the unit of `cost`."""

    def ends(self, row: int, number: int, cost: int) -> None:
        """A row of an application ended; cost: what it really took."""

    def forget(self, number: int) -> None:
        """An application has ended: nothing of it is here, and nothing will come."""
        self._kinds.pop(number, None)

    def leaves(self, row: int, number: int) -> None:
        """A row of an application was withdrawn. Default: it ends and has cost nothing."""
        self.ends(row, number, 0)

    def enqueue(self, row: int, number: int) -> None:
        """A row is to be put into the waiting queue."""
        raise NotImplementedError

    def on_application(self, application: Application) -> None:
        if application.kind is None:
            return
        demand = self.predictor.application(application, self.cost)
        if demand is not None:
            self._kinds[application.group] = application.kind
            self.begins(application.group, demand, application.arrival_s)

    def on_application_end(self, group: int) -> None:
        if group in self._kinds and self.here.closes(group):
            self.forget(group)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        number = self.application_of(row)
        if number < 0:
            demand = self.cost(
                int(requests.prompt_tokens[row]), self.predictor.output_tokens(row, requests)
            )
            self.begins(number, demand, float(requests.placed_s[row]))
        self.here.comes(number)
        self.enqueue(row, number)

    def on_withdraw(self, row: int) -> None:
        QueuePolicy.on_finish(self, row)
        number = self.application_of(row)
        self.leaves(row, number)
        if self.here.goes(number):
            self.forget(number)

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        requests, number = self._requests, self.application_of(row)
        # The last token's KV is never computed. (With asynchronous scheduling that token is not
        # counted yet.)
        prompt = int(requests.prompt_tokens[row])
        output = max(0, int(requests.computed_tokens[row]) - prompt + 1)
        if self.traits.keeps_ending:  # it is; and the row may have lost its KV since
            output = int(requests.output_tokens[row])
        self.predictor.ended(output, self._kinds.get(number))
        self.ends(row, number, self.cost(prompt, output))
        if self.here.goes(number):
            self.forget(number)
