"""What the installed vLLM can do, as far as the comparison touches it: told by what is there and by
what it decides, never by its version."""

import dataclasses
import functools
import inspect

from tests.identity.protocol import EngineSettings
from twinserve.policies.baselines.vllm import RULES, VllmRules


def with_fields(kind: type, **arguments):
    """`kind(...)` with those of `arguments` that its release has fields for."""
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in arguments.items() if name in known})


def no_end_of_text(kind: type) -> dict:
    """What a request's constructor asks for besides, in releases that want to know the token that
    ends a text."""
    asked = "eos_token_id" in inspect.signature(kind).parameters
    return {"eos_token_id": None} if asked else {}


def seats(scheduler) -> int:
    """How many requests it runs together; the name of the field has changed."""
    for name in ("max_num_active_reqs", "max_num_running_reqs"):
        if hasattr(scheduler, name):
            return getattr(scheduler, name)
    raise AttributeError("this vLLM's scheduler does not say how many requests run together")


def batches_under_way(config) -> int:
    """How many steps an engine of this VllmConfig schedules before it hears of the first one; older
    releases leave it to the executor, which goes by the setting."""
    of_setting = 2 if config.scheduler_config.async_scheduling else 1
    return getattr(config, "max_concurrent_batches", of_setting)


def computes_chunk(request) -> bool:
    """Whether the step just scheduled leaves known tokens of it to compute. Without a field for
    that: the count of computed tokens is ahead already, and a token in flight is not of a prompt's
    chunk."""
    if hasattr(request, "is_prefill_chunk"):
        return request.is_prefill_chunk
    return request.num_output_placeholders == 0 and request.num_computed_tokens < request.num_tokens


def known_settings(settings: EngineSettings) -> EngineSettings:
    """`settings` without what the installed release does not know."""
    from vllm.config import SchedulerConfig

    known = SchedulerConfig.__dataclass_fields__
    changes = {}
    if "watermark" not in known:
        changes["watermark"] = 0.0
    if "scheduler_reserve_full_isl" not in known:
        changes["reserve_full_isl"] = False
    return dataclasses.replace(settings, **changes)


@functools.cache
def installed_rules() -> VllmRules:
    """The rules that the installed release is seen to follow."""
    from vllm.config import SchedulerConfig

    known = SchedulerConfig.__dataclass_fields__
    return VllmRules(
        reserves_whole_prompts="scheduler_reserve_full_isl" in known,
        knows_watermark="watermark" in known,
        blank_blocks_first=_blank_blocks_first(),
        cursor_follows_victims=_cursor_follows_victims(),
        lone_prompt_uncapped=_lone_prompt_uncapped(),
    )


def installed_release() -> str:
    """The release, of those that policy `vllm` knows, whose rules these are. Raises LookupError
    where it knows none: the installed one decides in a way of its own."""
    rules = installed_rules()
    for release, known in RULES.items():
        if known == rules:
            return release
    raise LookupError(
        f"no release known to policy vllm has the rules of the installed one: {rules}"
    )


def with_own_rules(options: dict) -> dict:
    """Options of a server, of which policy vllm takes the rules of the installed release."""
    if options["policy"] != "vllm":
        return options
    return options | {"policy": f"vllm:release={installed_release()}"}


def _scheduler(**settings):
    from tests.identity.real_scheduler import RealScheduler

    return RealScheduler(known_settings(EngineSettings(**settings)))


def _lone_prompt_uncapped() -> bool:
    """A prompt longer than the cap, without company, is granted more than the cap."""
    side = _scheduler(
        num_blocks=16,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=256,
        long_prefill_token_threshold=32,
    )
    side.submit("lone", 60, 1)
    return side.step().scheduled["lone"] > 32


def _blank_blocks_first() -> bool:
    """A block freed without a name is used again before cached ones that were freed earlier."""
    side = _scheduler(
        num_blocks=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        enable_prefix_caching=True,
    )
    for name, prompt_tokens in (("cached", 32), ("half a block", 20), ("next", 10)):
        side.submit(name, prompt_tokens, 1)
        side.step()
    return side.counters.evictions == 0


def _cursor_follows_victims() -> bool:
    """Of three requests the first one, least urgent, is passed over, since its last token is on its
    way; the second one needs a block, and the first is the victim. Is the third one granted its
    token in this step all the same?"""
    side = _scheduler(
        num_blocks=5,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=64,
        policy="priority",
        async_scheduling=True,
    )
    side.submit("ends", 16, 2, priority=9)
    side.step()
    side.submit("grows", 16, 8, priority=1)
    side.submit("last", 20, 8, priority=2)
    side.step()  # all five blocks are taken
    seen = side.step()
    if seen.preempted != ("ends",) or "grows" not in seen.scheduled:
        raise LookupError(f"the installed vLLM does not preempt as expected: {seen}")
    return "last" in seen.scheduled
