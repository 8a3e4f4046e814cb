"""A streamed answer that goes on at another worker when its own is lost.

The worker is asked to send token ids with the text (`return_token_ids` of vLLM), so the front knows
the tokens so far. The next worker gets prompt and generated tokens as the prompt of a completion,
with as many tokens less to generate. Under greedy decoding it continues as the first one would
have. A client sees one answer: one id, one count of tokens, and no token ids unless it asked for
them.

Text of a token may come with a later one (half a character). So the next worker begins after the
last token whose text came, and those after it are generated again.

Some answers cannot continue like that. What depends on the answer's beginning is not in the prompt:
several answers at once, stop strings, structured output, tools, log-probabilities, penalties of the
answer's own tokens. Nor is a picture in the tokens that stand for it. Fields that are not known
here count as such. Sampled answers (temperature above 0) do go on, with other draws.
"""

import json
from collections.abc import Mapping
from typing import Any

from twinserve.backends.live.route.messages import DONE, data_of, event_of, is_done, payload_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# fields that mean the same for the rest of an answer as for the whole
_SAME = frozenset(
    "model temperature top_p top_k min_p seed user logit_bias allowed_token_ids ignore_eos "
    "stop_token_ids skip_special_tokens spaces_between_special_tokens repetition_penalty priority "
    "vllm_xargs stream stream_options cache_salt request_id return_token_ids".split()
)
_COUNTED = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
# fields of the prompt, which the next worker gets as tokens
_OF_PROMPT = frozenset(
    "prompt messages add_special_tokens chat_template chat_template_kwargs "
    "add_generation_prompt".split()
)
_PENALTIES = ("frequency_penalty", "presence_penalty")  # of the answer's own tokens
# what a field may be if it is there at all: its default, that changes nothing
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ("", []),
    "logprobs": (False,),  # None is no value
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "bad_words": ([],),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}


def obstacle(path: str, body: Mapping[str, Any]) -> str | None:
    """Return the field for which an answer could not continue elsewhere, or None."""
    for name, value in body.items():
        if value is None or name in _SAME or name in _OF_PROMPT:
            continue
        if name in _COUNTED and type(value) is int:  # "8" is one to vLLM, too
            continue
        if name in _PENALTIES and value == 0:
            continue
        # 0 is False to Python: logprobs=0 asks for some
        known = _DEFAULTS.get(name, ())
        if not any(value == one and type(value) is type(one) for one in known):
            return name
    prompt = body.get("prompt")
    if path == COMPLETIONS and not (isinstance(prompt, str) or _tokens(prompt)):
        return "prompt"
    if path == CHAT and not _texts_alone(body.get("messages")):
        return "messages"
    return None


def _texts_alone(messages: Any) -> bool:
    """Whether token ids are all of a chat: no picture, no sound."""
    return isinstance(messages, list) and all(
        isinstance(message, Mapping) and _text_alone(message.get("content")) for message in messages
    )


def _text_alone(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")
        for part in content
    )


def _tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


class Continuation:
    """One answer. It reads what workers stream (`event`), and says what to ask the next one.

    broken  why it cannot go on elsewhere, found while it streamed; empty: it can
    ended   the client has its last event
    aborted the worker gave it up, as vLLM does on SIGTERM, though its client still waits
    """

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self._path, self._body = path, body
        self._asked_for_ids = bool(body.get("return_token_ids"))
        self._prompt: list[int] | None = None
        self._generated: list[int] = []
        self._shown = 0  # of these, tokens whose text the client has
        self._base = 0  # that this worker got as part of its prompt
        self._head: dict[str, Any] = {}  # id, created and model of the first worker's answer
        self._finish = False
        self._moved = False  # a worker is asked that is not the first, and the client has a begin
        self._as_completion = False  # that one was asked for a completion
        self._told_usage = False
        self.ended = self.aborted = False
        self.broken = ""

    @property
    def chat(self) -> bool:
        return self._path == CHAT

    def first(self) -> bytes:
        """Return the body for the first worker."""
        return json.dumps({**self._body, "return_token_ids": True}).encode()

    @property
    def complete(self) -> bool:
        """Return whether all tokens have come. Only what follows them may be missing."""
        limit = self._limit()
        return self._finish or (limit is not None and self._shown >= limit > 0)

    @property
    def generated(self) -> int:
        return len(self._generated)

    def next(self) -> tuple[str, bytes]:
        """Return path and body for the next worker. Only if `broken` is empty and not
        `complete`."""
        del self._generated[self._shown :]
        self._base = len(self._generated)
        self._moved, self.aborted = bool(self._head), False
        # nothing was shown: as at first. A worker that takes thoughts and calls out of a chat must
        # see these begin.
        if self._prompt is None or (self.chat and not self._shown):
            return self._path, self.first()
        self._as_completion = True
        body = {
            name: value for name, value in self._body.items() if name in _SAME and value is not None
        }
        body |= {"prompt": [*self._prompt, *self._generated], "return_token_ids": True}
        limit = self._limit()
        body["max_tokens"] = None if limit is None else max(limit - self._base, 1)
        if self._body.get("min_tokens"):
            body["min_tokens"] = max(self._body["min_tokens"] - self._base, 0)
        return COMPLETIONS, json.dumps(body).encode()

    def _limit(self) -> int | None:
        """Of the whole answer's tokens."""
        for name in ("max_completion_tokens", "max_tokens")[0 if self.chat else 1 :]:
            if isinstance(self._body.get(name), int):
                return self._body[name]
        if self.chat or "max_tokens" in self._body:
            return None
        return 16  # of completions, by OpenAI's and vLLM's default

    # -- what a worker streams ---------------------------------------------------------------------
    def event(self, event: bytes) -> bytes:
        """Return what the client gets for an event of a worker; empty: nothing."""
        if is_done(event):
            self.ended = True
            return event
        data = data_of(event)
        if data is None:
            if payload_of(event):
                self.broken = "the worker sent an event that route cannot read"
            return event
        if data.get("error"):  # of a worker that is well: its answer, as any other
            self.ended = True
            return event
        self._told_prompt(data)
        choices = data.get("choices") or []
        if any(choice.get("finish_reason") == "abort" for choice in choices):
            self.aborted = True
            return b""
        for choice in choices:
            self._told(choice)
        if "id" in data and not self._head:
            self._head = {name: data[name] for name in ("id", "created", "model") if name in data}
        self._told_usage |= bool(data.get("usage")) and not choices
        if self._moved:
            data |= self._head
            self._as_one(data)
            if self.chat and self._as_completion:
                self._as_chat(data)
            elif self.chat and not _without_role(choices):
                return b""
        return event_of(data)

    def _told_prompt(self, data: dict[str, Any]) -> None:
        """Prompt tokens: of a chat next to the choices, of a completion in the first."""
        for holder in (data, *(data.get("choices") or [])):
            found = holder.get("prompt_token_ids")
            if found is not None and self._prompt is None:
                self._prompt = list(found)
            if found is not None and (not self._asked_for_ids or self._moved):
                holder["prompt_token_ids"] = None  # as if not asked for

    def _told(self, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids") or []
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        self._generated += ids
        if text or self._asked_for_ids:  # a client that counts tokens gets none twice
            self._shown = len(self._generated)
        if text and not ids:
            self.broken = "the worker sends no token ids"
        elif text and self._prompt is None:
            self.broken = "the worker does not send the prompt's token ids"
        if delta is not None and any(
            value for name, value in delta.items() if name not in ("role", "content")
        ):
            self.broken = "a tool call or a thought had begun"
        if choice.get("finish_reason") is not None:
            self._finish = True
        if not self._asked_for_ids and "token_ids" in choice:
            choice["token_ids"] = None

    def _as_one(self, data: dict[str, Any]) -> None:
        """Counts of tokens are of the whole answer."""
        usage = data.get("usage")
        if not isinstance(usage, dict):
            return
        if isinstance(usage.get("prompt_tokens"), int):
            usage["prompt_tokens"] -= self._base
        if isinstance(usage.get("completion_tokens"), int):
            usage["completion_tokens"] += self._base

    def _as_chat(self, data: dict[str, Any]) -> None:
        """A chunk of a completion as one of a chat."""
        data["object"] = "chat.completion.chunk"
        for choice in data.get("choices") or []:
            choice["delta"] = {"content": choice.pop("text", "")}
            choice.pop("prompt_token_ids", None)

    def closing(self) -> list[bytes]:
        """Return the end of an answer whose worker was lost after the last token."""
        events = []
        if not self._finish:
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
            choice |= {"delta": {}} if self.chat else {"text": ""}
            events.append(event_of({**self._head, "object": self._kind, "choices": [choice]}))
        if (self._body.get("stream_options") or {}).get("include_usage") and not self._told_usage:
            events.append(self._usage_event())
        return [*events, DONE]

    def _usage_event(self) -> bytes:
        prompt, completion = len(self._prompt or ()), len(self._generated)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return event_of({**self._head, "object": self._kind, "choices": [], "usage": usage})

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"


def _without_role(choices: list[dict[str, Any]]) -> bool:
    """The client has it from the first worker. Whether anything is left to tell."""
    roles = [delta.pop("role", None) for one in choices if (delta := one.get("delta")) is not None]
    return not any(roles) or any(
        one.get("finish_reason") or any(one["delta"].values()) for one in choices
    )
