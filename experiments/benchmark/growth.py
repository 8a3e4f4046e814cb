"""How time and memory grow: `python -m twinserve.experiments.benchmark.growth`.

Whole commands, larger and larger along one axis at a time, and the exponent of what they take.
Where the work itself is in proportion to the axis, an exponent well above 1 is a defect. A policy
that preempts each request more often the more there are has more work: its exponent is beside that
of the time, and so is that of the time over the work. docs/benchmark.md says how to read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from twinserve.experiments.benchmark.measure import (
    machine,
    one_core,
    run_printing,
    simulate_command,
)
from twinserve.experiments.benchmark.tables import Table, machine_lines, markdown, show
from twinserve.experiments.study.output import check_target
from twinserve.policies.registry import policy_names
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.grid import Point, run_grid
from twinserve.traces.write import write_atomically

PROFILE = "llama-3.1-8b@h100"
TOGETHER = "1e6"  # requests/s: thousands arrive within a few steps
# A point counts that takes so many times what a run of nothing takes.
STARTED = {"cpu_s": 3.0, "peak_rss_bytes": 1.5}
POINTS = 3  # and an exponent is that of the last so many
EXPONENTS = {
    "cpu_s_exponent": "exponent of time",
    "stays_exponent": "of work",
    "cpu_s_over_stays_exponent": "of time over work",
    "peak_rss_bytes_exponent": "of memory",
}


@dataclass(frozen=True)
class Axis:
    """What grows. flags: of `simulate`, for a size; sizes: by default; work: what grows with it."""

    flags: Callable[[int], Sequence[str]]
    sizes: tuple[int, ...]
    work: str


def _requests(size: int) -> Sequence[str]:
    return ["--trace", "sharegpt", "--requests", str(size), "--load", "0.65"]


def _together(size: int) -> Sequence[str]:
    return ["--trace", "sharegpt", "--requests", str(size), "--rate", TOGETHER]


def _replicas(size: int) -> Sequence[str]:
    each = ["--replicas", str(size), "--requests", str(10 * size), "--load", "0.65"]
    return ["--trace", "sharegpt", *each]


def _pool(size: int) -> Sequence[str]:
    return ["--trace", "sharegpt", "--requests", "40", "--rate", "10", "--pool", str(size)]


_MILLION = (1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
AXES = {
    "requests": Axis(_requests, _MILLION, "requests at load 0.65"),
    "together": Axis(_together, (400, 4_000, 12_000, 40_000), "requests that arrive together"),
    "replicas": Axis(_replicas, (1, 40, 400, 1_200, 4_000), "replicas, ten requests each"),
    "pool": Axis(_pool, (100, *_MILLION), "best-effort requests a batch"),
}
QUICK = {name: (2, 4, 8) for name in AXES}


def exponent(
    sizes: Sequence[int], values: Sequence[float], nothing: float, started: float
) -> float | None:
    """Slope of log(value - nothing) over log(size), by least squares over the last points.

    nothing  what the command takes without any work
    None where fewer than two points take `started` times that.
    """
    n, y = np.asarray(sizes, float), np.asarray(values, float)
    told = np.flatnonzero(y >= started * nothing)[-POINTS:]
    if len(told) < 2:
        return None
    return float(np.polyfit(np.log(n[told]), np.log(y[told] - nothing), 1)[0])


def command(flags: Sequence[str]) -> dict[str, float]:
    """What one `simulate` takes from its start to its exit, and what it had to do, as plain values.

    steps  of all replicas
    stays  how often a request got memory: once, and once more after each preemption
    """
    figures, printed = run_printing(
        [*simulate_command(), *flags, "--profile", PROFILE, "--quiet", "--json"]
    )
    summary = json.loads(printed)
    preempted = sum(summary["kv"]["preemptions"].values())
    stays = sum(each["completed"] for each in summary["classes"].values()) + preempted
    return {**asdict(figures), "steps": summary["scheduler"]["steps"], "stays": stays}


@dataclass(frozen=True)
class Effort:
    """How far a measurement goes, and where it keeps what it has.

    seconds      of CPU time after which a series has no larger size
    keep         folder of the points; those that are there are not measured again
    any_version  nor those of other versions of the code
    """

    seconds: float = math.inf
    keep: Path | None = None
    any_version: bool = False

    def point(self, flags: Sequence[str]) -> dict[str, float]:
        """As `command`, or as it was kept."""
        if self.keep is None:
            return command(flags)
        wanted = [Point({}, {"flags": list(flags)})]
        found = run_grid(command, wanted, self.keep, workers=1, any_version=self.any_version)
        return found.iloc[0].to_dict()


def measure(
    policies: Sequence[str],
    axes: Sequence[str],
    sizes: dict[str, tuple[int, ...]],
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """A series for each policy and axis: CPU seconds, peak bytes, and their exponents. A size of
    all policies comes before the next one."""
    effort = effort or Effort()
    series = {(axis, policy): [] for axis in axes for policy in policies}
    with one_core() as core:
        empty = effort.point(_flags(policies[0], _requests(1)))
        for axis, size in [(name, size) for name in axes for size in sizes[name]]:
            for policy in policies:
                points = series[axis, policy]
                if points and (points[-1] is None or points[-1]["cpu_s"] > effort.seconds):
                    points.append(None)
                    continue
                say(f"{policy}: {size:,} {AXES[axis].work}")
                points.append(effort.point(_flags(policy, AXES[axis].flags(size))))
    found = [
        _series(axis, policy, dict(zip(sizes[axis], points, strict=True)), empty)
        for (axis, policy), points in series.items()
    ]
    return {"machine": {**machine(), "core": core}, "nothing": empty, "series": found}


def _series(axis: str, policy: str, found: dict[int, dict | None], empty: dict) -> dict:
    points = [{"size": size, **point} for size, point in found.items() if point is not None]
    grown = [point["size"] for point in points]
    slopes = {
        f"{name}_exponent": exponent(grown, [point[name] for point in points], empty[name], started)
        for name, started in STARTED.items()
    }
    told = [point for point in points if point["cpu_s"] >= STARTED["cpu_s"] * empty["cpu_s"]]
    size, stays, seconds = ([each[name] for each in told] for name in ("size", "stays", "cpu_s"))
    slopes["stays_exponent"] = exponent(size, stays, 0.0, 0.0)
    slopes["cpu_s_over_stays_exponent"] = exponent(stays, seconds, empty["cpu_s"], 0.0)
    return {"axis": axis, "policy": policy, "points": points, **slopes}


def _flags(policy: str, work: Sequence[str]) -> list[str]:
    return ["--policy", policy, *work]


def tables(report: dict) -> list[Table]:
    """One for each axis: CPU time at each size, exponents of CPU time, work and peak memory."""
    found = []
    for axis in dict.fromkeys(series["axis"] for series in report["series"]):
        rows = [series for series in report["series"] if series["axis"] == axis]
        sizes = sorted({point["size"] for series in rows for point in series["points"]})
        found.append(
            Table(
                f"Growth with {AXES[axis].work}",
                (
                    "policy",
                    *(f"{size:,}: CPU s" for size in sizes),
                    "peak memory, MB",
                    *EXPONENTS.values(),
                ),
                [
                    (
                        series["policy"],
                        *(_seconds(series, size) for size in sizes),
                        f"{series['points'][-1]['peak_rss_bytes'] * 1e-6:,.0f}",
                        *(
                            "-" if series[name] is None else f"{series[name]:.2f}"
                            for name in EXPONENTS
                        ),
                    )
                    for series in rows
                ],
            )
        )
    return found


def _seconds(series: dict, size: int) -> str:
    taken = [point["cpu_s"] for point in series["points"] if point["size"] == size]
    return f"{taken[0]:.2f}" if taken else "-"


def growth(
    *,
    policy: Annotated[tuple[str, ...], Parameter(name=["--policy", "-p"])] = (),
    axis: tuple[str, ...] = (),
    largest: int | None = None,
    seconds: float = math.inf,
    keep: Path | None = None,
    any_version: Annotated[bool, Parameter(negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    markdown_: Annotated[bool, Parameter(name="--markdown", negative="")] = False,
) -> None:
    """Measure how time and memory grow with requests, crowds, replicas and pools.

    Parameters
    ----------
    policy: tuple[str, ...]
        Names of policies. [default: all of them]
    axis: tuple[str, ...]
        requests, together, replicas, pool. [default: all of them]
    largest: int
        Leave out larger sizes; a size that is larger than all is added.
    seconds: float
        Of CPU time: a policy whose run took longer is not measured at larger sizes of that axis.
    keep: Path
        Folder in which points are kept, so that a measurement goes on where it was interrupted.
    any_version: bool
        Take points that other versions of the code kept.
    quick: bool
        Tiny sizes: whether it works, not how it grows.
    out: Path
        Write all figures as JSON.
    markdown_: bool
        Print the tables as Markdown.
    """
    for name in axis:
        if name not in AXES:
            raise SettingsError(f"--axis {name}: there are {', '.join(AXES)}")
    if largest is not None and largest < 2:
        raise SettingsError(f"--largest {largest}: at least 2")
    if not seconds > 0:
        raise SettingsError(f"--seconds {seconds}: above 0")
    check_target(out)
    sizes = QUICK if quick else {name: AXES[name].sizes for name in AXES}
    if largest is not None:
        sizes = {name: _up_to(each, largest) for name, each in sizes.items()}
    progress = Console(stderr=True, highlight=False)
    report = measure(
        policy or tuple(policy_names()),
        axis or tuple(AXES),
        sizes,
        Effort(seconds, keep, any_version),
        lambda text: progress.print(text, style="dim", soft_wrap=True),
    )
    if out is not None:
        write_atomically(out, dump_json(report, out.name).encode())
    if markdown_:
        print(markdown(machine_lines(report["machine"]), tables(report)), end="")
    else:
        show(machine_lines(report["machine"]), tables(report), Console(highlight=False))


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    kept = tuple(size for size in sizes if size <= largest)
    return kept if largest in kept else (*kept, largest)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="growth", help=growth.__doc__)
    app.default(growth)
    run_app(app, arguments)


if __name__ == "__main__":
    main()
