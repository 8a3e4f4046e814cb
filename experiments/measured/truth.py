"""Find measurements of other people. `truth.yaml` lists them, and which figures read them."""

import os
from pathlib import Path

from twinserve.experiments.study.claims import texts
from twinserve.traces.workload import WorkloadError

FILES = texts(__file__, "truth.yaml").FILES


def truth_folder(name: str) -> Path:
    """The first folder of TWINSERVE_TRUTH that holds this file or folder of `FILES`. Raises
    WorkloadError."""
    for folder in filter(None, os.environ.get("TWINSERVE_TRUTH", "").split(os.pathsep)):
        if (Path(folder) / name).exists():
            return Path(folder)
    what = FILES[name]["what"]
    raise WorkloadError(
        f"{name} ({what}) not found; set TWINSERVE_TRUTH to the folder that holds it"
    )
