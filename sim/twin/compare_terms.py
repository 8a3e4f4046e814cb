"""Which term of a simulation to look at: the run again with one term changed, and how far it is
from the measurement then. A term is named only where its run came closer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.profiles.specs import ProfileError
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.error_bars import StepsOff, with_steps_off
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.compare import error, table
from twinserve.sim.twin.served import Served, of_run

STEP = 1.2  # by which times and sizes are changed
CLOSER = 0.05  # of its error that a run must lose for its term to be named


@dataclass(frozen=True)
class Term:
    """One change. inputs: those of the run as it is -> those of the run with it."""

    term: str
    change: str
    inputs: Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Rerun:
    """A run with one term changed, and its error (`compare.error`)."""

    term: str
    change: str
    error: float
    before: float

    @property
    def closer(self) -> bool:
        return self.error < self.before * (1 - CLOSER)


def terms(config: SimulationConfig) -> list[Term]:
    """What can be changed of a run with these settings."""

    def setting(term: str, change: str, **changed) -> Term:
        return Term(term, change, lambda inputs: _again(inputs, changed))

    def memory(factor: float, said: str) -> Term:
        return Term(
            "memory",
            said,
            lambda inputs: _again(
                inputs, {"num_blocks": max(1, int(inputs.hardware.num_blocks * factor))}
            ),
        )

    def queue(factor: float, said: str) -> Term:
        return Term(
            "queueing",
            said,
            lambda inputs: _again(
                inputs, {"max_num_seqs": max(1, int(inputs.hardware.limits.max_num_seqs * factor))}
            ),
        )

    found = [
        queue(0.5, "half the seats (max_num_seqs)"),
        queue(2.0, "twice the seats (max_num_seqs)"),
    ]
    if config.fleet is None:
        found += [
            _steps("decodes 20 % longer", STEP, 1.0),
            _steps("decodes 20 % shorter", 1 / STEP, 1.0),
            _steps("prompts 20 % longer", 1.0, STEP),
            _steps("prompts 20 % shorter", 1.0, 1 / STEP),
            memory(1 / STEP, "20 % less KV memory"),
            memory(STEP, "20 % more KV memory"),
        ]
    found.append(
        setting("front end", "without front end", front_end="none")
        if config.front_end != "none"
        else setting("front end", "with that of vllm serve (--front-end vllm)", front_end="vllm")
    )
    found += [
        setting("hit rate", f"prefix caching {'on' if on else 'off'}", prefix_caching=on)
        for on in ((True, False) if config.prefix_caching is None else (not config.prefix_caching,))
    ]
    scheduling = "synchronous" if config.async_scheduling else "asynchronous"
    found.append(
        setting(
            "host time", f"{scheduling} scheduling", async_scheduling=not config.async_scheduling
        )
    )
    return found


def _steps(said: str, decode: float, prefill: float) -> Term:
    return Term(
        "step times", said, lambda inputs: with_steps_off(inputs, StepsOff(said, decode, prefill))
    )


def _again(inputs: Inputs, changed: dict) -> Inputs:
    """The same requests with other settings."""
    settings = inputs.config.model_dump(exclude_unset=True) | changed
    other = resolve(SimulationConfig(**settings))
    return replace(other, workload=inputs.workload)


def config_of(result: RunResult) -> SimulationConfig:
    """The settings of a run, from its run.json. Raises SettingsError."""
    settings = result.config.get("config")
    if not isinstance(settings, dict):
        raise SettingsError("the run has no settings in its run.json: simulate it again")
    return SimulationConfig(**settings)


def rerun(
    result: RunResult,
    measured: Sequence[Served],
    server: bool,
    begin: Callable[[str], None] = lambda what: None,
) -> Iterator[Rerun]:
    """The run again as it is and with each of its terms changed, and each one's error. Terms that
    its settings refuse are passed over. Raises SettingsError, WorkloadError if the run cannot
    be repeated."""
    config = config_of(result)
    inputs = resolve(config)
    (spec, *_) = inputs.policies

    def error_of(changed: Inputs, label: str) -> float:
        begin(label)
        again = run_policy(changed, spec)
        return error(table(measured, [of_run(label, again, server)]), 0)

    before = error(table(measured, [of_run("run", result, server)]), 0)
    for term in terms(config):
        try:
            found = error_of(term.inputs(inputs), term.change)
        except (SettingsError, PolicyError, RegistryError, ProfileError):
            continue  # this run cannot be without it
        yield Rerun(term.term, term.change, found, before)
