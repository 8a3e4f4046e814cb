"""The question of a plan, from a command or a call."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from twinserve.sim.fleet.recovery import Action
from twinserve.sim.plan.apart import check_apart
from twinserve.sim.plan.candidates import GPUS, TP, check_list
from twinserve.sim.plan.peaks import Trouble
from twinserve.sim.setup.config import DEFAULT_ROUTER, SettingsError

PEAK_S, LEAD_S = 300.0, 30.0
MOST_GPUS = 512
_MOST_DRAWS = 100
_MOST_SURVIVED = 100


@dataclass(frozen=True)
class Question:
    """What to plan for.

    traces    recorded ones; the plan holds on the peak of each
    rate      requests/s of generated ones; None: as simulate has it
    settings  of a SimulationConfig: for engines limits, memory, scheduling; and how traces are read
    grow      factor on the rate of the recordings
    draws     of the peak: as recorded, and with lengths dealt anew
    priced    by this table; if it lacks one of the GPUs, candidates rank by GPUs
    pool      offline requests in a batch of the closed loop of step 2; 0: no step 2
    survive   replicas that fail as the peak begins; on_failure, detection_s: the fate of their
              requests, and when the router learns of it
    all_sizes no candidate is given up because another one of its policy is cheaper
    prefill_decode  for each row, prefill apart from decode is tried too
    prices    the file of prices that was given; for the record
    """

    model: str
    traces: tuple[str, ...]
    slo: str
    gpus: tuple[str, ...] = GPUS
    tp: tuple[int, ...] = TP
    policies: tuple[str, ...] = ("vllm",)
    routers: tuple[str, ...] = (DEFAULT_ROUTER,)
    settings: dict = field(default_factory=dict)
    grow: float = 1.0
    rate: float | None = None
    peak_s: float = PEAK_S
    lead_s: float = LEAD_S
    draws: int = 1
    most_gpus: int = MOST_GPUS
    all_sizes: bool = False
    pool: int = 0
    survive: int = 0
    on_failure: str = "error"
    detection_s: float = 0.0
    prefill_decode: bool = False
    prices: str | None = None

    @property
    def trouble(self) -> Trouble | None:
        return Trouble(self.survive, self.on_failure, self.detection_s) if self.survive else None


# of a question that commands and calls name otherwise, and what of `simulate` they take
_CALLED = {
    **{"traces": "trace", "policies": "policy", "routers": "router", "draws": "seeds"},
    **{"peak_s": "peak", "lead_s": "lead", "detection_s": "detection"},
}
SETTINGS = (
    *("format", "columns", "step_times", "front_end", "kv_cache_dtype", "gpu_memory_utilization"),
    *("engine_version", "enforce_eager", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "async_scheduling"),
)


def question_of(
    given: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Question, tuple[str, ...]]:
    """Return the question of a command or a call, and lines about the server of `from_vllm`.

    given     its arguments by name; None gives the default
    settings  of SETTINGS, those that are given

    Raises SettingsError without a model, ServeLineError.
    """
    model, known = given["model"], dict(settings)
    lines: tuple[str, ...] = ()
    if given["from_vllm"] is not None:
        from twinserve.sim.serve_line.settings import stated  # for those that give one

        model, known, lines = stated(given["from_vllm"], model, known)
    if model is None:
        raise SettingsError("no model; give --model, or a server's command line with --from-vllm")
    named = {one.name: given.get(_CALLED.get(one.name, one.name)) for one in fields(Question)}
    named |= {"model": model, "settings": known}
    named = {n: tuple(v) if isinstance(v, list) else v for n, v in named.items() if v is not None}
    return Question(**named), lines  # type: ignore[arg-type]


def check_question(question: Question) -> None:
    """Raises SettingsError for a number out of range, or a flag that needs another one."""
    check_list("trace", list(question.traces))
    rate = 1.0 if question.rate is None else question.rate
    for flag, value in (("grow", question.grow), ("peak", question.peak_s), ("rate", rate)):
        if not 0 < value < 1e6:
            raise SettingsError(f"--{flag} {value:g}: give a number above 0, below 1e6")
    if not 0 <= question.lead_s < 1e6:
        raise SettingsError(f"--lead {question.lead_s:g}: give seconds, 0 or more")
    if not 1 <= question.draws <= _MOST_DRAWS:
        raise SettingsError(f"--seeds {question.draws}: give 1 to {_MOST_DRAWS}")
    if not 0 <= question.pool <= 1_000_000:
        raise SettingsError(f"--pool {question.pool}: give 0 to 1,000,000")
    if not 0 <= question.survive <= _MOST_SURVIVED:
        raise SettingsError(f"--survive {question.survive}: give 0 to {_MOST_SURVIVED}")
    if not question.survive and (question.on_failure != "error" or question.detection_s):
        flag = "--detection" if question.detection_s else "--on-failure"
        raise SettingsError(f"{flag}: nothing fails; give --survive 1")
    if question.on_failure not in list(Action):
        raise SettingsError(
            f"--on-failure {question.on_failure}: is unknown; give {', '.join(Action)}"
        )
    if not 0 <= question.detection_s < 1e6:
        raise SettingsError(f"--detection {question.detection_s:g}: give seconds, 0 or more")
    if question.prefill_decode:
        check_apart(question.policies, question.survive)
    if question.most_gpus < 1:
        raise SettingsError(f"--most-gpus {question.most_gpus}: give a number above 0")
