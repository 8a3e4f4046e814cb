"""The interface of a policy: a small object that keeps its own queues and answers, at each step
boundary, what to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import Application, RequestTable

if TYPE_CHECKING:
    from twinserve.policies.parts.estimators import BatchEstimator
    from twinserve.profiles.composition import StepTimeModel
    from twinserve.profiles.profile import Profile

# All-reduces' part of a step without transfers -> (transfers' share of the link, delay of an
# all-reduce in its own lengths).
Sharing = Callable[[float], tuple[float, float]]


class Options(BaseModel):
    """Base of a policy's parameters; unknown names and numbers that are not finite are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @property
    def wants_sample(self) -> bool:
        """Whether a policy with these options learns from earlier requests before it begins
        (`RequestPredictor.learn`)."""
        return False

    @property
    def serves_best_effort(self) -> bool:
        """Whether a policy with these options takes requests of that class."""
        return True

    @property
    def notice(self) -> str:
        """Return a line about a default that was chosen because something is missing, or None."""
        return ""


class NoOptions(Options):
    pass


PolicyOptions = TypeVar("PolicyOptions", bound=Options)


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


_NO_ROWS = np.zeros(0, np.int64)


@dataclass(slots=True)
class SystemView:
    """What a policy sees when it plans.

    now       seconds on the engine's clock
    requests  every request submitted so far
    ready_s   row -> seconds at which the transfer that holds the row lands; only rows in transfer
    under_way  int64[n]: rows of the step that runs during planning; empty without asynchronous
               scheduling
    draining  rows that lost their memory while a batch under way computes for them. None may be
              admitted before that batch has ended (pipeline stages)
    """

    now: float
    requests: RequestTable
    ready_s: dict[int, float]
    under_way: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    draining: Container[int] = ()


class Truth(Protocol):
    """Answers of an engine that knows the future (traces/apps/truth.py)."""

    def application(self, group: int) -> np.ndarray | None:
        """Return int64[n, 2]: prompt and output tokens of each request of the application."""
        ...

    def output_tokens(self, request_id: str) -> int | None: ...


class RequestPredictor(Protocol):
    """Predicts requests that have not come yet."""

    needs_truth: bool = False
    reads_texts: bool = False
    truth: Truth | None = None

    def learn(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        """Learn from earlier requests, given before the first request of the run (int64[n] each).
        None of them is in the run. Default: nothing to learn."""
        return None

    def expected_output(
        self, row: int, requests: RequestTable, kind: str | None = None
    ) -> float | None:
        """Return the expected output tokens of a request that has just arrived. A server counts the
        prediction's error with it. kind: class of its application. None, the default: unknown."""
        return None


@dataclass(frozen=True)
class Traits:
    """Special needs of a policy that an engine must know. Few policies set any.

    keeps_ending  with asynchronous scheduling, `on_finish` comes only when the last token is known
                  (see `Policy`)
    pipelined     the policy can plan while batches under way compute for its rows, as pipeline
                  stages need. Such a row may have nothing left to compute. One that is
                  `SystemView.draining` waits. No KV moves
    loads_kv      other engines write KV into its blocks at any time. With asynchronous scheduling,
                  memory of a row of the step under way is then free only after that step
    blank_blocks_first  False: its engine reuses blocks without reusable text in turn with cached
                  prefixes (`KvLedger.reuse_in_order`)
    orders_applications  the policy accounts for each application as a whole, by what this engine
                  sees. Its requests must stay on one engine, or carry the stamp of an order of the
                  fleet (`OrdersFleet`)
    prompt_limit  most prompt tokens, and the setting that raises them. A run with a longer prompt
                  is refused, since the prompt could never be computed
    link_sharing  how its transfers share PCIe with all-reduces; None: evenly (backends/links.py)
    no_drafts     why it cannot plan with drafts: the rest of an error after the policy's name.
                  Empty: it can, if its limits are `DraftingLimits`
    """

    keeps_ending: bool = False
    pipelined: bool = False
    loads_kv: bool = False
    blank_blocks_first: bool = True
    orders_applications: bool = False
    prompt_limit: tuple[int, str] | None = None
    link_sharing: Sharing | None = None
    no_drafts: str = "does not say how it plans with drafts (Traits.no_drafts)"


class Policy(ABC, Generic[PolicyOptions]):
    """Decides what each step computes, and nothing else.

    The engine calls, in this order at a step boundary: `on_finish` for each row that ended;
    `on_outcome`; `on_arrival` for each new row; `on_withdraw` for each withdrawn row, then `plan`.
    `on_application` comes before the first row of an application.

    A policy is built from its options, the engine's limits and an estimator of step times. The
    estimator is the policy's own knowledge, not the simulator's truth. The policy allocates memory
    through the ledger while it plans, and puts everything else into the plan. The same state and
    view must give the same plan.

    With asynchronous scheduling the next step is planned when a step begins; RequestTable says what
    it shows then. The engine knows when a request ends, so a row whose last token is being computed
    needs no further step. `on_finish` comes for it right before that plan, and its memory returns
    with the step's outcome. A policy with `keeps_ending`, as vLLM's, hears of the end with the
    outcome. Until then the row has nothing to compute, holds its place and may be preempted, so
    `on_finish` may come for a row that waits. `on_outcome` comes one plan later than in synchronous
    scheduling.
    """

    name: str
    # of a `Policy[MyOptions]`: MyOptions
    Options: type[PolicyOptions] = NoOptions  # type: ignore[assignment]
    default_kv = "paged"
    prefix_caching = False  # what the published system does, unless the user says otherwise
    # False: decides without step times, and gets None for an estimator; by options: `estimates`
    uses_estimator = True
    # False: never asks the ledger for a prefix hit, so that a prefix cache would do nothing
    uses_prefix_cache = True
    # False: cannot plan before the last step's tokens are known, and is refused where it would have
    # to
    asynchronous = True
    # steps by how they were decided; run.json shows them
    counters: Mapping[str, int] = MappingProxyType({})
    # fits the form of its own paper to a profile and the times of its steps; None: it has none
    fit_estimator: ClassVar[staticmethod[[Profile, StepTimeModel], BatchEstimator] | None] = None
    predictor: RequestPredictor | None = None  # of what requests will need; None: not asked
    traits = Traits()  # `setup` may replace it, where options decide

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if strays := sorted(Traits.__dataclass_fields__.keys() & vars(cls).keys()):
            raise TypeError(f"{cls.__name__}.{strays[0]}: write traits = Traits({strays[0]}=...)")

    def __init__(
        self,
        limits: EngineLimits,
        options: PolicyOptions | None = None,
        estimator: BatchEstimator | None = None,
    ) -> None:
        self.limits = limits
        self.options: PolicyOptions = options or self.Options()
        self.estimator = estimator
        self.setup()

    def setup(self) -> None:
        """Create the state of a new policy. Limits, options and estimator are already set. Raises
        PolicyError if the policy cannot work with them."""

    @classmethod
    def estimates(cls, options: PolicyOptions) -> bool:
        """Return whether the policy uses step times with these options. If not, its estimator is
        None."""
        return cls.uses_estimator

    def prepare(self, kinds: Iterable[str]) -> None:
        """Learn before the run begins, so that no decision has to. The run has applications of
        these classes. Raises PolicyError. Default: nothing to learn."""

    @abstractmethod
    def on_arrival(self, row: int, requests: RequestTable) -> None: ...

    def on_application(self, application: Application) -> None:
        """An application arrived. Its rows follow as its stages begin. Default: only rows count."""

    def on_application_end(self, group: int) -> None:
        """No further request of `group` will arrive. The policy may forget the application once
        none of its rows is left. Default: nothing is kept."""
        return None

    @abstractmethod
    def on_finish(self, row: int) -> None: ...

    def on_withdraw(self, row: int) -> None:
        """The request ended before its last token, because its client left or gave up. Forget the
        row, whatever its state (waiting, running, swapped out, in transfer), and never plan it
        again. Its full length stays unknown, so there is nothing to learn. The engine returns its
        memory.

        No default: where withdrawals can happen a policy without this method is refused
        (`withdraws`), since it would plan rows that are no more.
        """
        raise PolicyError(
            f"policy {self.name!r} has no on_withdraw: it cannot remove a cancelled request"
        )

    @property
    def unsettled(self) -> bool:
        """Return whether the next plan does something although no request is left."""
        return False

    @classmethod
    def withdraws(cls) -> bool:
        """Return whether this policy lets clients withdraw requests."""
        return cls.on_withdraw is not Policy.on_withdraw

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Steps have ended. The outcome leaves out rows withdrawn in the meantime. Default: nothing
        to learn."""

    def step_tokens(self, longest: int) -> int:
        """Return the most new tokens that a step may have if no request has more than `longest`. A
        live engine must be able to compute so many at once. Default: the engine's limit plus at
        most one whole prompt."""
        return self.limits.max_num_batched_tokens + longest

    @abstractmethod
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan: ...
