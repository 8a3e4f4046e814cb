"""Public measurements of decode steps on vLLM, one number each: the marks of docs/profiles.md.

Milliseconds of a decode step, or the TPOT of a steady stage, of vLLM 0.14 to 0.19; the middle of a
range stands for it. Contexts are about 700 tokens unless given.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd


class Mark(NamedTuple):
    """engine: MODEL@GPU[:tpN]; requests that decode, tokens of context each, milliseconds."""

    engine: str
    requests: int
    context: int
    ms: float


_FILE = pd.read_csv(Path(__file__).with_name("marks.csv"))
MARKS = tuple(Mark(*row) for row in _FILE.itertuples(index=False, name=None))
