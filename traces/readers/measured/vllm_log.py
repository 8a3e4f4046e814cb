"""Logs of a vLLM server with --enable-log-requests (and --enable-log-outputs).

    INFO 11-23 01:00:07 [request_logger.py:66] Received request cmpl-1-0: params: SamplingParams(...
        max_tokens=128, ...), lora_request: None.
    DEBUG 11-23 01:00:07 [...] Request cmpl-1-0 details: prompt: '...',
        prompt_token_ids: [1, 2], prompt_embeds shape: None.
    DEBUG 11-23 01:00:09 [...] Generated response cmpl-1-0 (streaming complete) details:
        output_token_ids: [3, 4]
    INFO 11-23 01:00:09 [...] Generated response cmpl-1-0 (streaming complete): output: '...', ...

Source: vllm/entrypoints/serve/utils/request_logger.py of vLLM 0.32.0; older versions have
prompt_token_ids in the line of the request and output_token_ids in that of the response, which are
read too. Stamps have whole seconds and no year. Prompt lengths are in the log only where token ids
are: at level DEBUG (VLLM_LOGGING_LEVEL=DEBUG) today.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from twinserve.traces.measurement import SERVER, Measurement
from twinserve.traces.readers.columns import Rows
from twinserve.traces.readers.jsonl import decode_text
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.readers.text import estimate_tokens
from twinserve.traces.workload import WorkloadError

NAME = "vllm-log"
RECEIVED = re.compile(r"\bReceived request (\S+): ")
DETAILS = re.compile(r"\bRequest (\S+) details: ")
GENERATED = re.compile(r"\bGenerated response (\S+?)(?: \(streaming (\w+)\))?( details)?: ")
STAMP = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
PROMPT_IDS = re.compile(r"\bprompt_token_ids: \[([\d, ]*)\]")
OUTPUT_IDS = re.compile(r"\boutput_token_ids: (?:array\('\w', )?[\[(]([\d, ]*)[\])]")
MOST = re.compile(r"\bmax_tokens=(\d+)")
OUTPUT = re.compile(r"output: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
HALF_A_YEAR_S = 183 * 86_400.0


@dataclass
class _Request:
    """The log's facts on one request; None if missing."""

    name: str
    line: int
    arrival_s: float
    prompt: int | None = None
    most: int | None = None  # tokens that it asked for
    output: int | None = None
    estimated: int | None = None  # output tokens, from text
    ended_s: float | None = None


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a server's log. Raises WorkloadError."""
    found, prompts = _scan(decode_text(data, path), path)
    if not found:
        raise WorkloadError(
            f"{path}: no line 'Received request': start the server with --enable-log-requests"
        )
    requests = list(found.values())
    for request in requests:
        request.prompt = prompts.get(request.name, request.prompt)
    logged = any(r.ended_s is not None for r in requests)
    errors = ["no response in the log" if logged and r.ended_s is None else "" for r in requests]
    output, notices = _outputs(requests, errors)
    lengths = Counter(r.prompt for r in requests if r.prompt is not None)
    longest = max(lengths, default=0)
    if lengths[longest] > 1 and len(lengths) > 1:
        notices.append(
            f"{lengths[longest]} prompts have {longest} token ids, the most of all: if the "
            "server used --max-log-len, they were longer"
        )
    notices.append("times are whole seconds, as the log has them")
    prompts_field = Field(
        "prompt_token_ids",
        [r.prompt for r in requests],
        remedy="log at level DEBUG: VLLM_LOGGING_LEVEL=DEBUG",
    )
    lasted = [None if r.ended_s is None else r.ended_s - r.arrival_s for r in requests]
    return measured(
        NAME,
        Rows(path, [r.line for r in requests]),
        arrival_s=Field("Received request", [r.arrival_s for r in requests]),
        prompt_tokens=prompts_field,
        output_tokens=Field("max_tokens", output, remedy="log outputs too"),
        e2el_s=Field("Generated response", lasted),
        errors=errors,
        ids=Field("request", [r.name for r in requests]),
        measured_by=SERVER,
        coarse=True,
        notices=notices,
    )


def _scan(text: str, path: str) -> tuple[dict[str, _Request], dict[str, int]]:
    """Return requests by name in order of arrival, and prompt lengths from other lines."""
    found: dict[str, _Request] = {}
    prompts: dict[str, int] = {}
    clock = _Clock()
    for number, line in enumerate(text.splitlines(), 1):
        came, said = RECEIVED.search(line), DETAILS.search(line)
        ended = GENERATED.search(line)
        if came is None and said is None and ended is None:
            continue
        if said is not None and came is None:
            if ids := PROMPT_IDS.search(line):
                prompts[said[1]] = _count(ids[1])
            continue
        now = clock.seconds(line)
        if now is None:
            raise WorkloadError(
                f"{path}: line {number}: no time in front (MM-DD HH:MM:SS): keep vLLM's own format "
                "of log lines"
            )
        if came is not None:
            request = found[came[1]] = _Request(came[1], number, now)
            if ids := PROMPT_IDS.search(line):
                request.prompt = _count(ids[1])
            if most := MOST.search(line):
                request.most = int(most[1])
        elif ended is not None and ended[1] in found and ended[2] != "delta":
            _end(found[ended[1]], line, now)
    return found, prompts


def _end(request: _Request, line: str, now: float) -> None:
    request.ended_s = now
    if ids := OUTPUT_IDS.search(line):
        request.output = _count(ids[1])
    elif text := OUTPUT.search(line):
        request.estimated = estimate_tokens(_literal(text[1]))


def _literal(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _count(ids: str) -> int:
    return len(ids.split(",")) if ids.strip() else 0


def _outputs(requests, errors: list[str]) -> tuple[list[int | None], list[str]]:
    """Output tokens: by their ids, else estimated from their text, else what was asked for."""
    output: list[int | None] = []
    estimated = asked = 0
    for i, request in enumerate(requests):
        if request.output is not None:
            output.append(request.output)
        elif request.estimated is not None:
            output.append(request.estimated)
            estimated += 1
        elif errors[i]:
            output.append(0)
        elif request.most is not None:
            output.append(request.most)
            asked += 1
        else:
            output.append(None)
    notices = []
    if estimated:
        notices.append(f"{estimated} output lengths estimated from text: UTF-8 bytes / 4")
    if asked:
        notices.append(
            f"{asked} output lengths are max_tokens, an upper bound: run the server with "
            "--enable-log-outputs"
        )
    return output, notices


class _Clock:
    """Seconds from stamps without a year, which may pass the end of one."""

    def __init__(self) -> None:
        self.year = 2000  # a leap year: it has all days
        self.last: float | None = None

    def seconds(self, line: str) -> float | None:
        stamp = STAMP.search(line)
        if stamp is None:
            return None
        try:
            now = self._at(stamp)
            if self.last is not None and now < self.last - HALF_A_YEAR_S:
                self.year += 1
                now = self._at(stamp)
        except ValueError:
            return None
        self.last = now
        return now

    def _at(self, stamp: re.Match) -> float:
        month, day, hour, minute, second = stamp.groups()
        moment = np.datetime64(f"{self.year:04d}-{month}-{day}T{hour}:{minute}:{second}", "s")
        return float(moment.astype(np.int64))
