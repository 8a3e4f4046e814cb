"""The kernels that run here.

batch    what policies ask of many rows at once
columns  a step's book-keeping in the request table
paged    loops of the paged ledger; None: its own Python does it all
slots    loops of the bidirectional ledger; None: the same
"""

from __future__ import annotations

from importlib import import_module

from twinserve.native import COMPILED

batch = import_module(f"twinserve.native.{'batch' if COMPILED else 'plain_batch'}")
columns = import_module(f"twinserve.native.{'columns' if COMPILED else 'plain'}")
paged = import_module("twinserve.native.paged") if COMPILED else None
slots = import_module("twinserve.native.slots") if COMPILED else None
