"""What a form of step times says of a measured point: steady loads by formula, no run of the
simulator.

    tpot     the decode step of the loop at its mean context, and what other requests' prompts add:
             each of them begins once while a request decodes its `osl` tokens
    loop     prompts that begin together, in steps of the budget, then decodes
    prompt   of a loop's requests: a tenth begin together, the others find decodes under way
    batch    steps full of prompts beside decodes, then what decodes are left
    layer    the step of one layer, no host
"""

import numpy as np

from twinserve.experiments.measured.points import Measured
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.front_end import load_front_end
from twinserve.profiles.host import VLLM_SYNCHRONOUS
from twinserve.profiles.profile import Profile
from twinserve.profiles.specs import ProfileError

CLIENT = load_front_end("vllm")
BUSIEST = 0.9
FIRST_WAVE = 0.1  # of ten requests for each that may be under way


def seconds(point: Measured, profile: Profile) -> float:
    """Of the point, with the profile's step times and the server's host time. ProfileError for a
    load that does not fit its KV memory."""
    if not point.ahead and point.what != "layer":
        profile = profile.with_host_time(VLLM_SYNCHRONOUS)
    load = _Load(point, profile, profile.model())
    return getattr(load, point.what)()


class _Load:
    def __init__(self, point: Measured, profile: Profile, model: StepTimeModel) -> None:
        self.point, self.profile, self.model = point, profile, model
        drawn = (1 + point.shortest) / 2
        self.isl, self.osl = round(point.isl * drawn), max(round(point.osl * drawn), 2)
        self.n = max(round(point.concurrency), 1)
        self.budget = point.budget or profile.max_num_batched_tokens
        self.each = self.isl + self.osl // 2  # tokens of a request halfway
        if point.what != "batch" and self.n * self.each > profile.kv_capacity_tokens:
            raise ProfileError("more KV than there is room")

    def _step(self, n: int, new=(), resident=()) -> float:
        mean = self.each
        prompts = {}
        if len(new):
            prompts = {"prefill_new": np.array(new), "prefill_resident": np.array(resident)}
        return self.model.step_seconds(StepComposition(n, n * mean, mean if n else 0, **prompts))

    def _prompt(self, n: int) -> float:
        """What one prompt adds to steps of n decodes."""
        total, done = 0.0, 0
        while done < self.isl:
            chunk = min(self.isl - done, max(self.budget - n, 1))
            total += self._step(n, [chunk], [done]) - (self._step(n) if n else 0.0)
            done += chunk
        return total

    def tpot(self) -> float:
        return self._step(self.n) + self._prompt(self.n) * (self.n - 1) / self.osl

    def _together(self, count: int) -> list[float]:
        """When each of `count` prompts that begin together has its first token."""
        if self.isl <= self.budget:
            at_once = max(self.budget // self.isl, 1)
            ends, now = [], 0.0
            for first in range(0, count, at_once):
                size = min(at_once, count - first)
                now += self._step(0, [self.isl] * size, [0] * size)
                ends += [now] * size
            return ends
        whole = self._prompt(0)
        return [whole * (k + 1) for k in range(count)]

    def loop(self) -> float:
        return self._together(self.n)[-1] + (self.osl - 1) * self._step(self.n)

    def prompt(self) -> float:
        alone, first = self._prompt(0), self._together(self.n)
        beside = alone
        if self.n > 1:
            step = self._step(self.n - 1)
            others = self._prompt(self.n - 1)
            # of the time, others' prompts are computed; one that comes then waits for half of one
            busy = min((self.n - 1) * others / (self.osl * step + others), BUSIEST)
            beside = others + 1.5 * step + busy / (1 - busy) * others / 2
        share = FIRST_WAVE if self.n > 1 else 0.0
        client = CLIENT.idle_s(self.isl)
        return share * float(np.mean(first)) + (1 - share) * beside + client

    def batch(self) -> float:
        count, seats = self.point.requests, self.profile.max_num_seqs
        room = self.profile.kv_capacity_tokens // (self.isl + self.osl)
        n = max(min(count, seats, room), 1)
        prompts = count * self.isl / (self.budget - min(n, self.budget // 2))
        chunk = self.budget - min(n, self.budget // 2)
        if self.isl <= chunk:
            new = [self.isl] * (chunk // self.isl) + [chunk % self.isl or 1]
            resident = [0] * len(new)
        else:
            new, resident = [chunk], [(self.isl - chunk) // 2]
        # decodes beside prompts: those that the following decodes alone would need
        beside = max(round(n / 2), 1)
        mixed = prompts * self._step(beside, new, resident)
        left = max(count * self.osl - prompts * beside, 0.0)
        return mixed + left / n * self._step(n)

    def layer(self) -> float:
        count = max(self.isl // 763, 1)
        chunks = [self.isl // count] * count
        work = StepComposition(prefill_new=np.array(chunks), prefill_resident=np.zeros(count, int))
        terms = self.model.terms(work)  # of a derived model
        return sum(terms.values()) - terms["host"] - terms["head"]
