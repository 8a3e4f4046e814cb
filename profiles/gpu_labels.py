"""GPUs by the words that others have for them: labels of Kubernetes nodes, lines of
`nvidia-smi -L`, and instance types of clouds (`gpu_labels.csv`).

Instance types: the providers' own lists (AWS p and g, Google a and g, Azure NC, ND and NV, Oracle,
Lambda). A card that is not in the catalogue in just that form (V100 with NVLink) is not taken for
its sibling.
"""

import re

from twinserve.formats import shipped_rows

_ROWS = shipped_rows(__package__, "gpu_labels.csv")
_CARDS = [(row["pattern"], row["gpu"]) for row in _ROWS if row["kind"] == "card"]
_MAKERS = re.compile(r"^(?:nvidia|tesla|amd|instinct|radeon|gpu \d+:|-|\s)+", re.IGNORECASE)
# GKE calls the A100 of 40 GB so; the name by itself means the one of 80 GB here.
_WHOLE = {"nvidia-tesla-a100": "a100-40g"}

_AWS = {row["pattern"]: row["gpu"] for row in _ROWS if row["kind"] == "aws"}
_AWS_SIZES = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "metal": 8}
_OTHERS = [
    (row["pattern"], row["gpu"], int(row["number"]) if row["number"] else None)
    for row in _ROWS
    if row["kind"] == "machine"
]


def gpu_of_label(text: str) -> str | None:
    """Return the catalogue's name of the GPU that a label of a GPU or a machine means, or None."""
    word = re.sub(r"\(UUID:.*", "", text, flags=re.IGNORECASE).strip().lower()
    if word in _WHOLE:
        return _WHOLE[word]
    bare = _MAKERS.sub("", word.replace("_", "-"))
    bare = re.sub(r"[\s-]+", "-", bare).strip("-").removesuffix("-shared")
    for pattern, name in _CARDS:
        if found := re.fullmatch(pattern, bare):
            return found.expand(name)
    machine = machine_of_label(text)
    return None if machine is None else machine[0]


def machine_of_label(text: str) -> tuple[str, int | None] | None:
    """GPU of an instance type, and how many of them it has; None if that is not said."""
    word = re.sub(r"[\s_]+", "-", text.strip().lower()).removeprefix("standard-")
    family, dot, size = word.partition(".")
    if family in _AWS:
        large = family.startswith("p") and size in ("24xlarge", "48xlarge")
        return _AWS[family], None if not dot else 8 if large else _AWS_SIZES.get(size, 1)
    for pattern, name, number in _OTHERS:
        if found := re.fullmatch(pattern, word):
            gpu = name or gpu_of_label(found["gpu"])
            return None if gpu is None else (gpu, number or int(found["n"]))
    return None
