"""What a worker's /metrics says (vLLM 0.32, vllm/v1/metrics/loggers.py), as a router wants it.

A page has some thousand lines, and is read many times a second: so the few lines that count are
looked for, instead of parsing them all.
"""

import re
from typing import NamedTuple

from twinserve.sim.results.recorder import Load

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"  # a share of 0 to 1, whatever its name says
CACHE = "vllm:cache_config_info"
_MOST = 2**31  # requests, or KV blocks: what says more is no count of a server's
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class KvMemory(NamedTuple):
    """Of a worker. If it does not tell, a guess that only matters for `num_blocks`' share."""

    num_blocks: int = 2**14
    block_tokens: int = 16


def read_load(text: str, at_s: float, memory: KvMemory) -> Load | None:
    """Return a worker's load over its engines, None if not on the page. at_s: seconds."""
    running, waiting = _values(text, RUNNING), _values(text, WAITING)
    if not running or not waiting:
        return None
    use = _values(text, KV_USE)
    share = sum(use) / len(use) if use else 0.0
    used = round(min(max(share, 0.0), 1.0) * memory.num_blocks)
    return Load(at_s, int(sum(running)), int(sum(waiting)), used, memory.num_blocks)


def read_memory(text: str) -> KvMemory:
    """Return a worker's KV blocks over its engines, and the tokens in one."""
    blocks, size = 0, 0
    for line in _lines(text, CACHE):
        labels = dict(_LABEL.findall(line))
        blocks += _count(labels.get("num_gpu_blocks"))
        size = _count(labels.get("block_size")) or size
    guess = KvMemory()
    return KvMemory(blocks or guess.num_blocks, size or guess.block_tokens)


def _count(text: str | None) -> int:
    well = text and text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    return min(int(text), _MOST) if text and well else 0


def _lines(text: str, name: str) -> list[str]:
    """Samples of one metric. A name that goes on is another one."""
    found, start = [], 0
    while (start := text.find(f"\n{name}", start)) >= 0:
        start += 1
        end = text.find("\n", start)
        line = text[start : end if end >= 0 else len(text)]
        if line[len(name) : len(name) + 1] in ("{", " "):
            found.append(line)
    return found


def _values(text: str, name: str) -> list[float]:
    values = []
    for line in _lines(text, name):
        try:
            values.append(float(line.rpartition("}")[2].split()[-1]))
        except (ValueError, IndexError):
            continue
    return [value for value in values if 0 <= value <= _MOST]  # not NaN either
