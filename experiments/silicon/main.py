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

from twinserve.experiments.silicon.loops import AS_SAID, FORMS, STARTS, Otherwise, simulate
from twinserve.experiments.silicon.points import Point, read_points
from twinserve.experiments.silicon.tables import KINDS, markdown
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import run_app

ROWS = "silicon.jsonl"


def silicon(
    *,
    out: Path | None = None,
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
) -> None:
    """Simulate the measured closed loops and print the errors, by kind.

    Parameters
    ----------
    out: Path
        Folder that keeps what was simulated (silicon.jsonl); what is there is not made again.
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
    """
    otherwise = _otherwise(Otherwise(shortest, rounds, host_time, seats, fewer, fp8_kv))
    points = [
        p
        for p in read_points()
        if (not model or p.model in model)
        and (not gpu or p.gpu in gpu)
        and (not concurrency or p.concurrency in concurrency)
    ][:: max(each, 1)]
    if not points:
        known = ", ".join(sorted({f"{p.model} on {p.gpu}" for p in read_points()}))
        raise ProfileError(
            f"--model, --gpu and --concurrency leave no point of them; there are points of: {known}"
        )
    rows = of_points(points, out, seed, otherwise)
    good = pd.DataFrame([row for row in rows if "why" not in row])
    bad = pd.DataFrame([row for row in rows if "why" in row])
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
    points: list[Point], out: Path | None, seed: int, otherwise: Otherwise = AS_SAID
) -> list[dict[str, Any]]:
    """A row for each point, form and start; kept in `out`. A form that has no step times of an
    engine has rows that say why."""
    done = _kept(out, seed, otherwise)
    for point in points:
        for form in FORMS:
            for start in STARTS:
                key = (point.name, form, start)
                if key in done:
                    continue
                row = _simulated(point, form, start, seed, otherwise)
                done[key] = {**row, "seed": seed, "otherwise": otherwise.said()}
                _keep(out, done[key])
    wanted = {point.name for point in points}
    return [row for key, row in done.items() if key[0] in wanted]


def _simulated(point: Point, form, start: str, seed: int, otherwise: Otherwise) -> dict[str, Any]:
    try:
        return simulate(point, form, start, seed, otherwise)
    except ProfileError as error:
        named = {"point": point.name, "model": point.model, "gpu": point.gpu, "tp": point.tp}
        return {**named, "form": form, "start": start, "why": str(error)}


def _kept(
    out: Path | None, seed: int, otherwise: Otherwise
) -> dict[tuple[str, str, str], dict[str, Any]]:
    if out is None or not (out / ROWS).is_file():
        return {}
    rows = _whole_rows((out / ROWS).read_text(encoding="utf-8"), out / ROWS)
    said = otherwise.said()  # rows of before there was anything otherwise do not say so
    same = [r for r in rows if r["seed"] == seed and r.get("otherwise", {}) == said]
    return {(r["point"], r["form"], r["start"]): r for r in same}


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
