"""How wide a printed error must be, and what it held on sources that it had not seen.

A bar is the size of the error, |log(ours / measured)|, that 90 % of measured points keep. A source
counts as MOST_OF_SOURCE points at most: the next server is another source. Suspect hosts count for
no bar, but what bars hold of them is counted. Nearest first: the
kind of model on the GPU family; its class there; its class on any GPU. A bar of one source, or of
other kinds, is STRANGERS times as wide.
"""

import numpy as np
import pandas as pd

from twinserve.experiments.measured.scores import MISSED

STRANGERS = 1.2
LEAST_POINTS = 5
MOST_OF_SOURCE = 10
DENSE, FEW_BITS, MIXTURE = "dense 16 bits", "dense quantised", "mixture"


def with_groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored rows with `step` (decode, prefill), `class` and `size` of the error."""
    dense = rows.kind.str.startswith("dense")
    few = np.where(dense, FEW_BITS, MIXTURE)
    return rows.assign(
        step=np.where(rows.what.isin(["tpot", "loop"]), "decode", "prefill"),
        **{"class": np.where(rows.kind == DENSE, DENSE, few)},
        size=np.log(rows.ratio).abs(),
    )


def bar(
    rows: pd.DataFrame, kind: str, of_class: str, family: str, near: bool = False
) -> tuple[float, int] | None:
    """(relative error, points) of one form and step for models of this kind on this GPU family;
    None if no level has LEAST_POINTS. near: the first level alone."""
    same = rows["class"] == of_class
    levels = ((rows.kind == kind) & (rows.family == family), same & (rows.family == family), same)
    for level, chosen in enumerate(levels[:1] if near else levels):
        part = rows[chosen]
        if len(part) >= LEAST_POINTS:
            wider = STRANGERS if level or part.source.nunique() == 1 else 1.0
            return float(np.expm1(wider * _kept(part))), len(part)
    return None


def _kept(rows: pd.DataFrame) -> float:
    """The size that all but MISSED keep, in weight."""
    of_source = rows.groupby("source")["size"].transform("size").to_numpy()
    order = np.argsort(rows["size"].to_numpy(), kind="stable")
    weights = np.minimum(MOST_OF_SOURCE / of_source, 1.0)[order].cumsum()
    at = np.searchsorted(weights, (1 - MISSED) * weights[-1] - 1e-12)
    return float(rows["size"].to_numpy()[order][at])


def bars(rows: pd.DataFrame) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """(form, step, kind, family) -> bar, of all rows scored as the form that they ran."""
    good = with_groups(rows[(rows.why == "") & (rows.form == rows.ran) & ~rows.suspect])
    found = {}
    for (ran, step), part in good.groupby(["ran", "step"]):
        for kind, of_class, family in _kinds(part):
            if (one := bar(part, kind, of_class, family, near=True)) is not None:
                found[ran, step, kind, family] = one
    return found


def _kinds(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    columns = ["kind", "class", "family"]
    return list(rows[columns].drop_duplicates().sort_values(columns).itertuples(index=False))


def held_out(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored rows with `error` from the other sources alone. Rows for which no other source has
    enough points are left out."""
    good = with_groups(rows[rows.why == ""])
    parts = []
    for (_, _, source), part in good.groupby(["form", "step", "source"]):
        one = part.iloc[0]
        same = (good.form == one.form) & (good.step == one.step)
        others = good[same & (good.source != source) & ~good.suspect]
        for kind, of_class, family in _kinds(part):
            found = bar(others, kind, of_class, family)
            if found is not None:
                mine = part[(part.kind == kind) & (part.family == family)]
                parts.append(mine.assign(error=found[0]))
    return pd.concat(parts) if parts else good.iloc[:0]
