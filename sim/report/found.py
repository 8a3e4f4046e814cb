"""What is in the folders of a report: runs, sweeps, plans, limits, comparisons and validations, at
whatever depth, in the order in which they were given."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinserve.formats import parse_json
from twinserve.sim.report.chart import plain
from twinserve.sim.results.checked import Shape, check_shape
from twinserve.sim.results.files import ResultsError

# The file that tells what a folder is.
MARKS = {
    "run": "run.json",
    "sweep": "sweep.json",
    "plan": "plan.json",
    "limit": "limit.json",
    "comparison": "compare.json",
    "validation": "validation.json",
}
_ANY = Shape("object")
_DEEPEST = 30  # folders within folders


@dataclass(frozen=True)
class Found:
    """kind   of MARKS
    folder  without links; given: the same as the reader of the page would write it
    label   the folder's name, with as many parents as tell it from the others of its kind
    """

    kind: str
    folder: Path
    label: str
    given: Path

    @property
    def title(self) -> str:
        """Of its chapter: `Plan night`, or `Plan` of a folder `plan`."""
        kind = self.kind.capitalize()
        return kind if self.label.lower() == self.kind else f"{kind} {self.label}"


def find(paths: Iterable[str | os.PathLike]) -> list[Found]:
    """Everything in `paths`, in their order; in a folder by its place among runs of one command,
    then by name, numbers by their size. Raises ResultsError for a path in which there is nothing,
    and for one that is found twice."""
    found: list[tuple[str, Path]] = []
    given: dict[tuple[str, Path], Path] = {}
    for path in map(Path, paths):
        below = list(_below(path, 0))
        here = [(kind, folder.resolve()) for kind, folder in below]
        given |= dict(zip(here, (folder for _, folder in below), strict=True))
        if not here:
            raise ResultsError(_nothing(path))
        found += here
    if not found:
        raise ResultsError("report: no folders given; name --out folders of one or more commands")
    again = [pair for i, pair in enumerate(found) if pair in found[:i]]
    if again:
        raise ResultsError(f"report: {again[0][1]} is given twice; name each folder once")
    labels: dict[tuple[str, Path], str] = {}
    for kind in MARKS:
        folders = [folder for other, folder in found if other == kind]
        labels |= {(kind, f): label for f, label in zip(folders, _labels(folders), strict=True)}
    return [Found(*pair, labels[pair], given[pair]) for pair in found]


def read_document(file: Path, shape: Shape = _ANY) -> dict:
    """A JSON file of that shape. Raises ResultsError."""
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ResultsError(f"{file}: torn or not JSON; write it again") from error
    check_shape(value, shape, file)
    return value


def _nothing(path: Path) -> str:
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        return f"{path}: {what}; give the --out folder of a command"
    return (
        f"{path}: holds no run ({', '.join(MARKS.values())} are missing, here and below); give the "
        "--out folder of a finished simulate, sweep, plan, compare or validate"
    )


def _below(path: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """(kind, folder), links to folders not followed below the first."""
    if not path.is_dir() or depth > _DEEPEST:
        return
    try:
        kinds = [kind for kind, mark in MARKS.items() if (path / mark).is_file()]
        inner = [
            entry
            for entry in path.iterdir()
            # Hidden folders are writes that were cut off, and what a sweep keeps.
            if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink()
        ]
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror or error}") from error
    for kind in kinds:
        yield kind, path
    if "run" not in kinds:
        for folder in sorted(inner, key=_order):
            yield from _below(folder, depth + 1)


def _order(folder: Path) -> tuple[int, list[tuple[int, int, str]]]:
    """Return runs in the order of their command's policies, then by name: run-2 before run-10."""
    parts = re.findall(r"\d+|\D+", folder.name)
    natural = [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]
    return _place(folder), natural


def _place(folder: Path) -> int:
    """Return the order in which `simulate` wrote several policies; far behind for other folders."""
    try:
        place = parse_json((folder / "timing.json").read_text(encoding="utf-8")).get("place")
    except (OSError, ValueError, AttributeError):  # the reader of the run says what is wrong
        place = None
    return place if type(place) is int else 10**9


def _labels(folders: list[Path]) -> list[str]:
    """Their names, with as many parents as it takes to tell them apart."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [plain("/".join(folder.parts[-depth:]).lstrip("/")) for folder in folders]
