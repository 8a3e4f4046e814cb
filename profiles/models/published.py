"""Where the catalogue's models are published, and how many parameters are said there.

The counts check ours (tests/profiles/test_catalogue.py). Where a card gives a round number, it is
kept as round as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """hub: the id on Hugging Face whose config.json it is; billions: of parameters, as said in
    `source`."""

    hub: str
    billions: str
    source: str = "model card"


_GEMMA = "keras-hub presets, and transformers with the vocabulary of its config"
_OSS = "arXiv 2508.10925, table 1"

PUBLISHED: dict[str, Published] = {
    "llama-7b": Published("huggyllama/llama-7b", "6.7", "arXiv 2302.13971, table 2"),
    "llama-13b": Published("huggyllama/llama-13b", "13.0", "arXiv 2302.13971, table 2"),
    "llama-2-7b": Published("meta-llama/Llama-2-7b-hf", "6.74"),
    "llama-2-13b": Published("meta-llama/Llama-2-13b-hf", "13.02"),
    "llama-2-70b": Published("meta-llama/Llama-2-70b-hf", "68.98"),
    "codellama-34b": Published("codellama/CodeLlama-34b-hf", "33.7"),
    "llama-3-70b": Published("meta-llama/Meta-Llama-3-70B", "70.6"),
    "llama-3.1-8b": Published("meta-llama/Llama-3.1-8B", "8.03"),
    "llama-3.1-70b": Published("meta-llama/Llama-3.1-70B", "70.6"),
    "llama-3.1-405b": Published("meta-llama/Llama-3.1-405B", "406"),
    "llama-3.3-70b": Published("meta-llama/Llama-3.3-70B-Instruct", "70.6"),
    "llama-4-scout": Published("meta-llama/Llama-4-Scout-17B-16E", "109"),
    "llama-4-maverick": Published("meta-llama/Llama-4-Maverick-17B-128E", "402"),
    "qwen2.5-0.5b": Published("Qwen/Qwen2.5-0.5B", "0.49"),
    "qwen2.5-1.5b": Published("Qwen/Qwen2.5-1.5B", "1.54"),
    "qwen2.5-3b": Published("Qwen/Qwen2.5-3B", "3.09"),
    "qwen2.5-7b": Published("Qwen/Qwen2.5-7B", "7.62"),
    "qwen2.5-14b": Published("Qwen/Qwen2.5-14B", "14.8"),
    "qwen2.5-32b": Published("Qwen/Qwen2.5-32B", "32.8"),
    "qwen2.5-72b": Published("Qwen/Qwen2.5-72B", "72.7"),
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B", "0.6"),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B", "1.7"),
    "qwen3-4b": Published("Qwen/Qwen3-4B", "4.0"),
    "qwen3-8b": Published("Qwen/Qwen3-8B", "8.2"),
    "qwen3-14b": Published("Qwen/Qwen3-14B", "14.8"),
    "qwen3-32b": Published("Qwen/Qwen3-32B", "32.8"),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B-Instruct-2507", "30.5"),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B", "235"),
    "mistral-7b": Published("mistralai/Mistral-7B-v0.3", "7.25"),
    "mistral-nemo": Published("mistralai/Mistral-Nemo-Base-2407", "12.2"),
    "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1", "46.7"),
    "mixtral-8x22b": Published("mistralai/Mixtral-8x22B-v0.3", "141"),
    "yi-6b": Published("01-ai/Yi-6B", "6.06"),
    "yi-34b": Published("01-ai/Yi-34B", "34.4"),
    "yi-34b-200k": Published("01-ai/Yi-34B-200K", "34.4"),
    "deepseek-v3": Published("deepseek-ai/DeepSeek-V3", "671", "arXiv 2412.19437"),
    "gpt-oss-20b": Published("openai/gpt-oss-20b", "20.91", _OSS),
    "gpt-oss-120b": Published("openai/gpt-oss-120b", "116.83", _OSS),
    "gemma-3-1b": Published("google/gemma-3-1b-it", "1.00", _GEMMA),
    "gemma-3-4b": Published("google/gemma-3-4b-it", "4.30", _GEMMA),
    "gemma-3-12b": Published("google/gemma-3-12b-it", "12.19", _GEMMA),
    "gemma-3-27b": Published("google/gemma-3-27b-it", "27.43", _GEMMA),
    "phi-4": Published("microsoft/phi-4", "14.7"),
    "opt-13b": Published("facebook/opt-13b", "12.85"),
    "opt-30b": Published("facebook/opt-30b", "29.97"),
}
