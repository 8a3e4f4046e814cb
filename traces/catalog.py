"""The public traces that go by a name: where they are, and how they are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from twinserve.traces.apps import generate as apps
from twinserve.traces.generators import in_a_line, longdoc, synth
from twinserve.traces.workload import WorkloadError

MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"


@dataclass(frozen=True)
class TraceInfo:
    """A recorded trace with a name.

    files    names it may have in a folder of the search path; the cache uses the first
    sha256   of the published file
    replica  whether a fitted stand-in is embedded (generators/replica.py)
    """

    name: str
    description: str
    format: str
    files: tuple[str, ...]
    url: str
    rows: int
    licence: str
    cite: str
    sha256: str
    replica: bool = False


_MOONCAKE_PAPER = "Qin et al., Mooncake, FAST 2025"
_AZURE_PAPER = "Patel et al., Splitwise, ISCA 2024"

TRACES = (
    TraceInfo(
        "mooncake:conversation",
        "chat requests of Kimi, one hour, with 512-token prefix blocks",
        "mooncake",
        ("mooncake_conversation.jsonl", "conversation_trace.jsonl"),
        MOONCAKE + "conversation_trace.jsonl",
        12_031,
        "Apache-2.0",
        _MOONCAKE_PAPER,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        replica=True,
    ),
    TraceInfo(
        "mooncake:toolagent",
        "tool and agent requests of Kimi, one hour, with 512-token prefix blocks",
        "mooncake",
        ("mooncake_toolagent.jsonl", "toolagent_trace.jsonl"),
        MOONCAKE + "toolagent_trace.jsonl",
        23_608,
        "Apache-2.0",
        _MOONCAKE_PAPER,
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
    ),
    TraceInfo(
        "mooncake:synthetic",
        "public data sets mixed by Mooncake's authors, with 512-token prefix blocks",
        "mooncake",
        ("mooncake_synthetic.jsonl", "synthetic_trace.jsonl"),
        MOONCAKE + "synthetic_trace.jsonl",
        3_993,
        "Apache-2.0",
        _MOONCAKE_PAPER,
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    TraceInfo(
        "azure-2023:conv",
        "conversation requests of an Azure LLM service, one hour, arrivals and lengths",
        "azure",
        ("azure_llm_2023_conv.csv", "AzureLLMInferenceTrace_conv.csv"),
        AZURE + "AzureLLMInferenceTrace_conv.csv",
        19_366,
        "CC-BY 4.0",
        _AZURE_PAPER,
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        replica=True,
    ),
    TraceInfo(
        "azure-2023:code",
        "code-completion requests of an Azure LLM service, one hour, arrivals and lengths",
        "azure",
        ("azure_llm_2023_code.csv", "AzureLLMInferenceTrace_code.csv"),
        AZURE + "AzureLLMInferenceTrace_code.csv",
        8_819,
        "CC-BY 4.0",
        _AZURE_PAPER,
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
)
ALIASES = {"mooncake": "mooncake:conversation", "azure-2023": "azure-2023:conv"}
BY_NAME = {info.name: info for info in TRACES}
SYNTHETIC = {
    "poisson": "Poisson arrivals with ShareGPT-like lengths",
    "sharegpt": "Poisson arrivals, lengths with ShareGPT's mean and deviation",
    "lmsys": "Poisson arrivals, lengths with LMSYS-Chat-1M's mean and deviation",
    "fixed:IN,OUT": "Poisson arrivals, every prompt IN and every output OUT tokens",
    **apps.DESCRIPTIONS,
    "tidal": (
        "a day of online requests, one a second at the peak (Echo's load; --rate-scale for more)"
    ),
    **in_a_line.DESCRIPTIONS,
    **{name: "offline questions on long shared documents, all at once" for name in longdoc.NAMES},
}


def resolve(name: str) -> TraceInfo | None:
    """The recorded trace of a name or alias; None if there is none."""
    return BY_NAME.get(ALIASES.get(name, name))


def all_names() -> list[str]:
    return [*ALIASES, *BY_NAME, *SYNTHETIC]


def unknown(name: str) -> WorkloadError:
    """The error for a name that is neither a trace nor a file."""
    names = all_names()
    near = get_close_matches(name, [*names, *synth.NAMES], 1, 0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return WorkloadError(f"unknown trace '{name}': {hint}names: {', '.join(names)}; or give a path")
