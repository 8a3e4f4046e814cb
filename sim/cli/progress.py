"""The progress bar: simulated time, requests done, speed. On a terminal only; a pipe gets nothing
but results."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.run import Progress as RunState

_REFRESH_S = 0.1


class RunProgress:
    """Shows the runs of a command, on stderr. shown=False: says nothing at all."""

    def __init__(self, shown: bool) -> None:
        self.console = Console(file=sys.stderr, quiet=not shown)
        bar = shown and self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not bar,
        )
        self._task = None
        self._next = 0.0
        self._started = 0.0

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *exc) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def begin(self, label: str) -> None:
        self._task = self.bar.add_task(label, total=1.0, state="")
        self._started = time.perf_counter()
        self._next = 0.0

    def end(self, result: RunResult) -> None:
        if self._task is not None:
            self.bar.update(self._task, completed=1.0)

    def report(self, state: RunState) -> None:
        """Called often; draws seldom."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + _REFRESH_S
        elapsed = max(now - self._started, 1e-9)
        share = state.finished / max(state.total, state.submitted, 1)
        text = (
            f"{state.now_s:,.0f} s simulated, {state.finished:,} of {state.submitted:,} requests "
            "done, "
            f"{state.now_s / elapsed:,.0f}x real time"
        )
        self.bar.update(self._task, completed=min(share, 1.0), state=text)

    def steps(self, done: int, total: int) -> None:
        """Steps of a replay."""
        self.bar.update(self._task, completed=done / total, state=f"{done:,} of {total:,} steps")

    def download(self, done: int, total: int | None) -> None:
        """Bytes of a trace that is being fetched."""
        if self._task is None:
            self._task = self.bar.add_task("download", total=total, state="")
        self.bar.update(self._task, completed=done, state=f"{done / 1e6:.1f} MB")
