"""The settings of `--front-end`: a name or a file, and how server and clients are set up."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from twinserve.policies.base import Options
from twinserve.policies.names import parse_options, validated
from twinserve.profiles.front_end import (
    MOST_FACTOR,
    FrontEnd,
    Serving,
    load_front_end,
    name_and_options,
)
from twinserve.profiles.kv_memory.releases import parse_release
from twinserve.sim.setup.config import SettingsError

# Releases that tokenise in batches: the first request of a batch waits 2 ms for others
# (vllm/utils/async_utils.py, AsyncMicrobatchTokenizer; none in 0.9.2 and 0.24.0).
BATCH_WAIT_S, WAIT_SINCE, WAIT_UNTIL = 2e-3, (0, 10), (0, 23)
# Releases that parse the chat template for every chat, on the server's thread
# (vllm/entrypoints/chat_utils.py): up to 0.9.1 to detect its format (`_detect_content_format`,
# cached since pull request 20065), 0.11.0 to find its variables (`resolve_chat_template_kwargs`,
# cached since 0.11.1). CPU seconds of their code with Qwen3's template of 4,169 characters, jinja2
# 3.1.6.
FORMAT_S, FORMAT_UNTIL = 5.8e-3, (0, 9, 1)
VARIABLES_S, VARIABLES_IN = 12.7e-3, (0, 11, 0)
NO_TEMPLATE = "gpt-oss"  # models whose chats are rendered without a template


class FrontEndOptions(Options):
    """api_server_count, stream_interval: as of `vllm serve`.

    stream       stream answers; otherwise clients see only E2E
    chat         requests are chats, not completions
    client       one-process: one thread for all requests; many: one for each; none: no time
    host_factor  CPU times of the server's host over those in the front end's file; the client's
                 host counts as equally fast
    """

    api_server_count: int = Field(1, ge=1, le=64)
    stream_interval: int = Field(1, ge=1, le=1_000_000)
    stream: bool = True
    chat: bool = False
    client: Literal["one-process", "many", "none"] = "one-process"
    host_factor: float | None = Field(None, gt=0, le=MOST_FACTOR)

    @field_validator("client", mode="before")
    @classmethod
    def _named_none(cls, said: str | None) -> str:
        return said or "none"  # `none` says "not given" of other options


def parse_front_end(text: str) -> tuple[FrontEnd | None, Serving]:
    """Read `none`, `vllm`, `FILE.json`, or one of these with options: `vllm:client=many`. Raises
    ProfileError, RegistryError or SettingsError, one line each."""
    text, rest = name_and_options(text)
    front_end = load_front_end(text)
    if rest is None:
        return front_end, Serving()
    if front_end is None or front_end.threads is None:
        raise SettingsError(
            f"front end {text!r} has no service times, so it takes no options; take vllm, or "
            "measure a file with twinserve calibrate --front-end"
        )
    what = f"front end {text!r}"
    given = FrontEndOptions(**validated(what, FrontEndOptions, parse_options(what, rest, text)))
    own = given.model_dump(exclude={"api_server_count"})
    return front_end, Serving(given.api_server_count, **own)


def serving_of(serving: Serving, version: str | None, model: str) -> Serving:
    """Return the serving settings of a vLLM release for this model; None: the newest release."""
    if version is None:
        return serving
    release = parse_release(version)
    if WAIT_SINCE <= release[:2] <= WAIT_UNTIL:
        serving = replace(serving, batch_wait_s=BATCH_WAIT_S)
    if not serving.chat or model.startswith(NO_TEMPLATE):
        return serving
    parse_s = FORMAT_S * (release <= FORMAT_UNTIL) + VARIABLES_S * (release == VARIABLES_IN)
    return replace(serving, parse_s=parse_s)
