"""One run of a study: settings in, a plain row out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import State
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import PRESETS, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, run_policy, run_simulation
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge, set_priority
from twinserve.traces.workload import REAL_TIME, Workload

# settings of a run that `simulate` has not
OWN = ("preset", "beside", "until_online")


def run(settings: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of one run.

    settings  those of `simulate` (`SimulationConfig`), with one policy, and these:
              preset        name of settings that the others stand over
              beside        offline questions on documents on top: `documents` (a data set of
                            `longdoc`), `requests`, and if wanted `block_tokens` and `priority`
              until_online  end with the online requests; looked after every so many seconds
    columns   name -> what it is, see `column`
    """
    inputs, slice_s = inputs_of(settings), settings.get("until_online")
    (spec,) = inputs.policies
    result = (
        run_policy(inputs, spec)
        if slice_s is None
        else run_simulation(WhileOnline(inputs, spec, slice_s))
    )
    return {name: column(result, text) for name, text in columns.items()}


def inputs_of(settings: Mapping[str, Any]) -> Inputs:
    """What a run of these settings is made of. Raises SettingsError, WorkloadError, ProfileError,
    PolicyError."""
    given = {name: value for name, value in settings.items() if name not in OWN}
    given = {**PRESETS.get(settings.get("preset"), {}), **given, "policy": (given["policy"],)}
    inputs = resolve(SimulationConfig(**given))
    if (beside := settings.get("beside")) is not None:
        documents = _documents(seed=given["seed"], **beside)
        inputs = replace(inputs, workload=merge(inputs.workload, documents))
    return inputs


def _documents(
    seed: int, documents: str, requests: int, priority: int = 0, **more: Any
) -> Workload:
    found = longdoc(documents, requests=requests, seed=seed, **more)
    return set_priority(found, priority) if priority else found


# -- a run that lasts as long as its online requests -----------------------------------------------
class WhileOnline(Simulation):
    """Ends when the online requests have: what offline work is left then is not waited for.

    slice_s  it is looked after every so many seconds whether they have
    first_s  when it is looked first, seconds of the run; by default after one slice
    watch    called with the run after each slice
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        slice_s: float = 5.0,
        first_s: float | None = None,
        watch: Callable[[Simulation], None] = lambda run: None,
    ) -> None:
        super().__init__(inputs, spec)
        self._slice_s, self._first_s = slice_s, slice_s if first_s is None else first_s
        self._watch = watch
        self._online = int((inputs.workload.service_class == REAL_TIME).sum())

    def _advance(self) -> None:
        until = self._first_s
        while self._online_left():
            if self.clock.peek() == np.inf:
                self.clock.run()  # nothing more will happen: says which process waits for what
                return
            self.clock.run(until)
            self._watch(self)
            until += self._slice_s

    def _online_left(self) -> bool:
        ended = 0
        for engine in self.engines:
            requests = engine.core.requests
            finished = requests.state == int(State.FINISHED)
            ended += int(np.count_nonzero(finished & (requests.service_class == REAL_TIME)))
        return ended < self._online


# -- columns ---------------------------------------------------------------------------------------
def column(result: RunResult, text: str) -> float:
    """A number of a run.

    text  dotted name in the summary (docs/metrics.md), a sum of such names (`A + B`), one of them
          over a number (`A / 1000`) or over another one (`A / B`), whether one is a word (`A ==
          saturated`, 1 or 0), or a name of `OF_ROWS`; nan if the summary has none, or 0 on request
          (`A or 0`)
    """
    if text in OF_ROWS:
        return OF_ROWS[text](result)
    if " == " in text:
        name, _, word = text.partition(" == ")
        return float(_value(result.summary, name) == word)
    if text.endswith(" or 0"):
        found = _value(result.summary, text.removesuffix(" or 0"))
        return 0.0 if found != found else found
    over, _, by = text.partition(" / ")
    found = sum(_value(result.summary, name) for name in over.split(" + "))
    if not by:
        return found
    return found / (float(by) if by[0].isdigit() else _value(result.summary, by))


def _value(summary: Mapping[str, Any], name: str) -> Any:
    found: Any = summary
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return float("nan") if found is None else found


def online_span_s(result: RunResult) -> float:
    """Seconds from the first arrival of an online request to the last."""
    requests = result.rows.requests
    return float(np.ptp(requests.arrival_s[requests.service_class == "rt"]))


def offline_left(result: RunResult) -> int:
    """Offline requests that had not ended with the run."""
    requests = result.rows.requests
    offline = requests.service_class == "be"
    return int((offline & ~(requests.last_token_s.notna() & requests.finished)).sum())


def busiest(result: RunResult) -> float:
    """Prompt tokens of the replica that got most of them, over the mean."""
    requests = result.rows.requests
    sent = requests[requests.replica >= 0].groupby("replica").prompt_tokens.sum()
    return float(sent.max() * len(result.summary["replicas"]) / sent.sum())


def decision_ms(result: RunResult) -> float:
    """Wall-clock time of a decision on this machine, which differs from run to run."""
    return result.timing["decision_mean_s"] * 1e3


def decision_share(result: RunResult) -> float:
    """`decision_ms` over a decision and a simulated step."""
    decision = decision_ms(result)
    return decision / (decision + result.summary["scheduler"]["mean_step_ms"])


OF_ROWS: Mapping[str, Callable[[RunResult], float]] = {
    "online_span_s": online_span_s,
    "offline_left": offline_left,
    "busiest": busiest,
    "decision_ms": decision_ms,
    "decision_share": decision_share,
}
