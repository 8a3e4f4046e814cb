"""Options of BROS with `chunk=fit`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from twinserve.policies.bros.options import BrosOptions


class BrosFitOptions(BrosOptions):
    """Those of `bros`, and

    fit_order      of real-time prompts. savable: residual time, those that can no longer be kept
                   last; residual: residual time alone, as printed; arrival: arrival
    fit_estimator  what step times are estimated by, where `--estimator` names nothing else. step:
                   beta once a step, chunks by what they attend to; printed: the paper's form
    fit_feedback   weight of the newest iteration with a prompt in a factor, actual over estimated
                   time, that corrects the estimate; 0: none
    fit_margin     share of a bound that is left free
    fit_least      tokens of the shortest chunk, but for the end of a prompt
    fit_share      share of the least TTFT objective that an iteration with a best-effort prompt
                   takes at most
    fit_age_s      seconds after which a best-effort request that got no token goes first, with a
                   shortest chunk an iteration
    """

    chunk: Literal["fit"] = "fit"  # type: ignore[assignment]
    adaptive_batch: bool = False
    fit_order: Literal["savable", "residual", "arrival"] = "savable"
    fit_estimator: Literal["step", "printed"] = "step"
    fit_feedback: float = Field(0.1, ge=0, le=1)
    fit_margin: float = Field(0.02, ge=0, lt=1)
    fit_least: int = Field(64, ge=1)
    fit_share: float = Field(0.25, gt=0, le=1)
    fit_age_s: float = Field(30.0, gt=0)

    @model_validator(mode="after")
    def _batch_of_some_use(self) -> BrosFitOptions:
        if "base_batch" in self.model_fields_set and not self.adaptive_batch:
            raise ValueError("base_batch needs adaptive_batch=true with chunk=fit; add it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_replacement(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"replacement": False, **given}

    @field_validator("order")
    @classmethod
    def _is_fit_order(cls, value: str) -> str:
        if value != "residual":
            raise ValueError("with chunk=fit it is fit_order that says so, by default; drop it")
        return value

    @field_validator("replacement", "late_drops", "reserve")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value not in (False, "none"):
            raise ValueError("there is none with chunk=fit; drop one of both")
        return value
