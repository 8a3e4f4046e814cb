"""What a policy saves against vLLM's: the cheapest replicas of each with the same objectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinserve.own_code import label
from twinserve.policies.registry import POLICIES
from twinserve.sim.plan.candidates import Candidate

BASELINE = "vllm"
HOURS_A_MONTH = 730.0  # 8,760 hours a year, over twelve


@dataclass(frozen=True)
class Needed:
    """Replicas that keep the objectives as recorded. answer: of `verdicts`, beyond the record."""

    candidate: Candidate
    replicas: int
    answer: str

    @property
    def gpus(self) -> int:
        return self.replicas * self.candidate.tp

    @property
    def usd_per_hour(self) -> float | None:
        one = self.candidate.usd_per_hour
        return None if one is None else self.replicas * one

    def __str__(self) -> str:
        sure = "" if self.answer == "meets" else f" ({self.answer})"
        return f"{self.replicas:,} x {self.candidate.gpu} tp{self.candidate.tp}{sure}"


@dataclass(frozen=True)
class Saving:
    """A policy compared with `vllm`.

    ours, theirs  the cheapest of the policy and of vllm; None: no number within --most-gpus keeps
                  the objectives
    pool          requests in a batch of the offline loop; 0: none, the peak alone
    """

    policy: str
    ours: Needed | None
    theirs: Needed | None
    pool: int = 0

    @property
    def gpus(self) -> int | None:
        """Return how many GPUs fewer than vllm. None: one of the two keeps no objectives."""
        if self.ours is None or self.theirs is None:
            return None
        return self.theirs.gpus - self.ours.gpus

    @property
    def usd_per_month(self) -> float | None:
        """Return how many dollars less than vllm. None: no price, or as `gpus`."""
        if self.ours is None or self.theirs is None:
            return None
        ours, theirs = self.ours.usd_per_hour, self.theirs.usd_per_hour
        return None if ours is None or theirs is None else HOURS_A_MONTH * (theirs - ours)

    @property
    def saves(self) -> bool:
        """Return whether it costs less: in dollars if both have a price, else in GPUs."""
        less = self.gpus if self.usd_per_month is None else self.usd_per_month
        return less is not None and less > 0

    def __str__(self) -> str:
        """The closing line of a plan."""
        where = f"with {self.pool:,} offline requests" if self.pool else "at the peak"
        if self.ours is None:
            return (
                f"{where}: policy {self.policy} saves nothing against {BASELINE}: within "
                "--most-gpus no number of its replicas keeps the objectives"
            )
        if self.theirs is None:
            return (
                f"{where}: policy {self.policy} keeps the objectives with {self.ours}; {BASELINE} "
                "with no number of replicas within --most-gpus"
            )
        beside = f"{self.ours} instead of {self.theirs}"
        if not self.saves:
            return f"{where}: policy {self.policy} saves nothing against {BASELINE}: {beside}"
        return f"{where}: policy {self.policy} saves {self._less()}, against {BASELINE}: {beside}"

    def _less(self) -> str:
        assert self.gpus is not None  # of a saving
        fewer, usd = self.gpus, self.usd_per_month
        money = "" if usd is None else f"${usd:,.0f} a month"
        if fewer > 0:
            gpus = f"{fewer:,} GPU" + "s" * (fewer != 1)
            return f"{gpus}, {money}" if money else gpus
        return money + (f" (with {-fewer:,} GPUs more)" if fewer else "")

    def told(self) -> dict[str, Any]:
        """Return the content for plan.json."""
        return {
            "policy": self.policy,
            "against": BASELINE,
            "pool": self.pool,
            "gpus": self.gpus,
            "usd_per_month": self.usd_per_month,
            "saves": self.saves,
            "line": str(self),
        }


def savings(policies: Sequence[str], found: Sequence[Needed], pool: int) -> tuple[Saving, ...]:
    """Return each policy's savings; none if vllm is not in `policies`. found: cheapest first."""
    if BASELINE not in policies:
        return ()

    def first(policy: str) -> Needed | None:
        return next((one for one in found if one.candidate.policy == policy), None)

    theirs = first(BASELINE)
    others = [policy for policy in policies if policy != BASELINE]
    return tuple(Saving(label(POLICIES, policy), first(policy), theirs, pool) for policy in others)
