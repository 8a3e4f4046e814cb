"""What the log of a vLLM server's start says of its memory: `--kv-from-log`.

The lines, and what each settles:

- `GPU KV cache size: N tokens` (V0: `# GPU blocks: N`): the number itself
- `Available KV cache memory: X GiB`: the bytes, from which the number follows
- `Free memory on device (a/b GiB) ... Actual usage is ...` (V0: `model weights take ...`): the
  total, the utilisation and all terms, so the number at any utilisation
- `Model loading took X GiB`: the weights
- `Using V2 Model Runner`: the runner
"""

import re
from dataclasses import dataclass

from twinserve.profiles.kv_memory.cards import GIB

_COUNT = r"([0-9][0-9,]*)"
_DECIMAL = r"([0-9]+(?:\.[0-9]+)?)"
# vLLM V1, one line an engine core: `GPU KV cache size: 41,408 tokens`; V0: `# GPU blocks: 2588`.
_TOKENS = re.compile(rf"GPU KV cache size:\s*{_COUNT}\s*tokens")
_BLOCKS = re.compile(rf"# (?:GPU|cuda) blocks:\s*{_COUNT}")
# and how many of the longest requests fit, in the same line or the next one of that engine
_BOTH = re.compile(
    _TOKENS.pattern + r"(?:(?!KV cache size)[\s\S])*?"
    rf"Maximum concurrency for {_COUNT} tokens per request: {_DECIMAL}x"
)
_NUMBER = rf"{_DECIMAL} ?GiB"
_AVAILABLE = re.compile(rf"Available KV cache memory: (-?){_NUMBER}")
_RESERVED = re.compile(rf"memory reserved for KV Cache is {_NUMBER}")
_SHARE = re.compile(
    rf"Free memory on device \([\d.]+/{_DECIMAL} GiB\).{{0,40}}?"
    rf"Desired GPU memory utilization is \({_DECIMAL}, [\d.]+ GiB\)\.\s*"
    r"(Actual usage is [^/\n]*)?"
)
_SHARE_V0 = re.compile(rf"total_gpu_memory \({_NUMBER}\)\s*x gpu_memory_utilization \({_DECIMAL}\)")
_TERM = re.compile(rf"{_NUMBER} for (weight|consumed memory|peak activation|non-torch memory)")
_LOADING = re.compile(rf"Model loading took {_NUMBER}|Loading model weights took {_DECIMAL} GB")
_RELEASE = re.compile(
    r"(?:LLM engine \(v|API server version |vLLM version )((?:[0-9]+\.){2}[0-9]+)"
)


@dataclass(frozen=True)
class StartLog:
    """Of several ranks or engines the one with least memory counts.

    sizes      tokens of each engine; blocks of V0: in `block_counts`
    available  bytes of KV memory of a rank; None: not said
    total, utilization   of the card, and the share of the server; None: not said
    weights    bytes; v2: Model Runner V2; release: None if the log does not say
    both       sizes, longest requests and how many of these fit, as they stand together
    """

    sizes: tuple[int, ...] = ()
    block_counts: tuple[int, ...] = ()
    available: float | None = None
    total: float | None = None
    utilization: float | None = None
    weights: float | None = None
    v2: bool = False
    release: str | None = None
    both: tuple[tuple[int, int, float], ...] = ()

    def available_at(self, utilization: float | None) -> float | None:
        """Bytes of KV memory at another utilisation, None as the log has it; None if the log
        does not say."""
        if self.available is None or utilization is None:
            return self.available
        if self.total is None or self.utilization is None:
            return None
        return self.available + (utilization - self.utilization) * self.total


def read_start_log(text: str) -> StartLog:
    share = _SHARE.search(text) or _SHARE_V0.search(text)
    available = [float(sign + size) for sign, size in _AVAILABLE.findall(text)]
    available += map(float, _RESERVED.findall(text))
    if not available:
        available = [left for left in map(_left, _SHARE.finditer(text)) if left is not None]
    loaded = [float(gib or gb) for gib, gb in _LOADING.findall(text)]
    release = _RELEASE.search(text)
    return StartLog(
        tuple(_count(size) for size in _TOKENS.findall(text)),
        tuple(_count(blocks) for blocks in _BLOCKS.findall(text)),
        min(available) * GIB if available else None,
        float(share[1]) * GIB if share else None,
        float(share[2]) if share else None,
        max(loaded) * GIB if loaded else None,
        "Using V2 Model Runner" in text,
        release[1] if release else None,
        tuple(
            (_count(size), _count(length), float(times))
            for size, length, times in dict.fromkeys(_BOTH.findall(text))
        ),
    )


def _left(share: re.Match[str]) -> float | None:
    """GiB that the terms of `Actual usage` leave. Graphs are in the peak if they are set aside
    (`Worker.compile_or_warm_up_model`); what the line says of them is what they took later."""
    terms = {name: float(gib) for gib, name in _TERM.findall(share[3] or "")}
    if "peak activation" not in terms or not {"weight", "consumed memory"} & {*terms}:
        return None
    return float(share[1]) * float(share[2]) - sum(terms.values())


def _count(text: str) -> int:
    return int(text.replace(",", ""))
