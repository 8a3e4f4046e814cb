"""The shipped profiles (`shipped.csv`) whose step times are the roofline, and how their files are
made again:

python -m twinserve.profiles.shipped DIR

Those of operator tables are in `operators/shipped.py`.

Studies, tables and examples were made with their files. So their KV blocks are data, and do not
move with the derivation (`kv_memory/derive.py`): a flag of memory on top of one derives them anew.
"""

import sys
from pathlib import Path
from typing import Any

from twinserve.formats import shipped_rows
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile, save_profile

Key = tuple[str, str, int]
"Model, GPU, tensor-parallel ranks."
ROWS: dict[Key, dict[str, str]] = {
    (row["model"], row["gpu"], int(row["tp"])): row
    for row in shipped_rows(__package__, "shipped.csv")
}
SHIPPED = [key for key, row in ROWS.items() if row["roofline"]]
# Entries whose file holds operator tables instead.
REPLACED = {key for key in SHIPPED if ROWS[key]["roofline"] == "replaced"}


def shipped_profile(model: str, gpu: str, tp: int) -> Profile:
    """The roofline profile of one entry of SHIPPED, computed."""
    return derive_profile(model, gpu, tp, **engine_settings((model, gpu, tp)))


def engine_settings(key: Key) -> dict[str, Any]:
    """Settings of `derive_profile` for a shipped file: KV memory, and what is known beyond that."""
    row, large = ROWS[key], key[1] in ("h100", "h200")
    found: dict[str, Any] = {
        "utilization": 0.9,
        "max_num_batched_tokens": int(row["max_num_batched_tokens"] or (8192 if large else 2048)),
        "max_num_seqs": int(row["max_num_seqs"] or (1024 if large else 256)),
    }
    if row["num_blocks"]:
        found["num_gpu_blocks"] = int(row["num_blocks"])
    if row["blocks"] == "kept":
        found["num_gpu_blocks_source"] = "derived"
    if row["engine_version"]:
        found["engine_version"] = row["engine_version"]
    return found


def write_shipped(folder: Path) -> list[Path]:
    """Write every file of SHIPPED that is not REPLACED; returns the paths."""
    paths = []
    for key in SHIPPED:
        if key in REPLACED:
            continue
        paths.append(folder / ProfileName(*key).file_name)
        save_profile(shipped_profile(*key), paths[-1])
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m twinserve.profiles.shipped DIR")
    print(f"{len(write_shipped(Path(sys.argv[1])))} profiles written")
