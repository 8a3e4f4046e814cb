"""Grids of points, with how far they are on stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from twinserve.experiments.study.points import Point, Rows, run_grid
from twinserve.sim.cli.progress import RunProgress


def shown_grid(
    work: Callable[..., Rows],
    points: Sequence[Point],
    out: Path,
    workers: int | None,
    label: str,
    any_version: bool,
) -> pd.DataFrame:
    """`run_grid`, and how far it is under the name `label`."""
    with RunProgress(shown=True) as progress:

        def report(done: int, total: int) -> None:
            if not begun:
                begun.append(True)
                progress.begin(label, done / max(total, 1))
            progress.count(done, total, "points")

        begun: list[bool] = []
        return run_grid(work, points, out, workers, any_version, report)
