"""Reuse the finished runs of an interrupted command."""

from pathlib import Path

from twinserve.policies.registry import PolicySpec
from twinserve.sim.results.files import RunResult, plain, read_run
from twinserve.sim.results.folders import ResultsError
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation, describe_all

# Of run.json: what other settings, files or versions would change.
_SAME = (
    *("metrics", "policy", "kv", "limits", "profile", "front_end", "trace", "router", "versions"),
)


def finished_run(
    folder: Path, inputs: Inputs, spec: PolicySpec, options: MetricsOptions, extras: dict[str, bool]
) -> RunResult | None:
    """Return the run of `spec` in `folder`, or None if the folder has none.

    extras  by flag: whether it was given

    Raises ResultsError for a run with other settings.
    """
    if not (folder / "run.json").exists():
        return None
    found = read_run(folder)
    simulation = Simulation(inputs, spec, warmup=options.warmup)
    asked = plain(describe_all(simulation, options))
    old, new = found.config["config"], asked["config"]
    other = [f"--{name.replace('_', '-')}" for name in new if old.get(name) != new[name]]
    other = other or [n for n in _SAME if _part(found.config, n) != _part(asked, n)]
    there = {
        "--timeline": (folder / "trace.json.gz").exists(),
        "--decisions": (folder / "decisions.jsonl.gz").exists(),
        "--error-bars": "error_bars" in found.summary,
        "--spare": "beside" in (found.summary.get("failures") or {}),
    }
    lacks = [flag for flag, given in extras.items() if given and not there[flag]]
    if other or lacks:
        what = f"has another {', '.join(other)}" if other else f"is without {', '.join(lacks)}"
        raise ResultsError(
            f"{folder}: --resume: the run there {what}; name another folder, or replace it with "
            "--overwrite"
        )
    return found


def _part(run: dict, name: str):
    if name == "router":  # a fleet says what became of it, too
        return {k: v for k, v in run["fleet"].items() if k.endswith("router_file_sha256")}
    part = run.get(name)
    return {k: v for k, v in part.items() if k != "counters"} if name == "policy" else part
