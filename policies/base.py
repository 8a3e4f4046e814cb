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

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
        """What the user should know about a default that was chosen for want of something else; a
        line, or nothing."""
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
    """What a policy may look at when it plans.

    now       seconds on the engine's clock
    requests  every request submitted so far
    ready_s   row -> seconds at which a transfer that holds the request lands; rows in flight only
    under_way  int64[n]: rows of the step that runs while the plan is made; none where it is not
               made ahead
    draining  rows that lost their memory while a batch under way computes for them: none may be
              admitted before that has ended (pipeline stages)
    """

    now: float
    requests: RequestTable
    ready_s: dict[int, float]
    under_way: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    draining: Container[int] = ()


class Truth(Protocol):
    """What an engine that knows the future can tell (traces/apps/truth.py)."""

    def application(self, group: int) -> np.ndarray | None:
        """int64[n, 2]: prompt and output tokens of each of its requests."""
        ...

    def output_tokens(self, request_id: str) -> int | None: ...


class RequestPredictor(Protocol):
    """What a policy asks about requests to come. needs_truth: the engine must set `truth` before
    the first request. reads_texts: it looks at input texts of applications (`Application.text`,
    `RequestTable.text`); a server keeps none otherwise."""

    needs_truth: bool = False
    reads_texts: bool = False
    truth: Truth | None = None

    def learn(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        """Requests like those to come, none of which is among them; int64[n] each, before the first
        request. Default: nothing to learn."""
        return None

    def expected_output(
        self, row: int, requests: RequestTable, kind: str | None = None
    ) -> float | None:
        """Return the output tokens expected of a request that has just come, for a server's count
        of how far off that was. kind: of its application. None, the default: nothing is known."""
        return None


@dataclass(frozen=True)
class Traits:
    """What an engine must know of a policy that is not like most; few policies set any.

    keeps_ending  with asynchronous scheduling, `on_finish` comes when the last token is known (see
                  `Policy`)
    pipelined     it can plan while batches under way compute for its rows, as pipeline stages ask.
                  Such a row may have nothing left to compute; one that is `SystemView.draining`
                  waits; no KV moves
    loads_kv      other engines write KV into its blocks, without regard to its steps. With
                  asynchronous scheduling, memory of a row that the step under way computes is then
                  free when that has ended
    blank_blocks_first  False: in its engine, blocks without reusable text wait their turn among the
                  cached prefixes (`KvLedger.reuse_in_order`)
    orders_applications  it accounts for each application as a whole, with what this engine sees of
                  it. Such requests must stay together, or be stamped with an order of the whole
                  fleet (`OrdersFleet`)
    prompt_limit  tokens, and the setting that raises them: longer prompts could never be computed,
                  and a run that has one is refused
    link_sharing  how its transfers share PCIe with all-reduces; None: evenly (backends/links.py)
    no_drafts     why it cannot plan with drafts: what follows its name in an error. Empty: it can,
                  where its limits are `DraftingLimits`
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
    """Decisions only. The engine calls, in this order at a step boundary: `on_finish` for each row
    that ended, `on_outcome`, `on_arrival` for each new row (`on_application` before the first row
    of one), `on_withdraw` for each row that was withdrawn, then `plan`.

    A policy is built from its options, the engine's limits and an estimator of step times (its own
    knowledge of the hardware, not the simulator's truth). It allocates through the ledger while it
    plans; everything else it says in the plan. Same state, same view, same plan.

    With asynchronous scheduling the plan of the next step is made when a step begins, and
    RequestTable says what it then shows. The engine knows where a request ends, so rows whose last
    token is being computed need no further step: `on_finish` comes for them at once, right before
    that plan, though their memory returns only with the step's outcome. A policy that keeps ending
    rows, as vLLM does, hears of them with the outcome. Until then they have nothing to compute,
    hold their place and may be preempted; `on_finish` may so come for a row that waits. Outcomes
    come one plan later than without: `on_outcome` after the plan that follows the step's own.
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
        """The state of a new policy; its limits, options and estimator are set. Raises PolicyError
        where it cannot serve them."""

    @classmethod
    def estimates(cls, options: PolicyOptions) -> bool:
        """Whether it decides with step times if it has these options; if not, it gets None for an
        estimator."""
        return cls.uses_estimator

    def prepare(self, kinds: Iterable[str]) -> None:
        """The run is about to begin, and has applications of these classes: learn what there is to
        learn now, and not in a decision. Raises PolicyError. Default: nothing to learn."""

    @abstractmethod
    def on_arrival(self, row: int, requests: RequestTable) -> None: ...

    def on_application(self, application: Application) -> None:
        """An application arrived, as a whole; its rows follow as its stages begin. Default: rows
        are all that counts."""

    def on_application_end(self, group: int) -> None:
        """No request of `group` will come any more: what is kept for it can be forgotten once none
        of its rows is here. Default: nothing is kept."""
        return None

    @abstractmethod
    def on_finish(self, row: int) -> None: ...

    def on_withdraw(self, row: int) -> None:
        """The request ended before its last token: its client left, or gave up. Forget
        the row wherever it is (it may wait, run, be swapped out, or have a transfer under way), and
        never plan it again. How long it would have been is not known: there is nothing to learn.
        Its memory returns without the policy.

        No default: where withdrawals can happen a policy without this method is refused
        (`withdraws`), since it would plan rows that are no more.
        """
        raise PolicyError(f"policy {self.name!r} has no on_withdraw: it cannot forget a request")

    @property
    def unsettled(self) -> bool:
        """Whether its next plan does something though no request may be left."""
        return False

    @classmethod
    def withdraws(cls) -> bool:
        """Whether requests can be withdrawn from it."""
        return cls.on_withdraw is not Policy.on_withdraw

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Steps ended; default: nothing to learn. Rows withdrawn in the meantime are not in it."""

    def step_tokens(self, longest: int) -> int:
        """Most new tokens that a step may have where no request has more than `longest`: what a
        live engine must be able to compute at once. Default: the engine's limit, exceeded by at
        most one whole prompt."""
        return self.limits.max_num_batched_tokens + longest

    @abstractmethod
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan: ...
