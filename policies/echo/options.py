"""Echo's options, and those of its ladder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from twinserve.policies.base import Options


class EchoOptions(Options):
    """One option for each part of the paper, which switches it off. The paper's ladder BS, +E, +S,
    +M goes from all off to all on.

    slo_aware       E: iterations are bounded by the online requests' SLO, by estimate
    kv_aware        S: offline requests by reward (eq. 4); off: first come, first served
    threshold       M, with the ledger `task-aware`: offline requests are begun only where mu +
                    sigmas * sigma of online memory stays free for the online ones
    sigmas          2 in the paper ("a hyperparameter that can be tuned")
    history_s       seconds of the past that mu and sigma are of
    sample_s        seconds between two samples of it
    slo             cumulative: token i is due at arrival + TTFT + i * TPOT, as in the paper; gap:
                    TPOT after the last one
    length_buckets  the pool is divided by prompt length
    b_decode        b of a decoded token (eq. 1); that of a prompt's token is 1
    b_hit           ours: b of a prompt's token found in the cache. 0 as in eq. 1, which counts
                    processed tokens
    offline         how eq. 4 is used. rank: decodes leave for the bound or for memory only, and the
                    best candidates are added while both hold; climb: requests are added and left
                    out while the reward rises, so that decodes may pause for it
    patience_s      ours: a queued request that came so many seconds after the first of the queue
                    does not overtake it
    benefit         which tokens count in eq. 4. all: of every request, as printed; offline: ours,
                    only of offline requests, since arrivals decide what online requests get
    edits           of climb. all: requests are added and left out until no single edit pays;
                    adding: decodes are chosen first, then prompts; no choice is undone
    feedback        ours: weight of the newest iteration in a factor, actual over estimated time,
                    that corrects the estimate; 0: none, as in the paper
    """

    slo_aware: bool = True
    kv_aware: bool = True
    threshold: bool = True
    sigmas: float = Field(2.0, ge=0, le=1e6)
    history_s: float = Field(3600.0, gt=0, le=1e7)
    sample_s: float = Field(1.0, ge=1e-3)
    slo: Literal["cumulative", "gap"] = "cumulative"
    length_buckets: bool = True
    b_decode: float = Field(1.0, gt=0)
    b_hit: float = Field(0.0, ge=0, le=1e6)
    offline: Literal["rank", "climb"] = "rank"
    patience_s: float = Field(3600.0, ge=0, le=1e9)
    benefit: Literal["all", "offline"] = "all"
    edits: Literal["all", "adding"] = "all"
    feedback: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _edits_of_a_climb(self) -> EchoOptions:
        if self.edits != "all" and self.offline != "climb":
            raise ValueError(f"edits={self.edits} needs offline=climb; add it, or drop edits")
        return self


class EchoBsOptions(EchoOptions):
    slo_aware: bool = False
    kv_aware: bool = False
    threshold: bool = False


class EchoBsEOptions(EchoOptions):
    kv_aware: bool = False
    threshold: bool = False


class EchoBsESOptions(EchoOptions):
    threshold: bool = False
