"""Stage `free` of a campaign: free runs compared with simulations of the same requests. Needs
neither GPU nor vLLM, and of each run only cell.json and summary.json.

A free run is in wall time, and contains our own loop between two steps. Stage `traffic` measures
that loop, stage `steps` does not. If `traffic` did not run, one free run of policy `vllm` sets what
a step takes longer than in the profile. The other runs show whether that is all."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twinserve.errors import worded
from twinserve.experiments.campaign.report import REPORT, table
from twinserve.experiments.campaign.runs import RUNS, Cell, inputs_of
from twinserve.experiments.campaign.setup import MODEL_SIZES, StageError, Store, mode_name
from twinserve.experiments.campaign.steps import PROFILES
from twinserve.profiles.profile import Profile, load_profile, save_profile
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.validate import with_loop_time
from twinserve.traces.write import write_atomically

METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
_RT = "real-time TTFT"
_LONGEST_LOOP_S = 0.02


def compare_free(store: Store, key: str, graphs: bool, traces: dict[str, Path]) -> None:
    """Write errors of the simulated means to DIR/report/free.md, one row a free run, one column a
    profile. Profiles are the shipped ones, the measured one, and this one with the time that a run
    sets. Raises StageError if there is no free run."""
    runs = _runs(store, mode_name(key, graphs), traces)
    if not runs:
        raise StageError(f"{store.folder} has no free run of this model; run stage validate")
    columns = {name: load_profile(name) for name in MODEL_SIZES[key].shipped}
    named = (PROFILES, f"{mode_name(key, graphs)}.json"), ("profile.json",)
    files = [store.folder.joinpath(*names) for names in named]
    if file := next((path for path in files if path.exists()), None):
        measured = columns["measured"] = load_profile(file)
        first = next((run for run in runs if run.cell.policy == "vllm"), None)
        timed = measured.step_model.form == "measured" and measured.step_model.host
        if first and timed and not measured.loop_s and (loop_s := _loop_s(key, first, measured)):
            name = f"measured, and {1e3 * loop_s:.2f} ms a step ({first.name})"
            columns[name] = with_loop(measured, loop_s)
    found = {
        run.name: [run.simulated(key, profile) for profile in columns.values()] for run in runs
    }
    rows = [(run.name, *(_errors(one, run.means) for one in found[run.name])) for run in runs]
    page = (
        "Free runs, error of the simulated mean TTFT, TPOT and E2E in per cent:\n\n"
        f"{table(('run', *columns), rows)}\n"
        "Mean TTFT of real-time requests, as a share of that under `vllm`:\n\n"
        f"{table(('run', 'live', *columns), _shares(runs, found))}"
    )
    write_atomically(store.path(REPORT, "free.md"), page.encode())
    store.say(page)


@dataclass(frozen=True)
class _Run:
    """Free runs of one cell. known: its cell.json; means: of their summaries, in milliseconds."""

    name: str
    cell: Cell
    trace: Path
    known: dict
    means: dict[str, float]

    @property
    def load(self) -> tuple[str, float]:
        return self.cell.trace, self.cell.load

    def simulated(self, key: str, profile: Profile) -> dict:
        """The summary of the same requests on `profile`, with its loop's time if it knows that."""
        chosen = self.known["rate_scale"], self.known["requests"]
        with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
            path = Path(scratch) / "profile.json"
            save_profile(profile, path)
            inputs = with_loop_time(inputs_of(key, self.cell, self.trace, str(path), *chosen))
        return run_policy(inputs, inputs.policies[0]).summary


def _runs(store: Store, mode: str, traces: dict[str, Path]) -> list[_Run]:
    """Every free run of `mode`, those at 80 % first. A campaign that is kept for its numbers alone
    is of one mode, and has its cells at the top. What cannot be compared is named, and left out."""
    top = store.folder / RUNS / mode if (store.folder / RUNS).exists() else store.folder
    found = []
    for folder in sorted(path.parent for path in top.glob("*/cell.json")):
        try:
            found.append(_run(store, folder, traces))
        except StageError as error:
            store.say(f"{folder.name}: left out: {error}")
    return sorted((run for run in found if run), key=lambda run: (run.cell.load != 0.8, run.name))


def _run(store: Store, folder: Path, traces: dict[str, Path]) -> _Run | None:
    """None without a free run. Raises StageError for one that cannot be compared."""
    names = folder.relative_to(store.folder).parts
    known = store.read(*names, "cell.json")
    summaries = [
        store.read(*names, path.parent.name, path.name)
        for path in sorted(folder.glob("live-*/summary.json"))
    ]
    if not summaries:
        return None
    try:
        cell = Cell(*(known[name] for name in ("trace", "load", "policy", "seconds")))
        means = {name: float(np.mean([s[name] for s in summaries])) for name in METRICS}
        means[_RT] = float(np.mean([_real_time_ttft(s) for s in summaries]))
    except (KeyError, TypeError) as error:  # TypeError: null, or no JSON
        raise StageError(f"cell.json or a summary.json is not whole ({worded(error)})") from error
    if cell.trace not in traces:
        raise StageError(f"--traces has no trace {cell.trace}")
    return _Run(folder.name, cell, traces[cell.trace], known, means)


def _errors(simulated: dict, means: dict) -> str:
    return " / ".join(f"{100 * (simulated[name] / means[name] - 1):+.1f}" for name in METRICS)


def _real_time_ttft(summary: dict) -> float:
    return summary["classes"]["rt"]["mean_ttft_ms"]


def _shares(runs: list[_Run], found: dict[str, list[dict]]) -> Iterator[tuple[str, ...]]:
    """One row for each run that has another policy than `vllm`, if `vllm` ran at that load."""
    plain = {run.load: run for run in runs if run.cell.policy == "vllm"}
    for run in runs:
        if run.cell.policy != "vllm" and (other := plain.get(run.load)):
            pairs = zip(found[run.name], found[other.name], strict=True)
            shares = [_real_time_ttft(a) / _real_time_ttft(b) for a, b in pairs]
            shares.insert(0, run.means[_RT] / other.means[_RT])
            yield run.name, *(f"{share:.2f}" for share in shares)


def _loop_s(key: str, run: _Run, measured: Profile) -> float:
    """Seconds between two steps that make the simulated mean TPOT of `run` the live one; 0 if it
    is not shorter without. Raises StageError if it takes more than _LONGEST_LOOP_S."""
    from scipy.optimize import brentq

    def short(loop_s: float) -> float:
        simulated = run.simulated(key, with_loop(measured, loop_s))
        return simulated["mean_tpot_ms"] / run.means["mean_tpot_ms"] - 1

    if short(0.0) >= 0:
        return 0.0
    if short(_LONGEST_LOOP_S) < 0:
        raise StageError(f"{run.name} is not of this profile: its steps take 20 ms longer")
    return brentq(short, 0.0, _LONGEST_LOOP_S, xtol=1e-6)


def with_loop(profile: Profile, loop_s: float) -> Profile:
    """`profile`, a measured one, with `loop_s` seconds between two steps."""
    model = profile.step_model
    model = replace(model, host=replace(model.host, loop_s=loop_s))
    return profile.model_copy(update={"step_model": model})
