"""What the comparison of the systems compares: the systems, their parts, and other memories for
them."""

from __future__ import annotations

from collections.abc import Mapping

CHUNK = "bros:chunk=2048"
FIT = "bros:chunk=fit"  # the setting that docs/bros.md recommends
GAP = "echo:slo=gap"
SYSTEMS = ("vllm", "vllm-v0", "bros", CHUNK, FIT, "echo", GAP, "layerkv", "justitia", "conserve")

# of plots
LOOKS = {
    "vllm": {"color": "black"},
    "vllm-v0": {"color": "grey"},
    "bros": {"color": "C3", "linestyle": ":"},
    "bros:chunk=2048": {"color": "C3", "linestyle": "--"},
    "bros:chunk=fit": {"color": "C3", "linewidth": 2.2},
    "echo": {"color": "C0", "linestyle": "--"},
    "echo:slo=gap": {"color": "C0"},
    "layerkv": {"color": "C1"},
    "justitia": {"color": "C2"},
    "conserve": {"color": "C4"},
}

# a policy, or with prefix caching as said instead of as its own system does
Part = str | tuple[str, bool]
Parts = Mapping[str, Mapping[str, Part]]

_PRINTED = f"{FIT},fit_order=residual,fit_estimator=printed,fit_feedback=0"
# system -> its parts, one more in each step
LADDERS: Parts = {
    "bros": {
        "vllm": "vllm",
        "two classes in turn": "round-robin:chunk=2048",
        "deadlines (Alg. 1)": "bros:chunk=2048,kv=paged,replacement=false",
        "+ replacement": "bros:chunk=2048,kv=paged",
        "+ bidirectional blocks": CHUNK,
    },
    "layerkv": {
        "vllm-v0": "vllm-v0",
        "+ layers": "layerkv:slo_aware=false",
        "+ Alg. 1, late ones left out": "layerkv:savable_only=true",
        "Alg. 1 as printed": "layerkv",
    },
}
FIT_LADDER: Parts = {
    "bros, chunks that fit": {
        "chunks of 2,048": CHUNK,
        "chunks that fit, printed order and estimate": _PRINTED,
        "+ estimate of a whole step": f"{FIT},fit_order=residual",
        "+ late ones last": FIT,
    }
}
# each with and without a prefix cache on a paged memory, or on its own where that has one
_CACHED = {
    "vllm": "vllm",
    "vllm-v0": "vllm-v0",
    FIT: f"{FIT},kv=paged",
    GAP: GAP,
    "layerkv": "layerkv:kv=paged",
    "justitia": "justitia:kv=paged",
    "conserve": "conserve:kv=paged",
}
PREFIXES: Parts = {
    "no prefix cache": {name: (policy, False) for name, policy in _CACHED.items()},
    "prefix cache": {name: (policy, True) for name, policy in _CACHED.items()},
}
# scheduler -> ledgers, the first with all of its own system; none that is the same memory to it as
# another one
LEDGERS: Parts = {
    "vllm": {
        "paged": "vllm",
        "no prefix cache": ("vllm", False),
        "bidirectional": "vllm:kv=bidirectional",
    },
    "bros": {
        "bidirectional": CHUNK,
        "paged": "bros:chunk=2048,kv=paged",
        "checkpointed": "bros:chunk=2048,kv=checkpointed",
    },
    "bros, chunks that fit": {
        "bidirectional": FIT,
        "paged": f"{FIT},kv=paged",
        "paged, prefix cache": (f"{FIT},kv=paged", True),
    },
    "echo": {
        "task-aware": "echo",
        "no prefix cache": ("echo", False),
        "bidirectional": "echo:kv=bidirectional",
    },
    "layerkv": {
        "layerwise": "layerkv",
        "paged": "layerkv:kv=paged",
        "paged, prefix cache": ("layerkv:kv=paged", True),
        "bidirectional": "layerkv:kv=bidirectional",
    },
    "justitia": {
        "paged": "justitia",
        "paged, prefix cache": ("justitia:kv=paged", True),
        "bidirectional": "justitia:kv=bidirectional",
    },
}
PRIORITY = "vllm:scheduling=priority"
DOCUMENTS: Parts = {
    "echo": {
        "vllm, priorities": (PRIORITY, True),
        "online first (BS)": ("echo-bs", True),
        "+ estimator (E)": ("echo-bs-e", True),
        "+ KV-aware choice (S)": ("echo-bs-e-s", True),
        "+ eviction order (M)": ("echo:threshold=false", True),
        "+ reserve (M)": ("echo", True),
        "+ objectives on gaps": (GAP, True),
    }
}
# whoever tells offline requests from online ones; each with a prefix cache
DOCUMENT_SYSTEMS: Parts = {
    "prefix cache": {
        "vllm, priorities": (PRIORITY, True),
        "echo": ("echo", True),
        GAP: (GAP, True),
        FIT: (f"{FIT},kv=paged", True),
        "justitia": ("justitia:kv=paged", True),
        "conserve": ("conserve:kv=paged", True),
    }
}
# the first: with a prefix cache that knows nothing of what is asked next. Not LayerKV: first come,
# first served, it would serve the whole pool before the online requests. Not BROS: but with chunks
# that fit, which evict nothing of a document's (`DOCUMENT_SYSTEMS`), it looks up no prefix.
DOCUMENT_LEDGERS: Parts = {
    "vllm, priorities": {
        "paged": (PRIORITY, True),
        "task-aware": (f"{PRIORITY},kv=task-aware", True),
    },
    "echo-bs": {"paged": ("echo-bs", True), "task-aware": ("echo-bs:kv=task-aware", True)},
    "echo": {"paged": ("echo:kv=paged", True), "task-aware": ("echo", True)},
    "justitia": {
        "paged": ("justitia:kv=paged", True),
        "task-aware": ("justitia:kv=task-aware", True),
        "no prefix cache": "justitia",
    },
}
# of applications: Justitia's parts, one more in each step; and Justitia with one of them exchanged
APPLICATIONS: Mapping[str, Mapping[str, str]] = {
    "ladder": {
        "vllm": "vllm",
        "applications, first come (Parrot)": "parrot",
        "least cost left, class means": "srjf:predictor=class-mean",
        "fair order, class means": "justitia:predictor=class-mean",
        "+ predictor of text": "justitia",
        "+ truth": "justitia:predictor=perfect",
    },
    "one part exchanged": {
        "justitia": "justitia",
        "cost: tokens computed": "justitia:cost=compute",
        "order: least cost left (SRJF)": "srjf",
        "order: counters (VTC)": "vtc",
        "requests, not applications (SJF)": "vllm-sjf",
    },
}
