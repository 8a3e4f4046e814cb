"""Token ids of requests with known lengths and prefix block ids: equal ids give equal text."""

import hashlib

import numpy as np


class PromptTexts:
    """vocab: token ids are drawn uniformly from [1, vocab), so that different blocks differ."""

    def __init__(self, vocab: int, block_tokens: int, seed: int = 0) -> None:
        if vocab < 2 or block_tokens < 1:
            raise ValueError(
                f"a vocabulary of {vocab} token ids and blocks of {block_tokens} tokens"
            )
        self.vocab = vocab
        self.block_tokens = block_tokens
        self.seed = seed
        self._drawn: dict[str, list[int]] = {}

    def tokens(
        self, request_id: str, prompt_tokens: int, prefix: np.ndarray | None = None
    ) -> list[int]:
        """Token ids of a prompt. prefix: int64, content ids of its full blocks; what they don't
        name is the request's own (seeded by its id). Drawn once: the next run of the same workload
        has it at hand."""
        known = self._drawn.get(request_id)
        if known is not None:
            return known
        named = 0 if prefix is None else min(len(prefix), prompt_tokens // self.block_tokens)
        parts = [self._block(int(content)) for content in (prefix[:named] if named else ())]
        own = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8])
        parts.append(self._draw(1, own, prompt_tokens - named * self.block_tokens))
        text = self._drawn[request_id] = np.concatenate(parts).tolist()
        return text

    def _block(self, content: int) -> np.ndarray:
        return self._draw(0, content, self.block_tokens)

    def _draw(self, kind: int, number: int, n: int) -> np.ndarray:
        return np.random.default_rng([self.seed, kind, number]).integers(1, self.vocab, n)
