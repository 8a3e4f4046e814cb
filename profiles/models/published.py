"""Where the catalogue's models are published, where their config.json was seen, and how many
parameters are said there.

The counts check ours (tests/profiles/test_catalogue.py), and so does each config.json that
aiconfigurator-core ships. Where a card gives a round number, it is kept as round as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """hub: the id on Hugging Face whose config.json it is; billions: of parameters, as said in
    `source`. seen: where the fields of its config.json were read; shipped: the id under which
    aiconfigurator-core has that file."""

    hub: str
    billions: str
    source: str = "model card"
    seen: str = "litgpt"
    shipped: str = ""


# What `seen` means. Fields that a list leaves out are what the configuration classes of
# transformers 5.19 have for the family. The parameter counts bear out widths, biases and tables.
SEEN = {
    "package": "aiconfigurator-core 0.12.0, model_configs",
    "litgpt": "litgpt 0.5.13, litgpt/config.py",
    "mlc": "github.com/mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py",
    "thunder": "github.com/kevinstephano/thunder_model_blocks, mistral/mistral_config.py",
    "paper": "sizes in the paper or model card, the rest from transformers' class of the family",
    "quoted": "the hub's config.json as tests in public source code quote it",
    "easydel": "EasyDeL 0.0.8, modules/opt: the hub's config.json",
}
_GEMMA = "keras-hub presets, and transformers with the vocabulary of its config"
_GEMMA_2 = "arXiv 2408.00118, table 2"
_COUNTED = "count of its files or of its config by transformers"
_OSS = "arXiv 2508.10925, table 1"

PUBLISHED: dict[str, Published] = {
    "llama-7b": Published("huggyllama/llama-7b", "6.7", "arXiv 2302.13971, table 2", seen="paper"),
    "llama-13b": Published(
        "huggyllama/llama-13b", "13.0", "arXiv 2302.13971, table 2", seen="paper"
    ),
    "llama-2-7b": Published("meta-llama/Llama-2-7b-hf", "6.74"),
    "llama-2-13b": Published("meta-llama/Llama-2-13b-hf", "13.02"),
    "llama-2-70b": Published("meta-llama/Llama-2-70b-hf", "68.98"),
    "codellama-34b": Published("codellama/CodeLlama-34b-hf", "33.7"),
    "llama-3-70b": Published("meta-llama/Meta-Llama-3-70B", "70.6"),
    "llama-3.1-8b": Published(
        "meta-llama/Llama-3.1-8B", "8.03", seen="package", shipped="meta-llama/Meta-Llama-3.1-8B"
    ),
    "llama-3.1-70b": Published(
        "meta-llama/Llama-3.1-70B", "70.6", seen="package", shipped="meta-llama/Meta-Llama-3.1-70B"
    ),
    "llama-3.1-405b": Published(
        "meta-llama/Llama-3.1-405B", "406", seen="package", shipped="meta-llama/Meta-Llama-3.1-405B"
    ),
    "llama-3.3-70b": Published("meta-llama/Llama-3.3-70B-Instruct", "70.6"),
    "llama-4-scout": Published(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "109",
        seen="package",
        shipped="meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    "llama-4-maverick": Published(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "402",
        seen="package",
        shipped="meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    ),
    "qwen2.5-0.5b": Published("Qwen/Qwen2.5-0.5B", "0.49"),
    "qwen2.5-1.5b": Published("Qwen/Qwen2.5-1.5B", "1.54"),
    "qwen2.5-3b": Published("Qwen/Qwen2.5-3B", "3.09"),
    "qwen2.5-7b": Published("Qwen/Qwen2.5-7B", "7.62"),
    "qwen2.5-14b": Published("Qwen/Qwen2.5-14B", "14.8"),
    "qwen2.5-32b": Published("Qwen/Qwen2.5-32B", "32.8"),
    "qwen2.5-72b": Published("Qwen/Qwen2.5-72B", "72.7"),
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B", "0.6", seen="package", shipped="Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B", "1.7", seen="package", shipped="Qwen/Qwen3-1.7B"),
    "qwen3-4b": Published("Qwen/Qwen3-4B", "4.0"),
    "qwen3-8b": Published("Qwen/Qwen3-8B", "8.2", seen="package", shipped="Qwen/Qwen3-8B"),
    "qwen3-14b": Published("Qwen/Qwen3-14B", "14.8"),
    "qwen3-32b": Published("Qwen/Qwen3-32B", "32.8", seen="package", shipped="Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": Published(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "30.5", shipped="Qwen/Qwen3-30B-A3B"
    ),
    "qwen3-235b-a22b": Published(
        "Qwen/Qwen3-235B-A22B", "235", seen="package", shipped="Qwen/Qwen3-235B-A22B"
    ),
    "mistral-7b": Published("mistralai/Mistral-7B-v0.3", "7.25", seen="mlc"),
    "mistral-nemo": Published("mistralai/Mistral-Nemo-Base-2407", "12.2", seen="thunder"),
    "mixtral-8x7b": Published(
        "mistralai/Mixtral-8x7B-v0.1", "46.7", seen="package", shipped="mistralai/Mixtral-8x7B-v0.1"
    ),
    "mixtral-8x22b": Published(
        "mistralai/Mixtral-8x22B-v0.3", "141", shipped="mistralai/Mixtral-8x22B-v0.1"
    ),
    "yi-6b": Published("01-ai/Yi-6B", "6.06", seen="paper"),
    "yi-34b": Published("01-ai/Yi-34B", "34.4", seen="paper"),
    "yi-34b-200k": Published("01-ai/Yi-34B-200K", "34.4", seen="paper"),
    "deepseek-v3": Published(
        "deepseek-ai/DeepSeek-V3",
        "671",
        "arXiv 2412.19437",
        seen="package",
        shipped="deepseek-ai/DeepSeek-V3",
    ),
    "gpt-oss-20b": Published(
        "openai/gpt-oss-20b", "20.91", _OSS, seen="package", shipped="openai/gpt-oss-20b"
    ),
    "gpt-oss-120b": Published(
        "openai/gpt-oss-120b", "116.83", _OSS, seen="package", shipped="openai/gpt-oss-120b"
    ),
    "gemma-3-1b": Published("google/gemma-3-1b-it", "1.00", _GEMMA, seen="mlc"),
    "gemma-3-4b": Published("google/gemma-3-4b-it", "4.30", _GEMMA),
    "gemma-3-12b": Published("google/gemma-3-12b-it", "12.19", _GEMMA),
    "gemma-3-27b": Published("google/gemma-3-27b-it", "27.43", _GEMMA),
    "gemma-7b": Published("google/gemma-7b", "8.54", _COUNTED),
    "gemma-2-2b": Published("google/gemma-2-2b", "2.61", _GEMMA_2, "mlc"),
    "gemma-2-9b": Published("google/gemma-2-9b", "9.24", _GEMMA_2, "mlc"),
    "gemma-2-27b": Published("google/gemma-2-27b", "27.23", _GEMMA_2, "mlc"),
    "codellama-7b": Published("codellama/CodeLlama-7b-hf", "6.74", seen="mlc"),
    "granite-3.1-2b": Published("ibm-granite/granite-3.1-2b-base", "2.53", _COUNTED, "quoted"),
    "granite-3.1-8b": Published("ibm-granite/granite-3.1-8b-base", "8.17", _COUNTED, "quoted"),
    "granite-3.3-8b": Published("ibm-granite/granite-3.3-8b-instruct", "8.17", _COUNTED, "quoted"),
    "minimax-m2.5-fp8": Published(
        "MiniMaxAI/MiniMax-M2.5", "229", _COUNTED, "package", "MiniMaxAI/MiniMax-M2.5"
    ),
    "minimax-m2.5-nvfp4": Published(
        "nvidia/MiniMax-M2.5-NVFP4", "229", _COUNTED, "package", "nvidia/MiniMax-M2.5-NVFP4"
    ),
    "qwen1.5-moe-a2.7b": Published("Qwen/Qwen1.5-MoE-A2.7B-Chat", "14.3", seen="mlc"),
    "deepseek-v2-lite": Published("deepseek-ai/DeepSeek-V2-Lite", "15.7", seen="mlc"),
    "phi-2": Published("microsoft/phi-2", "2.78", _COUNTED, "mlc"),
    "phi-4-mini": Published("microsoft/Phi-4-mini-instruct", "3.8", seen="mlc"),
    "phi-4": Published("microsoft/phi-4", "14.7"),
    "opt-13b": Published("facebook/opt-13b", "12.85", seen="easydel"),
    "opt-30b": Published("facebook/opt-30b", "29.97", seen="paper"),
}
