"""Simulation compared with vLLM's own engine loop on an emulated GPU in virtual time: one workload,
step by step. Both price steps alike, so a difference is one of decisions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import PolicySpec
from twinserve.sim.results.decisions import DecisionLog, LoggedStep, parse_log
from twinserve.sim.results.files import RunResult, dump_json, write_run
from twinserve.sim.results.folders import check_folder, folders, resolved, whole_folder
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Report, Simulation, run_simulation
from twinserve.sim.twin.emulated import EmulatedRun, emulated_engine
from twinserve.sim.twin.emulated_server import EmulatedServer, check_served, serve_emulated

MARKER = "emulated.json"
METRICS = ("ttft", "tpot", "itl", "e2el")  # of summary.json, their means in ms
AIM_PCT = 0.5


@dataclass(frozen=True)
class EmulatedComparison:
    """One policy. parted: vLLM's first different decision, in one line; empty: none. steps:
    simulated and emulated. drift: steps in which vLLM's scheduler did not follow our policy's plan,
    if one of ours schedules. served: the same before a real server, in wall time; arrived:
    simulated as requests came to its engine; fronted: what its clients see, with the front end if
    there is one."""

    spec: PolicySpec
    simulated: RunResult
    emulated: RunResult
    parted: str
    steps: tuple[int, int]
    drift: int
    served: EmulatedServer | None = None
    arrived: RunResult | None = None
    fronted: RunResult | None = None

    @property
    def _runs(self) -> tuple[RunResult, RunResult]:
        return self.arrived or self.simulated, self.fronted or self.simulated

    def errors(self) -> dict[str, float]:
        """Of the simulated means, in percent, by metric."""
        found = {}
        for metric in METRICS:
            ours, theirs = (
                result.summary.get(f"mean_{metric}_ms")
                for result in (self.simulated, self.emulated)
            )
            if ours is not None and theirs:
                found[metric] = 100 * (ours / theirs - 1)
        return found

    @property
    def fault(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        if self.parted:
            return self.parted
        if self.drift:
            return f"vLLM's scheduler did not do what was planned in {self.drift:,} steps"
        far = {name: error for name, error in self.errors().items() if abs(error) > AIM_PCT}
        return ", ".join(f"mean {name} is {error:+.2f} % off" for name, error in far.items())

    def summary(self) -> dict:
        """As plain values."""
        return {
            "policy": self.spec.label,
            "steps": {"simulated": self.steps[0], "emulated": self.steps[1]},
            "parted": self.parted,
            "drift": self.drift,
            "error_pct": self.errors(),
            "summary": {"simulated": self.simulated.summary, "emulated": self.emulated.summary},
            "served": None if self.served is None else self.served.summary(*self._runs),
        }

    def lines(self) -> list[tuple[str, str]]:
        """As names and values, for the terminal."""
        ours, theirs = self.steps
        same = self.parted or "the same: grants, hits, preemptions, free blocks, times"
        found = [("steps", f"{ours:,} / {theirs:,}"), ("decisions", same)]
        if self.drift:
            found.append(("drift", f"{self.drift:,} steps"))
        for metric, error in self.errors().items():
            values = [r.summary[f"mean_{metric}_ms"] for r in (self.simulated, self.emulated)]
            found.append(
                (f"mean {metric}", f"{values[0]:.6g} / {values[1]:.6g} ms  {error:+.2f} %")
            )
        return found + (self.served.lines(*self._runs) if self.served else [])


def compare_emulated(
    inputs: Inputs, spec: PolicySpec, report: Report | None = None, served: bool = False
) -> EmulatedComparison:
    """Simulate `spec`, then let vLLM run the same workload in virtual time. served: and as a server
    in wall time. Raises LiveEngineError and SettingsError, one line each."""
    fronted = None
    if served:
        check_served(inputs)
        if inputs.front_end is not None:
            fronted = run_simulation(Simulation(inputs, spec, report))
            bare = inputs.config.model_copy(update={"front_end": "none"})
            inputs = replace(inputs, config=bare)
    simulated = run_simulation(Simulation(inputs, spec, report, decisions=True))
    with emulated_engine(inputs, spec) as engine:
        real = run_simulation(EmulatedRun(inputs, spec, engine, report))
        drift = getattr(engine.scheduler, "drift", 0)
    ours, theirs = parse_log(simulated.decisions), parse_log(real.decisions)
    steps = len(ours.steps), len(theirs.steps)
    server = arrived = None
    if served:
        server = serve_emulated(inputs, spec)
        came = replace(inputs, workload=server.arrived(inputs.workload))
        arrived = run_simulation(Simulation(came, spec, report))
    differs = parted(ours, theirs)
    return EmulatedComparison(
        spec, simulated, real, differs, steps, drift, server, arrived, fronted
    )


def compare_each(
    inputs: Inputs, begin: Callable[[str], None], report: Report | None = None, served: bool = False
) -> Iterator[EmulatedComparison]:
    """Every policy of `inputs`; begin(label) is called before each."""
    for spec in inputs.policies:
        begin(spec.label)
        yield compare_emulated(inputs, spec, report, served)


def write_emulated(
    out: Path, found: list[EmulatedComparison], inputs: Inputs, version: str, overwrite: bool
) -> None:
    """Write everything, or nothing: numbers, and the rows and steps of the runs of each policy."""
    out = resolved(out)
    check_folder(out, overwrite, MARKER)
    names = folders(one.spec.label for one in found)
    with whole_folder(out) as partial:
        document = {
            "vllm": version,
            "config": inputs.config.model_dump(mode="json"),
            "profile": inputs.hardware.profile.model_dump(mode="json"),
            "policies": [one.summary() for one in found],
        }
        (partial / MARKER).write_text(dump_json(document, MARKER), encoding="utf-8")
        for one in found:
            folder = partial / names[one.spec.label]
            write_run(folder / "simulated", one.simulated)
            write_run(folder / "emulated", one.emulated)
            if one.served is not None:
                one.served.table().to_csv(folder / "served.csv", index=False)


def parted(ours: DecisionLog, theirs: DecisionLog) -> str:
    """Where the second log first differs from the first, in one line; empty: nowhere. The order of
    a batch does not count: vLLM names those first that ran before."""
    for number, (a, b) in enumerate(zip(ours.steps, theirs.steps, strict=False)):
        if found := _difference(ours, a, b):
            return f"step {number:,} at {a.start_s:.6f} s: {found}"
    if len(ours.steps) != len(theirs.steps):
        return f"{len(ours.steps):,} steps were simulated, and vLLM made {len(theirs.steps):,}"
    return ""


def _difference(log: DecisionLog, a: LoggedStep, b: LoggedStep) -> str:
    for row in {**a.grants, **b.grants}:
        if a.grants.get(row) != b.grants.get(row):
            name, (x, y) = log.requests[row].id, (a.grants.get(row, 0), b.grants.get(row, 0))
            return f"{name} computes {x:,} tokens in the simulation, {y:,} under vLLM"
    for what in ("admitted", "preempted", "withdrawn", "free_blocks", "start_s", "seconds"):
        x, y = getattr(a, what), getattr(b, what)
        if x != y:
            return f"{what.replace('_', ' ')} {x} in the simulation, {y} under vLLM"
    return ""


def refuse(found: list[EmulatedComparison]) -> None:
    """Raises LiveEngineError, one line, where vLLM did something else than was simulated."""
    faults = [f"{one.spec.label}: {one.fault}" for one in found if one.fault]
    if faults:
        raise LiveEngineError(
            f"{len(faults)} of {len(found)} policies part from vLLM: {'; '.join(faults)}"
        )
