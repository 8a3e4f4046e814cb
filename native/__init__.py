"""Compiled kernels below the policies, and their plain twins: the same results to the last bit.

A kernel is a loop over columns that numpy would do in many small calls. Where there is no compiled
module, or TWINSERVE_NATIVE is 0, the Python code that it stands for runs. Nothing loads here, since
`simulate --version` asks which of the two it is; `chosen.py` has the modules.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

KERNELS = ("batch", "columns", "paged", "slots")
COMPILED = os.environ.get("TWINSERVE_NATIVE") != "0" and all(
    find_spec(f"{__name__}.{name}") for name in KERNELS
)
