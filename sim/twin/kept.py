"""The steps of a validation's runs, kept next to its folder as they end, in case of an
interruption."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from twinserve.formats import whole_file
from twinserve.sim.results.folders import folders, resolved


class KeptSteps:
    """out: the folder of the validation; None: nothing is kept. files: what is kept, in order."""

    def __init__(self, out: Path | None) -> None:
        out = None if out is None else resolved(out)
        self.folder = None if out is None else out.with_name(f"{out.name}.steps")
        self.files: list[Path] = []
        self._labels: list[str] = []

    def keep(self, policy: str, kind: str, number: int, steps: pd.DataFrame) -> None:
        """A run's steps, whole or not at all. OSError if they cannot be written."""
        if self.folder is None:
            return
        if policy not in self._labels:
            self._labels.append(policy)
        path = self.folder / f"{folders(self._labels)[policy]}-{kind}-{number}.parquet"
        with whole_file(path) as partial:
            steps.to_parquet(partial, index=False)
        self.files.append(path)

    def drop(self) -> None:
        """Delete the steps; other files next to them stay."""
        for path in self.files:
            path.unlink(missing_ok=True)
        if self.files and self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        self.files = []

    @contextlib.contextmanager
    def told_where(self) -> Iterator[None]:
        """Print the path of the kept steps if the work inside ends early."""
        try:
            yield
        except BaseException:
            if self.files:
                print(f"note: the steps of the runs that ended: {self.folder}", file=sys.stderr)
            raise
