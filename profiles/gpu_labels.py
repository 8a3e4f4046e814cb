"""GPUs by the words that others have for them: labels of Kubernetes nodes, lines of
`nvidia-smi -L`, and instance types of clouds.

Instance types: the providers' own lists (AWS p and g, Google a and g, Azure NC, ND and NV, Oracle,
Lambda). A card that is not in the catalogue in just that form (V100 with NVLink) is not taken for
its sibling.
"""

from __future__ import annotations

import re

# The whole of a name, in small letters, without its maker, with dashes between words.
_CARDS: tuple[tuple[str, str], ...] = (
    (r"h100(-mega)?(-80gb)?(-hbm3)?|h100-sxm\d?(-80gb)?|h100-80gb-sxm\d?", "h100"),
    (r"h100-pcie(-80gb)?|h100-80gb-pcie", "h100-pcie"),
    (r"h100-nvl(-94gb)?|h100-94gb-nvl", "h100-nvl"),
    (r"h200(-141gb)?(-hbm3e)?|h200-sxm\d?(-141gb)?", "h200"),
    (r"h20(-96gb)?(-hbm3)?", "h20"),
    (r"a100-(sxm\d?-)?40gb|a100-40gb-sxm\d?", "a100-40g"),
    (r"a100-pcie-40gb|a100-40gb-pcie", "a100-pcie-40g"),
    (r"a100-pcie-80gb|a100-80gb-pcie", "a100-pcie-80g"),
    (r"a100-(sxm\d?-)?80gb|a100-80gb-sxm\d?", "a100-80g"),
    (r"v100-pcie-16gb", "v100-16g"),
    (r"v100-pcie-32gb", "v100-32g"),
    (r"b200(-sxm\d?)?(-180gb)?", "b200"),
    (r"b300(-sxm\d?)?(-ac)?", "b300"),
    (r"gb200(-nvl72)?", "gb200"),
    (r"mi300x(-oam)?", "mi300x"),
    (r"(geforce-)?rtx-?(3090|4090|5090)", r"rtx\2"),
    (r"rtx-6000-ada(-generation)?", "rtx6000ada"),
    (r"rtx-pro-6000(-blackwell)?(-server-edition)?", "rtxpro6000"),
    (r"(t4|l4|l20|l40s|a10|a10g|a40)", r"\1"),
)
_MAKERS = re.compile(r"^(?:nvidia|tesla|amd|instinct|radeon|gpu \d+:|-|\s)+", re.IGNORECASE)
# GKE calls the A100 of 40 GB so; the name by itself means the one of 80 GB here.
_WHOLE = {"nvidia-tesla-a100": "a100-40g"}

_AWS = {
    "p4d": "a100-40g",
    "p4de": "a100-80g",
    "p5": "h100",
    "p5e": "h200",
    "p5en": "h200",
    "p6-b200": "b200",
    "p6-b300": "b300",
    "g4dn": "t4",
    "g5": "a10g",
    "g6": "l4",
    "g6e": "l40s",
    "g7e": "rtxpro6000",
}
_AWS_SIZES = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "metal": 8}
_OTHERS: tuple[tuple[str, str, int | None], ...] = (
    (r"a2-(?:high|mega)gpu-(?P<n>\d+)g", "a100-40g", None),
    (r"a2-ultragpu-(?P<n>\d+)g", "a100-80g", None),
    (r"a3-(?:high|mega|edge)gpu-(?P<n>\d+)g", "h100", None),
    (r"a3-ultragpu-(?P<n>\d+)g", "h200", None),
    (r"a4-highgpu-(?P<n>\d+)g", "b200", None),
    (r"a4x-highgpu-(?P<n>\d+)g", "gb200", None),
    (r"g2-standard-(?:4|8|12|16|32)", "l4", 1),
    (r"g2-standard-24", "l4", 2),
    (r"g2-standard-48", "l4", 4),
    (r"g2-standard-96", "l4", 8),
    (r"g4-standard-48", "rtxpro6000", 1),
    (r"g4-standard-96", "rtxpro6000", 2),
    (r"g4-standard-192", "rtxpro6000", 4),
    (r"g4-standard-384", "rtxpro6000", 8),
    (r"nc24ads-a100-v4", "a100-pcie-80g", 1),
    (r"nc48ads-a100-v4", "a100-pcie-80g", 2),
    (r"nc96ads-a100-v4", "a100-pcie-80g", 4),
    (r"nc40ads-h100-v5", "h100-nvl", 1),
    (r"nc80adis-h100-v5", "h100-nvl", 2),
    (r"bm\.gpu4\.8", "a100-40g", 8),
    (r"bm\.gpu\.a100-v2\.8", "a100-80g", 8),
    (r"bm\.gpu\.(?P<gpu>h100|h200|b200|mi300x)\.(?P<n>8)", "", None),
    (r"(?:bm|vm)\.gpu\.(?P<gpu>a10|l40s)\.(?P<n>\d)", "", None),
    (r"gpu-(?P<n>\d)x-(?P<gpu>h100-sxm5|h100-pcie|b200-sxm6|a100-80gb-sxm4|a10)", "", None),
    (r"nd(?:96is(?:r|rf)?)?-h100-v5", "h100", 8),
    (r"nd(?:96is(?:r|rf)?)?-h200-v5", "h200", 8),
    (r"nd96asr(?:-a100)?-v4", "a100-40g", 8),
    (r"ndm?(?:96amsr)?-a100-v4", "a100-80g", 8),
    (r"nd(?:96isr)?-mi300x-v5", "mi300x", 8),
    (r"nd128isr-ndr-gb200-v6", "gb200", 4),
    (r"nc(?:4|8|16)as-t4-v3", "t4", 1),
    (r"nc64as-t4-v3", "t4", 4),
    (r"nv36adm?s-a10-v5", "a10", 1),
    (r"nv72ads-a10-v5", "a10", 2),
)


def gpu_of_label(text: str) -> str | None:
    """The catalogue's name of what a label calls a GPU or a machine; None: it is not known."""
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
    """GPU of an instance type, and how many of them it has; None where that is not said."""
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
