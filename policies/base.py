"""The interface of a policy: a small object that keeps its own queues and answers, at each step boundary, what to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from .kv.base import KvLedger
from .plan import StepOutcome, StepPlan
from .requests import Application, RequestTable

# All-reduces' part of a step without transfers -> (transfers' share of the link, delay of an all-reduce in its own lengths).
Sharing = Callable[[float], tuple[float, float]]


class Options(BaseModel):
    """Base of a policy's parameters; unknown names and numbers that are not finite are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NoOptions(Options):
    pass


@dataclass(frozen=True)
class EngineLimits:
    """What the engine that executes the plans can do in one step.

    max_num_seqs            requests that may hold a place in the batch
    max_num_batched_tokens  new tokens a step
    max_model_len           prompt plus output tokens of one request
    kv_bytes_per_token      bytes over all ranks
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    kv_bytes_per_token: int = 131_072


@dataclass(slots=True)
class SystemView:
    """What a policy may look at when it plans.

    now       seconds on the engine's clock
    requests  every request submitted so far
    ready_s   row -> seconds at which a transfer that holds the request lands; rows in flight only
    """

    now: float
    requests: RequestTable
    ready_s: dict[int, float]


class Policy(ABC):
    """Decisions only. The engine calls, in this order at a step boundary: `on_finish` for each row that ended,
    `on_outcome`, `on_arrival` for each new row (`on_application` before the first row of one), then `plan`.

    A policy is built from its options, the engine's limits and an estimator of step times (its own knowledge of the
    hardware, not the simulator's truth). It allocates through the ledger while it plans; everything else it says in
    the plan. Same state, same view, same plan.

    With asynchronous scheduling the plan of the next step is made when a step begins, and RequestTable says what it
    then shows. The engine knows where a request ends, so rows whose last token is being computed need no further step:
    `on_finish` comes for them at once, right before that plan, though their memory returns only with the step's outcome.
    A policy that keeps ending rows, as vLLM does, hears of them with the outcome. Until then they have nothing to
    compute, hold their place and may be preempted; `on_finish` may so come for a row that waits. Outcomes come one plan
    later than without: `on_outcome` after the plan that follows the step's own.
    """

    name: str
    Options: type[Options] = NoOptions
    default_kv = "paged"
    prefix_caching = False  # what the published system does, unless the user says otherwise
    uses_estimator = True  # False: decides without step times, and gets None for an estimator; by options: `estimates`
    uses_prefix_cache = True  # False: never asks the ledger for a prefix hit, so that a prefix cache would do nothing
    prompt_budget: int | None = None  # tokens: longer prompts could never be computed; a run that has one is refused
    prompt_budget_setting = "--max-num-batched-tokens"  # what raises it
    asynchronous = True  # False: cannot plan before the last step's tokens are known, and is refused where it would have to
    counters: Mapping[str, int] = MappingProxyType({})  # steps by how they were decided; run.json shows them
    link_sharing: Sharing | None = None  # how its transfers share PCIe with all-reduces; None: evenly (backends/pcie.py)
    keeps_ending = False  # True: with asynchronous scheduling, `on_finish` comes when the last token is known (see above)

    def __init__(self, limits: EngineLimits, options: Options | None = None, estimator=None) -> None:
        self.limits = limits
        self.options = options or self.Options()
        self.estimator = estimator

    @classmethod
    def estimates(cls, options: Options) -> bool:
        """Whether it decides with step times if it has these options; if not, it gets None for an estimator."""
        return cls.uses_estimator

    @abstractmethod
    def on_arrival(self, row: int, requests: RequestTable) -> None: ...

    def on_application(self, application: Application) -> None:
        """An application arrived, as a whole; its rows follow as its stages begin. Default: rows are all that counts."""

    @abstractmethod
    def on_finish(self, row: int) -> None: ...

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Steps ended; default: nothing to learn."""

    def step_tokens(self, longest: int) -> int:
        """Most new tokens that a step may have where no request has more than `longest`: what a live engine must be able
        to compute at once. Default: the engine's limit, exceeded by at most one whole prompt."""
        return self.limits.max_num_batched_tokens + longest

    @abstractmethod
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan: ...
