"""The simulator against closed loops that others measured: `python -m
twinserve.experiments.silicon`.

The points ship with aiconfigurator-core. Each is simulated with both forms of step times, with
clients that start all at once and staggered. docs/silicon.md has the results and what they mean.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import cyclopts
import pandas as pd
from cyclopts import Parameter

from twinserve.experiments.silicon.loops import FORMS, STARTS, simulate
from twinserve.experiments.silicon.points import Point, read_points
from twinserve.experiments.silicon.tables import KINDS, markdown
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import run_app

ROWS = "silicon.jsonl"


def silicon(
    *,
    out: Path | None = None,
    model: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    each: int = 1,
    seed: int = 0,
) -> None:
    """Simulate the measured closed loops and print the errors, by kind.

    Parameters
    ----------
    out: Path
        Folder that keeps what was simulated (silicon.jsonl); what is there is not made again.
    model: tuple[str, ...]
        Models of the catalogue; by default all that were measured.
    each: int
        Only each N-th point.
    seed: int
        Of the lengths, where they are drawn.
    """
    points = [p for p in read_points() if not model or p.model in model][:: max(each, 1)]
    if not points:
        known = ", ".join(sorted({p.model for p in read_points()}))
        raise ProfileError(
            f"--model {' '.join(model)}: there are no points of it; those are {known}"
        )
    rows = of_points(points, out, seed)
    good = pd.DataFrame([row for row in rows if "why" not in row])
    bad = pd.DataFrame([row for row in rows if "why" in row])
    print(markdown(good, bad, tuple(KINDS)), end="")


def of_points(points: list[Point], out: Path | None, seed: int) -> list[dict[str, Any]]:
    """A row for each point, form and start; kept in `out`. A form that has no step times of an
    engine has rows that say why."""
    done = _kept(out, seed)
    for point in points:
        for form in FORMS:
            for start in STARTS:
                key = (point.name, form, start)
                if key in done:
                    continue
                done[key] = _simulated(point, form, start, seed)
                _keep(out, {**done[key], "seed": seed})
    wanted = {point.name for point in points}
    return [row for key, row in done.items() if key[0] in wanted]


def _simulated(point: Point, form, start: str, seed: int) -> dict[str, Any]:
    try:
        return simulate(point, form, start, seed)
    except ProfileError as error:
        named = {"point": point.name, "model": point.model, "gpu": point.gpu, "tp": point.tp}
        return {**named, "form": form, "start": start, "why": str(error)}


def _kept(out: Path | None, seed: int) -> dict[tuple[str, str, str], dict[str, Any]]:
    if out is None or not (out / ROWS).is_file():
        return {}
    rows = _whole_rows((out / ROWS).read_text(encoding="utf-8"), out / ROWS)
    return {(r["point"], r["form"], r["start"]): r for r in rows if r["seed"] == seed}


def _whole_rows(text: str, path: Path) -> list[dict[str, Any]]:
    """A last line without an end was cut off with the process that wrote it, and is made again.
    ProfileError for any other line that cannot be read."""
    *lines, _ = text.split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            raise ProfileError(
                f"{path}, line {number}: is no row of this study; delete the line, or the file"
            ) from None
    return rows


def _keep(out: Path | None, row: dict[str, Any]) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ROWS, "a+b") as file:
        _drop_torn_line(file)
        file.write(json.dumps(row).encode() + b"\n")


def _drop_torn_line(file: BinaryIO) -> None:
    """What was cut off at the end of a file must not become a part of the next row."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="silicon", help=silicon.__doc__)
    app.default(silicon)
    run_app(app, arguments)
