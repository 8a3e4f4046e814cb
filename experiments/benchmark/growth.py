"""How time and memory grow: `python -m twinserve.experiments.benchmark.growth`.

Whole commands, larger and larger along one axis at a time, and the exponent of what they take.
Where the work itself is in proportion to the axis, an exponent well above 1 is a defect.
docs/benchmark.md says how to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from twinserve.experiments.benchmark.measure import machine, one_core, run_command
from twinserve.experiments.benchmark.tables import Table, machine_lines, markdown, show
from twinserve.experiments.study.output import check_target
from twinserve.policies.registry import policy_names
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.write import write_atomically

PROFILE = "llama-3.1-8b@h100"
TOGETHER = "1e6"  # requests/s: thousands arrive within a few steps
# A point counts that takes so many times what a run of nothing takes.
STARTED = {"cpu_s": 3.0, "peak_rss_bytes": 1.5}
POINTS = 3  # and an exponent is that of the last so many


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


AXES = {
    "requests": Axis(_requests, (1_000, 10_000, 30_000, 100_000), "requests at load 0.65"),
    "together": Axis(_together, (400, 4_000, 12_000, 40_000), "requests that arrive together"),
    "replicas": Axis(_replicas, (40, 400, 1_200, 4_000), "replicas, ten requests each"),
    "pool": Axis(_pool, (100, 1_000, 10_000, 100_000), "best-effort requests a batch"),
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


def measure(
    policies: Sequence[str],
    axes: Sequence[str],
    sizes: dict[str, tuple[int, ...]],
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """A series for each policy and axis: CPU seconds, peak bytes, and their exponents."""
    with one_core() as core:
        empty = run_command([*_flags(policies[0], _requests(1)), "--quiet"])
        found = []
        for axis in axes:
            for policy in policies:
                points = []
                for size in sizes[axis]:
                    say(f"{policy}: {size:,} {AXES[axis].work}")
                    flags = [*_flags(policy, AXES[axis].flags(size)), "--quiet"]
                    points.append({"size": size, **asdict(run_command(flags))})
                found.append({"axis": axis, "policy": policy, "points": points})
    for series in found:
        grown = [point["size"] for point in series["points"]]
        for name, started in STARTED.items():
            values = [point[name] for point in series["points"]]
            slope = exponent(grown, values, asdict(empty)[name], started)
            series[f"{name}_exponent"] = slope
    return {"machine": {**machine(), "core": core}, "nothing": asdict(empty), "series": found}


def _flags(policy: str, work: Sequence[str]) -> list[str]:
    return ["--policy", policy, "--profile", PROFILE, *work]


def tables(report: dict) -> list[Table]:
    """One for each axis: CPU time at each size, exponents of CPU time and peak memory."""
    found = []
    for axis in dict.fromkeys(series["axis"] for series in report["series"]):
        rows = [series for series in report["series"] if series["axis"] == axis]
        sizes = [f"{point['size']:,}: CPU s" for point in rows[0]["points"]]
        found.append(
            Table(
                f"Growth with {AXES[axis].work}",
                ("policy", *sizes, "peak memory, MB", "exponent of time", "of memory"),
                [
                    (
                        series["policy"],
                        *(f"{point['cpu_s']:.2f}" for point in series["points"]),
                        f"{series['points'][-1]['peak_rss_bytes'] * 1e-6:,.0f}",
                        *(
                            "-" if series[name] is None else f"{series[name]:.2f}"
                            for name in ("cpu_s_exponent", "peak_rss_bytes_exponent")
                        ),
                    )
                    for series in rows
                ],
            )
        )
    return found


def growth(
    *,
    policy: Annotated[tuple[str, ...], Parameter(name=["--policy", "-p"])] = (),
    axis: tuple[str, ...] = (),
    largest: int | None = None,
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
    check_target(out)
    sizes = QUICK if quick else {name: AXES[name].sizes for name in AXES}
    if largest is not None:
        sizes = {name: _up_to(each, largest) for name, each in sizes.items()}
    progress = Console(stderr=True, highlight=False)
    report = measure(
        policy or tuple(policy_names()),
        axis or tuple(AXES),
        sizes,
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
