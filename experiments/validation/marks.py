"""Measurements of decode steps on vLLM, one number each (`data.yaml`)."""

from typing import NamedTuple

from twinserve.experiments.study.claims import texts
from twinserve.profiles.composition import StepComposition, decode_work


class Mark(NamedTuple):
    """engine: MODEL@GPU[:tpN]; requests that decode, tokens of context each, milliseconds."""

    engine: str
    requests: int
    context: int
    ms: float

    @property
    def step(self) -> tuple[StepComposition, float]:
        """Its work and its seconds."""
        return decode_work(self.requests, self.context), self.ms * 1e-3


MARKS, OWN = (
    tuple(Mark(*row) for row in rows)
    for data in [texts(__file__, "data.yaml")]
    for rows in (data.MARKS, data.OWN)
)
