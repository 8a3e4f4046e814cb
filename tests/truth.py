"""Measurements of other people, which are not in the repository."""

import os
from pathlib import Path

import pytest

from twinserve.experiments.measured.truth import truth_folder
from twinserve.traces.workload import WorkloadError


def truth(name: str) -> Path:
    """A file or folder of TWINSERVE_TRUTH. Skips the test without it, or fails it if
    TWINSERVE_REQUIRE_TRACES is set."""
    try:
        return truth_folder(name) / name
    except WorkloadError as error:
        (pytest.fail if os.environ.get("TWINSERVE_REQUIRE_TRACES") else pytest.skip)(str(error))
