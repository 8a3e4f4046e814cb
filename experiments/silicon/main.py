"""The simulator against closed loops that others measured: `python -m
twinserve.experiments.silicon`.

The points ship with aiconfigurator-core. Each is simulated with both forms of step times, with
clients that start all at once and staggered. docs/validation.md has the results and what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import cyclopts
import pandas as pd
from cyclopts import Parameter

from twinserve.experiments.silicon.loops import AS_SAID, FORMS, STARTS, Otherwise, loop
from twinserve.experiments.silicon.points import DATA, Point, read_points
from twinserve.experiments.silicon.tables import ERRORS, KINDS, markdown
from twinserve.experiments.study.command import RESUMABLE
from twinserve.experiments.study.progress import shown_grid
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import run_app
from twinserve.sim.sweep import grid
from twinserve.traces.write import write_atomically

TABLE = "errors.csv"


def silicon(
    *,
    out: Path = Path("out/silicon"),
    model: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    gpu: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    concurrency: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    each: int = 1,
    seed: int = 0,
    shortest: float | None = None,
    rounds: int = AS_SAID.rounds,
    host_time: str = AS_SAID.host_time,
    seats: int | None = None,
    fewer: int = AS_SAID.fewer,
    fp8_kv: Annotated[bool, Parameter(negative="")] = False,
    workers: int | None = None,
    any_version: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Simulate the measured closed loops and print the errors, by kind.

    Parameters
    ----------
    out: Path
        Folder that keeps each loop; what is there of this version of the code is not made again.
        The errors go to its errors.csv.
    model: tuple[str, ...]
        Models of the catalogue; by default all that were measured.
    gpu: tuple[str, ...]
        GPUs of the catalogue; by default all that were measured.
    concurrency: tuple[int, ...]
        Requests under way; by default any number.
    each: int
        Only each N-th point.
    seed: int
        Of the lengths, where they are drawn.
    shortest: float
        Otherwise than the points say: lengths are drawn from this share of the stated ones on.
    rounds: int
        Otherwise: requests for each that may be under way.
    host_time: str
        Otherwise: as of `simulate --host-time`.
    seats: int
        Otherwise: the batch limit of the servers.
    fewer: int
        Otherwise: so many times fewer requests under way.
    fp8_kv: bool
        Otherwise: all servers have an FP8 KV cache.
    workers: int
        Processes; by default one for each core.
    any_version: bool
        Also take loops that another version of the code has run.
    """
    for name, value in (("workers", workers), ("each", each)):
        if value is not None and value < 1:
            raise ProfileError(f"--{name} {value}: give at least 1")
    otherwise = _otherwise(Otherwise(shortest, rounds, host_time, seats, fewer, fp8_kv))
    points = [
        p
        for p in read_points()
        if (not model or p.model in model)
        and (not gpu or p.gpu in gpu)
        and (not concurrency or p.concurrency in concurrency)
    ][::each]
    if not points:
        known = ", ".join(sorted({f"{p.model} on {p.gpu}" for p in read_points()}))
        raise ProfileError(
            f"--model, --gpu and --concurrency leave no point of them; there are points of: {known}"
        )
    rows = of_points(points, out, seed, otherwise, workers, any_version)
    failed = rows.why.notna() if "why" in rows else pd.Series(False, index=rows.index)
    good, bad = rows[~failed], rows[failed]
    if len(good):
        text = good[ERRORS].sort_values(ERRORS).to_csv(index=False, float_format="%.4g")
        write_atomically(out / TABLE, text.encode())
    print(markdown(good, bad, tuple(KINDS)), end="")


def _otherwise(given: Otherwise) -> Otherwise:
    """ProfileError, one line, for what cannot be."""
    if given.shortest is not None and not 0 < given.shortest <= 1:
        raise ProfileError(f"--shortest {given.shortest:g}: give a share above 0 and up to 1")
    if given.rounds < 3:  # of a staggered loop the first and the last are left out
        raise ProfileError(f"--rounds {given.rounds}: give at least 3")
    for name, value in (("seats", given.seats), ("fewer", given.fewer)):
        if value is not None and value < 1:
            raise ProfileError(f"--{name} {value}: give at least 1")
    return given


def of_points(
    points: Sequence[Point],
    out: Path,
    seed: int,
    otherwise: Otherwise = AS_SAID,
    workers: int | None = 1,
    any_version: bool = False,
) -> pd.DataFrame:
    """A row for each point, form and start (`loops.loop`), kept in `out`."""
    data = metadata.version(DATA)
    todo = [
        grid.Point(
            {},
            {
                "point": point.name,
                "data": data,
                "form": form,
                "start": start,
                "seed": seed,
                "otherwise": asdict(otherwise),
            },
        )
        for point in points
        for form in FORMS
        for start in STARTS
    ]
    return shown_grid(loop, todo, out, workers, "silicon", any_version)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(
        name="silicon", help=silicon.__doc__, version_flags=[], result_action="return_value"
    )
    app.default(silicon)
    run_app(app, arguments, RESUMABLE)
