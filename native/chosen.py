"""The kernels that run here.

paged  loops of the paged ledger; None: its own Python does it all
"""

from __future__ import annotations

from importlib import import_module

from twinserve.native import COMPILED

paged = import_module("twinserve.native.paged") if COMPILED else None
