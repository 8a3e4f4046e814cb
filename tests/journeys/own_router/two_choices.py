import numpy as np

from twinserve.sim.fleet.routers.base import PerRequest, Shedding


class TwoChoicesOptions(Shedding):
    draws: int = 2


class TwoChoices(PerRequest[TwoChoicesOptions]):
    name = "two-choices"
    Options = TwoChoicesOptions

    def setup(self):
        self.rng = np.random.default_rng(0)

    def place(self, request, stage, view):
        drawn = self.rng.choice(view.up, self.options.draws)
        return int(min(drawn, key=view.in_flight.__getitem__))


class Loud(TwoChoices):
    name = "loud"

    def place(self, request, stage, view):
        return view.ups[0]


class Lost(TwoChoices):
    name = "lost"

    def place(self, request, stage, view):
        return len(view.up)


class Narrow(TwoChoices):
    name = "narrow"

    def place(self, request, view):
        return view.up[0]
