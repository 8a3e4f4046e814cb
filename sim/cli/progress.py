"""Progress of a long command, on stderr: simulated time, requests, speed, time left. A terminal
shows a bar; else a plain line appears now and then, after the first seconds. Wall time is shown,
and decides nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from twinserve.sim.results.files import RunResult
    from twinserve.sim.setup.run import Progress as RunState

_WALL = time.perf_counter
_REFRESH_S = 0.1  # of the bar
_FIRST_S, _EVERY_S = 5.0, 10.0  # plain lines, after the command's start
SILENT = False  # --quiet of a command that has no such option of its own (`main.run_app`)
_SOONEST_S = 2.0  # an estimate from less is worth nothing


def time_left(share: float, elapsed_s: float) -> float | None:
    """Return wall seconds until the end, if `share` of the work (0 to 1) took `elapsed_s`. None at
    the end, and while the share is too small to judge by."""
    if elapsed_s < _SOONEST_S or not 0 < share < 1:
        return None
    return elapsed_s * (1 - share) / share


def plain_line(label: str, *parts: str) -> str:
    """Return `label: part, part` as one line; empty parts are left out."""
    return " ".join(f"{label}: {', '.join(filter(None, parts))}".split())


def left_text(seconds: float | None) -> str:
    """Return `11 s left`, `3 min left`, `2 h 5 min left`; empty while the time is not known."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:,.0f} s left"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min left" if hours else f"{minutes} min left"


def run_parts(state: RunState, elapsed_s: float) -> list[str]:
    """Return simulated time, requests and speed after `elapsed_s` wall seconds, as text."""
    digits = 0 if max(state.now_s, state.total_s) >= 100 else 1
    now, total = f"{state.now_s:,.{digits}f}", f"{state.total_s:,.{digits}f}"
    if state.now_s <= state.total_s:
        simulated = f"{now} of {total} s simulated"
    else:
        simulated = f"{now} s simulated"
        simulated += f" (last arrival at {total} s)" if state.total_s else ""
    speed = state.now_s / elapsed_s if elapsed_s > 0 else 0.0
    return [
        simulated,
        f"{state.finished:,} of {state.total:,} requests",
        f"{speed:,.{0 if speed >= 10 else 1}f}x real time",
    ]


def _new_bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[state]}", table_column=Column()),  # wraps, if any has to
        console=console,
        transient=True,
    )


class RunProgress:
    """Show the parts of a command, one after another.

    shown  False: says nothing at all
    file   by default stderr
    now    wall time in seconds, from any origin; by default this machine's
    """

    def __init__(
        self, shown: bool, file: TextIO | None = None, now: Callable[[], float] | None = None
    ) -> None:
        now, shown = now or _WALL, shown and not SILENT
        from rich.console import Console

        self.console = Console(file=file or sys.stderr, quiet=not shown)
        self.bar = _new_bar(self.console) if shown and self.console.is_terminal else None
        self._now = now
        self._next = now() + (0.0 if self.bar else _FIRST_S) if shown else float("inf")
        self._task: TaskID | None = None
        self._label, self._began, self._from, self._least = "", now(), 0.0, math.inf

    def __enter__(self) -> RunProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exc) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        # a terminal breaks lines at words; in a file they stay whole
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)

    def begin(self, label: str, share: float = 0.0) -> None:
        """Begin the next part. share: done before, which does not count for the pace."""
        self._label, self._began, self._from, self._least = label, self._now(), share, math.inf
        if self.bar:
            self._task = self.bar.add_task(label, total=1.0, left="", state="")
            self.bar.update(self._task, completed=share)
            self._next = self._began

    def end(self, result: RunResult | None = None) -> None:
        """End the part that began last."""
        if self.bar and self._task is not None:
            self.bar.update(self._task, completed=1.0)

    def report(self, state: RunState) -> None:
        """Report a simulation. It is called often, and shows seldom."""
        if self._due():
            self._show(state.share, run_parts(state, self._elapsed_s()))

    def steps(self, done: int, total: int) -> None:
        """Report steps of a replay."""
        self.count(done, total, "steps")

    def count(self, done: int, total: int, what: str) -> None:
        """Report equal pieces, by their name in the plural: steps, points, runs."""
        if self._due():
            self._show(done / max(total, 1), [f"{done:,} of {total:,} {what}"])

    def simulations(self, done: int) -> None:
        """Simulations of a search. How many it takes is not known before, so no time is left."""
        if self._due():
            self._show(done / (done + 100), [f"{done} simulations"], known=False)

    def part(self, share: float, text: str, known: bool = True) -> None:
        """Report any other part: the share that is done, and what is being done. known: whether
        the share says how long the rest takes."""
        if self._due():
            self._show(share, [text], known)

    def pace_from(self, share: float) -> None:
        """What was done up to now, and its time, do not count for the pace."""
        self._began, self._from, self._least = self._now(), share, math.inf

    def download(self, done: int, total: int | None) -> None:
        """Report bytes of a trace that is being fetched; `total` if it is known."""
        if self._label != "download":
            self.begin("download")
        if self._due():
            all_of_it = f" of {total / 1e6:.1f}" if total else ""
            self._show(done / total if total else 0.0, [f"{done / 1e6:.1f}{all_of_it} MB"])

    def _left(self, share: float) -> str:
        """Return no text while the estimate rises: how far the work slows down is not known."""
        seconds = time_left(share, self._elapsed_s())
        if seconds is None or seconds > self._least:
            return ""
        self._least = seconds
        return left_text(seconds)

    def _elapsed_s(self) -> float:
        return self._now() - self._began

    def _due(self) -> bool:
        now = self._now()
        if now < self._next:
            return False
        self._next = now + (_REFRESH_S if self.bar else _EVERY_S)
        return True

    def _show(self, share: float, parts: list[str], known: bool = True) -> None:
        """known: whether the share says how long the rest takes."""
        share = min(max(share, 0.0), 1.0)
        ours = (share - self._from) / (1 - self._from) if self._from < 1 else 1.0
        left = self._left(ours) if known else ""
        if self.bar and self._task is not None:
            self.bar.update(self._task, completed=share, left=left, state=", ".join(parts))
        else:
            self.say(plain_line(self._label, *parts, left))
