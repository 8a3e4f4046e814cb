"""Check the form of stored results, as files can be edited or damaged: one line for a wrong
value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinserve.formats import shipped_json
from twinserve.sim.results.columns import OPTIONAL_TABLES, TABLES
from twinserve.sim.results.folders import ResultsError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Shape:
    """The form of a JSON value.

    kind    "number" (finite), "text", "flag" (true, false), "list" or "object"
    needed  required names of an object, with their shapes
    known   optional names; others have the shape `rest`, or any shape if `rest` is None
    null    whether null is allowed instead
    """

    kind: str
    needed: Mapping[str, Shape] = field(default_factory=dict)
    known: Mapping[str, Shape] = field(default_factory=dict)
    rest: Shape | None = None
    null: bool = False


def _shape(form: Any) -> Shape:
    """Return the shape of a form in `shapes.json`: a kind (? allows null); $ and another form's
    name; a list with its items' form (and null); or an object of forms by names: NAME is required,
    NAME? optional, several names may share a form, * is for all others."""
    if isinstance(form, list):
        return Shape("list", rest=_shape(form[0]), null=None in form)
    if isinstance(form, str):
        named = form.startswith("$")
        return SHAPES[form[1:]] if named else Shape(form.removesuffix("?"), null=form[-1] == "?")
    inner = {
        name: _shape(of) for names, of in form.items() if names != "null" for name in names.split()
    }
    return Shape(
        "object",
        {name: of for name, of in inner.items() if name[-1] not in "?*"},
        {name[:-1]: of for name, of in inner.items() if name[-1] == "?"},
        inner.get("*"),
        "null" in form,
    )


SHAPES: dict[str, Shape] = {}
for _name, _form in shipped_json(__package__, "shapes.json").items():
    SHAPES[_name] = _shape(_form)


def check_shape(value: Any, shape: Shape, file: Path, where: str = "") -> None:
    """Raise ResultsError with file and name of the first value with a wrong shape."""
    if value is None and shape.null:
        return
    if not _is(value, shape.kind):
        shown = repr(value) if isinstance(value, (str, float, bool)) else type(value).__name__
        what = f"{where} is {shown[:40]}, no {shape.kind}" if where else f"holds no {shape.kind}"
        raise ResultsError(f"{file}: {what}; run again with --overwrite")
    if isinstance(value, list) and shape.rest is not None:
        for i, item in enumerate(value):
            check_shape(item, shape.rest, file, f"{where}[{i}]")
    if isinstance(value, dict):
        for name in shape.needed:
            if name not in value:
                what = f"{where}.{name}".lstrip(".")
                raise ResultsError(f"{file}: {what} is missing; run again with --overwrite")
        for name, item in value.items():
            inner = shape.needed.get(name) or shape.known.get(name) or shape.rest
            if inner is not None:
                check_shape(item, inner, file, f"{where}.{name}".lstrip("."))


def _is(value: Any, kind: str) -> bool:
    if kind == "scalar":
        return value is None or isinstance(value, bool) or _is(value, "number")
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return math.isfinite(value) if isinstance(value, float) else abs(value) < 1e300
    kinds = {"text": str, "flag": bool, "list": list, "object": dict}
    return isinstance(value, kinds[kind])


# -- rows ------------------------------------------------------------------------------------------
# Times that every row has. Others may be missing (NaN), but none is infinite or negative.
_ALWAYS = {
    "requests": ("arrival_s",),
    "steps": ("start_s", "end_s"),
    "gaps": ("gap_s",),
    "placements": ("placed_s",),
    "replicas": (),
    "failures": ("at_s",),
}
_SIGNED = {"priority", "replica", "stage", "successor"}
_COLUMNS = TABLES | OPTIONAL_TABLES


def check_rows(name: str, frame: pd.DataFrame, file: Path) -> None:
    """Raise ResultsError for other columns or types than `write_run` has, or impossible values."""
    missing = [column for column in _COLUMNS[name] if column not in frame]
    if missing:
        raise ResultsError(f"{file}: no column {', '.join(missing)}; of another version? Run again")
    sent = slice(None)
    if name == "requests":
        sent = (frame["outcome"] != "never_sent").to_numpy()
    for column, kind in _COLUMNS[name].items():
        values = frame[column]
        if len(frame) and not _fits(values, kind):
            raise ResultsError(
                f"{file}: column {column} is {values.dtype}, not {kind}; run again with --overwrite"
            )
        if kind == "double" or (kind == "int64" and column not in _SIGNED):
            numbers = values.to_numpy(np.float64)
            bad = np.isinf(numbers) | (numbers < 0)
            if column in _ALWAYS[name]:
                always = np.zeros(len(frame), bool)
                always[sent] = True
                bad |= np.isnan(numbers) & always
            if bad.any():
                row = int(bad.argmax())
                raise ResultsError(
                    f"{file}: row {row}: {column} is {numbers[row]:g}; run again with --overwrite"
                )


def _fits(values: pd.Series, kind: str) -> bool:
    if kind == "string":
        return all(isinstance(value, str) for value in values.dropna())
    return values.dtype.kind in {"bool": "b", "int64": "iu", "double": "iuf"}[kind]
