"""Shortest first, by request and by application: two of Justitia's baselines (Yang et al., Sec.
V-A).

`vllm-sjf`  requests by their predicted duration. The paper predicts it with DistilBERT; here by the
            class and stage of a request, with `error` for how wrong that is: by default the 452 %
            that the paper reports of DistilBERT (Table II). A request's duration is the number of
            its decodes.
`srjf`      applications by the cost that is left of them: what was predicted minus what their
            requests that have ended really took, never below 0. A request counts as a whole until
            it ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinserve.policies.justitia.demand import DemandPolicy, DemandQueueOptions
from twinserve.policies.justitia.queues import OwnersQueue, RankedQueue
from twinserve.policies.parts.predictors import OracleByShortName
from twinserve.policies.parts.queue_policy import QueuePolicy
from twinserve.policies.requests import Application

DISTILBERT_ERROR = 4.52  # mean relative error, Table II


class SjfOptions(DemandQueueOptions):
    """predictor  of requests; `mlp` is about whole applications, and so no choice here
    error      by default that of the paper's baseline; 0 if a predictor is named that is exact
    """

    predictor: Annotated[Literal["class-mean", "perfect", "oracle-length"], OracleByShortName] = (
        "class-mean"
    )
    error: float = Field(DISTILBERT_ERROR, ge=0.0, le=100.0)

    @model_validator(mode="after")
    def _exact_ones_have_none(self) -> SjfOptions:
        if self.predictor != "class-mean" and "error" not in self.model_fields_set:
            object.__setattr__(self, "error", 0.0)  # a default still: it was not set
        return self

    @property
    def notice(self) -> str:
        return ""


class VllmSjfPolicy(DemandPolicy[SjfOptions]):
    name = "vllm-sjf"
    Options = SjfOptions
    waiting: RankedQueue

    def setup(self) -> None:
        super().setup()
        self.waiting = RankedQueue()
        self._duration: dict[int, int] = {}  # predicted decodes of a row

    def on_application(self, application: Application) -> None:
        if application.kind is not None:
            self._kinds[application.group] = application.kind

    def on_arrival(self, row, requests) -> None:
        self._requests = requests
        number = self.application_of(row)
        self.here.comes(number)
        kind = self._kinds.get(number)
        self._duration[row] = self.predictor.output_tokens(row, requests, kind)
        self.waiting.add(row, (self._duration[row],))

    def ends(self, row: int, number: int, cost: int) -> None:
        del self._duration[row]

    def rank(self, row: int) -> tuple:
        return self._duration[row], row


class SrjfPolicy(DemandPolicy[DemandQueueOptions]):
    name = "srjf"
    Options = DemandQueueOptions
    traits = replace(QueuePolicy.traits, orders_applications=True)
    waiting: OwnersQueue[int]

    def setup(self) -> None:
        super().setup()
        self.remaining: dict[int, int] = {}  # of applications by number, token-iterations
        self.waiting = OwnersQueue(self.remaining.__getitem__)

    def begins(self, number: int, demand: int, arrival_s: float) -> None:
        self.remaining[number] = demand

    def enqueue(self, row: int, number: int) -> None:
        self.waiting.add(row, number)

    def ends(self, row: int, number: int, cost: int) -> None:
        if number < 0:
            return
        self.remaining[number] = max(0, self.remaining[number] - cost)
        self.waiting.shrunk(number)
        self.reorder()

    def forget(self, number: int) -> None:
        super().forget(number)
        del self.remaining[number]
        self.waiting.forget(number)

    def rank(self, row: int) -> tuple:
        number = self.application_of(row)
        return self.remaining[number], self.waiting.place_of(number), row
