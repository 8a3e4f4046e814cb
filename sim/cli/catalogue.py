"""`twinserve models`, `gpus`, `policies`: what is known by name, with sources and accuracy."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

_Json = Annotated[bool, Parameter(name="--json", negative="")]


def models(*, as_json: _Json = False) -> None:
    """List the models known by name: sizes, sources, accuracy.

    A config.json, or an id in the local Hugging Face cache, also names a model.

    Args:
        as_json: Every field, as JSON.
    """
    from twinserve.profiles.overview import model_rows

    _print(
        model_rows(),
        as_json,
        lambda row: {
            "model": row["name"],
            "kind": row["kind"],
            "parameters": f"{row['parameters'] / 1e9:.2f} B",
            "active": f"{row['active_parameters'] / 1e9:.1f} B",
            "weights": f"{row['weight_bytes'] / 1e9:.1f} GB ({row['weights']})",
            "KV a token": f"{row['kv_bytes_per_token'] / 1024:.1f} KiB",
            "accuracy": row["accuracy"],
            "source": f"{row['hub']}; {row['published']}",
        },
    )


def gpus(*, as_json: _Json = False) -> None:
    """List the GPUs known by name: rates, sources, accuracy.

    Args:
        as_json: Every field, as JSON.
    """
    from twinserve.profiles.overview import gpu_rows

    _print(
        gpu_rows(),
        as_json,
        lambda row: {
            "GPU": row["name"],
            "TFLOP/s": f"{row['peak_flops'] / 1e12:.0f}",
            "FP8": "-" if row["fp8_flops"] is None else f"{row['fp8_flops'] / 1e12:.0f}",
            "memory": f"{row['memory_bytes'] / 2**30:.1f} GiB",
            "TB/s": f"{row['memory_bytes_per_s'] / 1e12:.2f}",
            "NVLink": "-"
            if row["nvlink_bytes_per_s"] is None
            else f"{row['nvlink_bytes_per_s'] / 1e9:.0f} GB/s",
            "accuracy": f"{row['accuracy']}, constants {row['constants']}",
            "source": row["source"],
        },
    )


def policies(*, as_json: _Json = False) -> None:
    """List the policies known by name: sources, accuracy.

    Args:
        as_json: Every field, as JSON.
    """
    from twinserve.policies.overview import policy_rows

    columns = ("accuracy", "source", "summary")
    _print(
        policy_rows(), as_json, lambda row: {"policy": row["name"]} | {c: row[c] for c in columns}
    )


def _print(
    rows: Sequence[dict[str, Any]], as_json: bool, shown: Callable[[dict[str, Any]], dict[str, str]]
) -> None:
    """A table of what is `shown` of each row, or all of them as JSON."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from twinserve.sim.report.table import print_rows

    cells = [shown(row) for row in rows]
    print_rows([*cells[0]], (row.values() for row in cells), whole=next(iter(cells[0])))
