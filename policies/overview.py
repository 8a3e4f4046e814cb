"""What each policy is, where its rules are from, and what is known of how true it is to them
(`known.csv`).

identical  steps side by side with the system's own code, decision for decision
published  built from the paper; its system's code was not at hand, or differs
ours       of this project: bounds, ladders and variants that isolate a part
"""

import sys
from typing import Any

from twinserve.formats import shipped_rows
from twinserve.policies.registry import policy_class, policy_names

# name -> source, accuracy, page of the docs
KNOWN: dict[str, tuple[str, str, str]] = {
    row["name"]: (row["source"], row["accuracy"], row["page"])
    for row in shipped_rows(__package__, "known.csv")
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
