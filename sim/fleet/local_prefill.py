"""Which prompts are computed where they are decoded, in a fleet that could compute them apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from twinserve.policies.base import NoOptions, Options
from twinserve.policies.names import built

RuleOptions = TypeVar("RuleOptions", bound=Options)


class LocalPrefill(ABC, Generic[RuleOptions]):
    """asks     it wants to know the decode replica, and so what of the prompt is cached there
    reserves    the request goes to that replica when its prompt has been computed; else one is
                chosen then
    """

    name: ClassVar[str]
    Options: type[RuleOptions] = NoOptions  # type: ignore[assignment]  # as of a Policy
    asks: ClassVar[bool] = True
    reserves: ClassVar[bool] = False

    def __init__(self, options: RuleOptions | None = None) -> None:
        self.options: RuleOptions = options or self.Options()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.options == self.options

    @abstractmethod
    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        """cached_tokens  of the prompt, at the decode replica
        least_in_flight   requests of the prefill replica that has the fewest
        """


class NoneLocal(LocalPrefill[NoOptions]):
    """Every prompt is computed apart; its decode replica is chosen afterwards, as vLLM's proxy for
    disaggregated prefill does."""

    name = "none"
    asks = False

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        return False


class LlmDOptions(Options):
    """threshold  tokens: a prompt with at least so many that are not cached is computed apart"""

    threshold: int = Field(0, ge=0)


class LlmD(LocalPrefill[LlmDOptions]):
    """llm-d's decider by prefixes (llm-d-inference-scheduler, `pd-profile-handler`): the decode
    replica is chosen first, and goes with the request."""

    name = "llm-d"
    Options = LlmDOptions
    reserves = True

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        return prompt_tokens - cached_tokens < self.options.threshold


class DynamoOptions(Options):
    """tokens, share  a prompt is computed where it is decoded if fewer tokens are not cached than
                      both of these, the second of the whole prompt
    busy              and wherever every prefill replica has so many requests; None: never for that
    """

    tokens: int = Field(2048, ge=0)
    share: float = Field(0.7, ge=0, le=1)
    busy: int | None = Field(None, ge=1)


class Dynamo(LocalPrefill[DynamoOptions]):
    """Dynamo's conditional disaggregation: the decode replica is asked about, and chosen anew when
    the prompt has been computed."""

    name = "dynamo"
    Options = DynamoOptions

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        options, new = self.options, prompt_tokens - cached_tokens
        short = new < options.tokens and new < options.share * prompt_tokens
        return short or (options.busy is not None and least_in_flight >= options.busy)


RULES: dict[str, type[LocalPrefill]] = {rule.name: rule for rule in (NoneLocal, LlmD, Dynamo)}


def parse_rule(text: str) -> LocalPrefill:
    """Read `dynamo`, or `llm-d:threshold=512`. Raises RegistryError."""
    return built("rule {} for local prefill", "local prefill", RULES, text)
