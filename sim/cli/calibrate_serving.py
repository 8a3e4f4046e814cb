"""`twinserve calibrate --from-serving`: terms of a profile from measurements of a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinserve.profiles.front_end import save_front_end
from twinserve.profiles.profile import save_profile
from twinserve.sim.cli.profiles import check_target
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.server_fit import fit_server

_NOT_TOLD = (
    "KV memory, swapping and prefix hits were not asked of these data; nor how long answers take "
    "from the engine to their client"
)


def calibrate_serving(
    files: Sequence[Path],
    out: Path,
    settings: dict,
    *,
    config: Path | None = None,
    name: str | None = None,
    saturated: bool = False,
    overwrite: bool = False,
) -> None:
    """Fit, write `out` and the front end next to it, and print what was found. Arguments and errors
    are those of `fit_server`."""
    front = out.with_suffix(".front_end.json")
    for target in (out, front):
        check_target(target, overwrite)
    with RunProgress(shown=True) as progress:
        progress.begin("calibrate")
        found = fit_server(files, settings, config, saturated, progress.simulations)
    print("\n".join([*found.notices(), *serving_fit.shown(found.fitted)]))
    print(f"{'holds for':>22}  {found.range()}")
    print(f"{'unknown':>22}  {_NOT_TOLD}")
    base = found.inputs[0].hardware.profile
    if not found.fitted.worth:
        raise SettingsError(
            f"these measurements do not improve {base.name}, so nothing was written; "
            "measure more requests, at another load, or begin with another --profile"
        )
    save_profile(found.profile(name), out)
    again = f"simulate --profile {out}"
    if (front_end := found.front_end()) is not None:
        save_front_end(front_end, front)
        again += f" --front-end {front}"
    if not found.inputs[0].config.async_scheduling:
        again += " --no-async-scheduling --host-time none"
    print(again)
