"""Data sets of texts rather than of load: ShareGPT conversations and vLLM's `custom` JSONL.

ShareGPT  [{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}, ...]
          A request is the first prompt of a conversation and the answer to it.
custom    {"prompt": "...", "output_tokens": 100}, optionally with a "timestamp" in seconds.

Lengths are the row's own counts if present (`prompt_tokens`, `output_tokens` or the Mooncake
names). Otherwise they are estimated from the text: UTF-8 bytes / 4, rounded up, about what
byte-pair vocabularies give for English and CJK text. If rows have no timestamps, arrivals are
generated: a Poisson process.
"""

import json

import numpy as np

from twinserve.traces.readers import jsonl
from twinserve.traces.readers.columns import Rows, assemble, shown, unused
from twinserve.traces.readers.options import DEFAULT_RATE, ReadOptions
from twinserve.traces.workload import Workload, WorkloadError

SHAREGPT, CUSTOM = "sharegpt", "custom"
HAS_ARRIVALS = "has its own arrivals and would ignore a rate: drop it, or use --rate-scale"
BYTES_PER_TOKEN = 4
ASKERS = ("human", "user")
ANSWERERS = ("gpt", "assistant", "chatgpt", "bing", "bard")
PROMPT_NAMES = ("prompt_tokens", "input_tokens", "input_length", "prompt_len")
OUTPUT_NAMES = ("output_tokens", "output_length", "output_len", "completion_tokens")
ESTIMATED = f"prompt tokens estimated from text: UTF-8 bytes / {BYTES_PER_TOKEN}"


def estimate_tokens(text: str) -> int:
    """Return a text's tokens without a tokenizer: UTF-8 bytes / 4, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def poisson_arrivals(n: int, options: ReadOptions) -> tuple[np.ndarray, str]:
    """n arrivals in seconds at `options.rate`, and the notice that says so."""
    rate = DEFAULT_RATE if options.rate is None else options.rate
    rng = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(0xA1,)))
    said = f"Poisson arrivals at {rate:g} requests/s, seed {options.seed}: the file has none"
    return np.cumsum(rng.exponential(1 / rate, n)), said


def read_custom(data: bytes, path: str, options: ReadOptions) -> Workload:
    """The workload of a vLLM `custom` file. Raises WorkloadError."""
    rows, where = jsonl.parse(data, path)
    prompts = jsonl.column(rows, *PROMPT_NAMES) or [None] * len(rows)
    texts = where.texts("prompt", [_flat(r.get("prompt")) for r in rows])
    estimated = False
    for row, text in enumerate(texts):
        if prompts[row] is None:
            if text is None:
                where.fail(row, "prompt", "is missing")
            prompts[row], estimated = estimate_tokens(text), True
    output = where.whole("output_tokens", jsonl.required(rows, where, *OUTPUT_NAMES))
    stamps = jsonl.column(rows, "timestamp")
    notices = unused(
        [name for row in rows for name in row],
        ("prompt", "timestamp", *PROMPT_NAMES, *OUTPUT_NAMES),
    )
    notices += [ESTIMATED] if estimated else []
    if stamps is None and options.time_unit is not None:
        raise WorkloadError(
            f"{path}: has no timestamps and would ignore a time_unit ({options.time_unit}): "
            "leave it out"
        )
    if stamps is None:
        arrival, notice = poisson_arrivals(len(rows), options)
        notices.append(notice)
    elif options.rate is not None:
        raise WorkloadError(f"{path}: {HAS_ARRIVALS}")
    elif options.time_unit == "ms":
        arrival = where.number("timestamp", stamps) / 1000
    else:
        arrival = where.number("timestamp", stamps)
    return assemble(
        where,
        name=CUSTOM,
        arrival_s=arrival,
        prompt_tokens=where.whole("prompt", prompts),
        output_tokens=output,
        notices=notices,
    )


def _flat(prompt: object) -> object:
    """vLLM also takes a list of chat messages as the prompt: their texts, joined."""
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        return "\n".join(str(m.get("content", "")) for m in prompt)
    return prompt


def read_sharegpt(data: bytes, path: str, options: ReadOptions) -> Workload:
    """The workload of a ShareGPT file: one row a conversation that has a prompt and an answer."""
    text = jsonl.decode_text(data, path)
    try:
        talks = json.loads(text, parse_constant=jsonl.no_constant)
    except json.JSONDecodeError as e:
        torn = e.pos >= len(text.rstrip()) - 1
        problem = "the file ends in the middle" if torn else f"not JSON ({shown(e.msg)})"
        raise WorkloadError(f"{path}: line {e.lineno}: {problem}: fetch the file again") from None
    except (ValueError, RecursionError) as e:
        raise WorkloadError(
            f"{path}: not JSON ({shown(jsonl.reason(e))}): fetch the file again"
        ) from None
    if type(talks) is not list or not talks:
        raise WorkloadError(f"{path}: not a list of conversations: check the path and the format")
    where = Rows(path, range(1, len(talks) + 1), "item")
    prompt, output, estimated, kept, longer = [], [], False, [], 0
    for row, talk in enumerate(talks):
        if type(talk) is not dict:
            where.fail(row, "conversations", f"is missing: the item is {shown(talk)}")
        own = [
            next((talk[k] for k in names if k in talk), None)
            for names in (PROMPT_NAMES, OUTPUT_NAMES)
        ]
        if None in own:
            pair = _first_pair(talk, where, row)
            if pair is None:
                continue
            own = [estimate_tokens(t) for t in pair]
            estimated = True
            longer += _answers(talk) > 1
        prompt.append(own[0])
        output.append(own[1])
        kept.append(row)
    if not kept:
        raise WorkloadError(
            f"{path}: no conversation with a prompt and an answer: check the format"
        )
    arrival, notice = poisson_arrivals(len(kept), options)
    notices = [notice]
    if estimated:
        notices.insert(0, ESTIMATED.replace("prompt tokens", "prompt and output tokens"))
    if longer:
        notices.append(
            f"{longer} conversations have further turns: only the first prompt and answer is taken"
        )
    if len(kept) < len(talks):
        skipped = len(talks) - len(kept)
        notices.append(f"{skipped} conversations without a prompt and an answer dropped")
    where = where.kept(kept)
    return assemble(
        where,
        name=SHAREGPT,
        arrival_s=arrival,
        prompt_tokens=where.whole("prompt_tokens", prompt),
        output_tokens=where.whole("output_tokens", output),
        notices=notices,
    )


def _answers(talk: dict) -> int:
    turns = talk.get("conversations", talk.get("conversation"))
    said = [t.get("from", t.get("role")) for t in turns if type(t) is dict]
    return sum(isinstance(who, str) and who in ANSWERERS for who in said)


def _first_pair(talk: dict, where: Rows, row: int) -> tuple[str, str] | None:
    """The first human turn that is followed by an answer, and that answer."""
    turns = talk.get("conversations", talk.get("conversation"))
    if type(turns) is not list:
        where.fail(row, "conversations", f"is {shown(turns)}, not a list of turns")
    last = None
    for turn in turns:
        if type(turn) is not dict:
            where.fail(row, "conversations", f"holds {shown(turn)}, not a turn")
        who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(said, str):
            last = None
        elif isinstance(who, str) and who in ASKERS:
            last = said
        elif last is not None and isinstance(who, str) and who in ANSWERERS:
            return last, said
    return None
