"""`twinserve replay --mode apart`: a fleet with prefill apart from decode, and a live engine
for each of its replicas."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from twinserve.sim.cli.progress import RunProgress


def replay_apart(run: Path, model: str, options: dict, as_json: bool, quiet: bool) -> None:
    """options  weights, dtype, physical, extra: as `replay` has them. Raises SettingsError for runs
    that live engines cannot follow, and LiveEngineError where they did otherwise."""
    from twinserve.backends.live.engine.tiny_model import MODELS, write_model
    from twinserve.backends.live.versions import LiveEngineError, installed_vllm
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.setup.config import SettingsError, SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.presets import from_file
    from twinserve.sim.twin.apart import Recorded, run_apart, shared_folder
    from twinserve.sim.twin.live import blank_settings

    if options["physical"]:
        raise SettingsError("--physical: engines that hand KV over lay it out themselves; drop it")
    simulated = Recorded(resolve(SimulationConfig(**from_file(run / "run.json"))))
    version = installed_vllm()
    with RunProgress(shown=not (quiet or as_json)) as progress, ExitStack() as stack:
        folder = Path(stack.enter_context(shared_folder()))
        settings = blank_settings(**options)
        if model in MODELS:
            write_model(folder / "model", name=model)
            settings = replace(settings, model=folder / "model", weights="safetensors")
        elif (Path(model) / "config.json").exists():
            settings = replace(settings, model=Path(model))
        else:
            raise SettingsError(
                f"--model {model}: no folder with a config.json; name one, or {' or '.join(MODELS)}"
            )
        if settings.dtype == "auto" and model in MODELS:
            settings = replace(settings, dtype="float32")
        progress.begin("live replay, prefill apart from decode")
        found = run_apart(simulated, settings, folder / "kv", report=progress.steps)
    if as_json:
        sys.stdout.write(dump_json(found.described() | {"vllm": version}))
    else:
        print_lines(f"Prefill apart from decode on vLLM {version}", found.lines())
    if not found.held:
        raise LiveEngineError("the live engines did something else than the simulated fleet")
