"""LayerKV's options."""

from typing import Annotated, Literal

from pydantic import Field

from twinserve.policies.baselines.vllm_v0 import VllmV0Options
from twinserve.policies.parts.predictors import OracleByShortName

MAX_PARKED = 64  # a quarter of the seats that an engine of the paper has


class LayerKvOptions(VllmV0Options):
    """The options of `vllm-v0`, and one for each part of the paper, which switches it off.

    slo_aware     Algorithm 1; off: prompts begin as soon as there is memory
    savable_only  ignore requests that will miss their objective even without another prompt (a
                  negative allowance); off, as printed: no prompt begins while there is one
    layer_wise    off: a request's layers are all on the device
    x             layers that stay on the device at least; None: by eqs. 3-4
    retain        max: as many layers stay as the forecast has room for; min: x
    proactive     layers leave when the forecast says so; off: when a step finds no memory
    promote       layers come back while the forecast allows; off: they are fetched for every step
    park          a request whose layers on the host cannot be fetched during the step waits there;
                  off: every request decodes in every step, which lasts as long as its transfers
    max_parked    while so many requests have layers on the host, only prompts begin whose layers
                  all stay on the device; None: as many as there are seats
    interleaved   every other layer leaves first; off: the first ones
    threshold     fraction of blocks; the paper's preset threshold of eq. 5
    horizon       stages of `block_tokens` steps that eq. 5 looks ahead
    predictor     of output lengths. trained: has learned from other requests of the same workload
                  before the first one comes, and no more after it (from none: as history); history:
                  learns from requests that ended; perfect: knows the class, an ablation;
                  oracle-length, or oracle: knows the length, a bound
    length_classes  classes of `trained` and `history`
    accuracy      of `perfect`: the share of requests that get their true class; others get a
                  neighbouring one
    current_tpot  of eq. 1. step: seconds of a decode step; request: the same times running requests
                  over those that decoded in it, which is the time between two tokens of a request
                  if some lack their layers
    tpot_window   decode steps that the mean covers
    allreduce_share  of the link's time that eqs. 3-4 reckon with for all-reduce; 0 with NVLink or
                     on one GPU (Sec. 3.1.3)
    allreduce_check  a transfer looks whether the link is in use before it sends each sub-unit; off:
                     it shares the link
    allreduce_wait, allreduce_unit  wait between looks at a busy link, and time of a sub-unit, in
                                    lengths of an all-reduce
    """

    slo_aware: bool = True
    savable_only: bool = False
    layer_wise: bool = True
    x: int | None = Field(None, ge=0)
    retain: Literal["max", "min"] = "max"
    proactive: bool = True
    promote: bool = True
    interleaved: bool = True
    threshold: float = Field(0.05, ge=0.0, lt=1.0)
    horizon: int = Field(4, ge=0, le=10_000)
    park: bool = True
    max_parked: int | None = Field(MAX_PARKED, ge=0)
    predictor: Annotated[
        Literal["trained", "history", "perfect", "oracle-length"], OracleByShortName
    ] = "trained"
    length_classes: int = Field(4, ge=1, le=512)
    accuracy: float = Field(1.0, ge=0.0, le=1.0)
    current_tpot: Literal["step", "request"] = "step"
    tpot_window: int = Field(32, ge=1)
    allreduce_share: float = Field(0.0, ge=0.0, le=0.99)
    allreduce_check: bool = True
    allreduce_wait: float = Field(0.5, ge=0.01, le=1000.0)
    allreduce_unit: float = Field(0.25, ge=0.01, le=1000.0)

    @property
    def wants_sample(self) -> bool:
        return self.predictor == "trained" and (self.slo_aware or self.layer_wise)
