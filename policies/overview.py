"""What each policy is, where its rules are from, and what is known of how true it is to them.

identical  steps side by side with the system's own code, decision for decision
published  built from the paper; its system's code was not at hand, or differs
ours       of this project: bounds, ladders and variants that isolate a part
"""

from __future__ import annotations

import sys
from typing import Any

from twinserve.policies.registry import policy_class, policy_names

_BROS = ("Wan et al., BROS, Algorithm 1", "published", "bros.md")
_ECHO = ("Echo (paper), its ladder of variants", "published", "echo.md")
_JUSTITIA = ("Justitia (paper) and what it compares with", "published", "justitia.md")
# name -> source, accuracy, page of the docs
KNOWN: dict[str, tuple[str, str, str]] = {
    "vllm": ("vLLM, v1/core/sched/scheduler.py", "identical", "policies.md#vllm"),
    "vllm-v0": ("vLLM 0.6, vllm/core/scheduler.py", "published", "policies.md#vllm-v0"),
    "bros": _BROS,
    "bros-exact": ("a bound on BROS's small iterations", "ours", "policies.md#bounds"),
    "round-robin": ("BROS, Sec. VII-A: BROS-RR", "published", "policies.md#round-robin"),
    "preemptive-wait": ("BROS, Sec. II-B and Fig. 2", "published", "policies.md#preemptive-wait"),
    "sarathi": (
        "Agrawal et al., Sarathi-Serve (OSDI 2024), Alg. 3",
        "published",
        "policies.md#sarathi",
    ),
    "tgi": ("text-generation-inference 2.x, the router", "published", "policies.md#tgi"),
    "mlfq": ("Wu et al., FastServe (arXiv 2305.05920)", "published", "policies.md#mlfq"),
    "conserve": ("Qiao et al., ConServe (2024)", "published", "policies.md#conserve"),
    "layerkv": ("LayerKV (paper)", "published", "layerkv.md"),
    "echo": _ECHO,
    "echo-bs-e-s": _ECHO,
    "echo-bs-e": _ECHO,
    "echo-bs": _ECHO,
    "justitia": _JUSTITIA,
    "srjf": _JUSTITIA,
    "vllm-sjf": _JUSTITIA,
    "parrot": _JUSTITIA,
    "vtc": _JUSTITIA,
    "kv-share": _JUSTITIA,
}


def _summary(kind: type) -> str:
    """The first paragraph about the policy: of its class, else of the module that it is."""
    said = kind.__doc__ or sys.modules[kind.__module__].__doc__ or ""
    return " ".join(said.split("\n\n")[0].split())


def policy_rows() -> list[dict[str, Any]]:
    """A row a policy, by name; those of other packages without source and accuracy."""
    rows = []
    for name in policy_names():
        kind = policy_class(name)
        source, accuracy, page = KNOWN.get(name, ("another package", "not known", ""))
        rows.append(
            {
                "name": name,
                "summary": _summary(kind),
                "options": list(kind.Options.model_fields),
                "source": source,
                "accuracy": accuracy,
                "page": f"docs/{page}" if page else "",
            }
        )
    return rows
