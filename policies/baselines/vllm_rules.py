"""Where releases of vLLM decide otherwise, as far as policy `vllm` goes (docs/invariants.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Release = Literal["0.15", "0.19", "0.25", "0.29", "0.32"]


def rules_of(version: str) -> Release:
    """The release of RULES whose rules a version of vLLM has: the last one that is not later; the
    first for older ones."""
    known = {name: _numbers(name) for name in RULES}
    earlier = [name for name, numbers in known.items() if numbers <= _numbers(version)]
    return earlier[-1] if earlier else next(iter(known))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("v").split("."))


@dataclass(frozen=True)
class VllmRules:
    """What a release does; the defaults are those of 0.32.

    reserves_whole_prompts  a request is admitted only if all its known text would fit now; before,
                            its first chunk was enough
    knows_watermark         blocks can be kept free of admissions
    blank_blocks_first      freed blocks without reusable text go to the front of the free queue;
                            before, they waited their turn among the cached ones
    cursor_follows_victims  under priorities, a victim that was passed over in this step (its last
                            token is on its way) moves the scan back by one, as others do; before,
                            the request behind it was left out of the step
    lone_prompt_uncapped    long_prefill_token_threshold does not bind a request without company
    """

    reserves_whole_prompts: bool = True
    knows_watermark: bool = True
    blank_blocks_first: bool = True
    cursor_follows_victims: bool = True
    lone_prompt_uncapped: bool = True


RULES: dict[Release, VllmRules] = {
    "0.15": VllmRules(False, False, False, False, False),
    "0.19": VllmRules(True, False, False, False, False),
    "0.25": VllmRules(True, True, True, False, False),
    "0.29": VllmRules(True, True, True, True, False),
    "0.32": VllmRules(),
}
