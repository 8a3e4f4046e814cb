"""`twinserve.check`: a measured server at another rate, and whether to believe the prediction."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from twinserve.sim.api.html import Printed
from twinserve.sim.api.settings import check_names, in_pythons_words, several
from twinserve.sim.twin.predicted import Prediction, predict

_SERVER = ("num_blocks", "block_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(frozen=True, eq=False, repr=False)
class Check(Printed):
    """A prediction with its range and a verdict."""

    found: Prediction

    @property
    def verdict(self) -> str:
        """Return the verdict on the prediction, in a sentence."""
        return self.found.verdict

    @property
    def document(self) -> dict[str, Any]:
        """What `twinserve check --json` prints."""
        return self.found.document()

    @property
    def table(self) -> pd.DataFrame:
        """A row a number: measured, simulated at the measured rate, predicted at the other one, and
        its range (low, high). Latencies in seconds."""
        return pd.DataFrame(self.document["numbers"])

    def __repr__(self) -> str:
        return f"<Check at {self.found.factor:g}x: {self.verdict}>"

    def __str__(self) -> str:
        return "\n".join([self.verdict, "", *self.found.lines()]).rstrip()


@in_pythons_words
def check(
    bench: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    profile: str | None = None,
    at: float | str = 1.0,
    config: str | os.PathLike | None = None,
    saturated: bool = False,
    **settings: int,
) -> Check:
    """Predict a measured server at another rate, with a verdict on the prediction.

    bench      results of `vllm bench serve --save-detailed`, or of other tools that time single
               requests; several are loads of one server. One result without single requests is
               compared by its means and percentiles
    profile    to begin with: of similar hardware
    at         factor on the measured rate of requests, or on the clients of a closed loop: 2.0,
               or "2x"
    config     a run.json with the server's settings
    saturated  fit all of a file, even if the server's queue grew

    Other arguments are settings of the server: num_blocks, block_tokens, max_num_seqs,
    max_num_batched_tokens, max_model_len. Raises TwinserveError.
    """
    given = {**settings, **({} if profile is None else {"profile": profile})}
    check_names(given, ("profile", *_SERVER))
    files = [Path(file) for file in several(bench)]
    return Check(predict(files, given, str(at), config and Path(config), saturated))
