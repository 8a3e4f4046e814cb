"""`twinserve replay --mode apart`: a fleet with prefill apart from decode, and a live engine
for each of its replicas."""

from __future__ import annotations

import sys
from pathlib import Path

from twinserve.sim.cli.progress import RunProgress


def replay_apart(run: Path, model: str, options: dict, as_json: bool, quiet: bool) -> None:
    """options weights, dtype, physical, extra: as `replay` has them. Raises SettingsError for runs
    that live engines cannot follow, and LiveEngineError if they departed from the run."""
    from twinserve.backends.live.apart.folder import shared_folder
    from twinserve.backends.live.versions import LiveEngineError, installed_vllm
    from twinserve.sim.cli.live import with_model
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.setup.config import SettingsError, SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.presets import from_file
    from twinserve.sim.twin.apart import Recorded, run_apart
    from twinserve.sim.twin.live import blank_settings

    if options["physical"]:
        raise SettingsError("--physical: engines that hand KV over lay it out themselves; drop it")
    simulated = Recorded(resolve(SimulationConfig(**from_file(run / "run.json"))))
    with with_model(blank_settings(**options), model) as settings, shared_folder() as folder:
        version = installed_vllm()
        with RunProgress(shown=not (quiet or as_json)) as progress:
            progress.begin("live replay, prefill apart from decode")
            found = run_apart(simulated, settings, Path(folder), report=progress.steps)
    if as_json:
        sys.stdout.write(dump_json(found.described() | {"vllm": version}))
    else:
        print_lines(f"Prefill apart from decode on vLLM {version}", found.lines())
    if not found.held:
        raise LiveEngineError("the live engines did something else than the simulated fleet")
