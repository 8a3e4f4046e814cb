"""Routers of other systems that tests run: where they are installed, and the programs that start
them.

They bring packages along that ours does not need, so they may have an environment of their own:
TWINSERVE_ORIGINALS is a folder with bin/python. With TWINSERVE_REQUIRE_ORIGINALS a test that lacks
one fails.
"""

import os
import subprocess
import sys
from functools import cache

import pytest

PACKAGES = {"sglang_router": "sglang-router==0.3.2", "dynamo.replay": "ai-dynamo==1.4.2"}


@cache
def python_with(module: str) -> str:
    """The interpreter that can import `module`; where there is none the test is skipped."""
    folder = os.environ.get("TWINSERVE_ORIGINALS")
    python = os.path.join(folder, "bin", "python") if folder else sys.executable
    said = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    if said.returncode == 0:
        return python
    reason = f"{module} cannot be imported by {python}: pip install {PACKAGES[module]}"
    if os.environ.get("TWINSERVE_REQUIRE_ORIGINALS"):
        pytest.fail(reason)
    pytest.skip(reason)
