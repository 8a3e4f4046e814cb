"""`twinserve models`, `gpus`, `policies`: what is known by name, with sources and accuracy."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

    rows = model_rows()
    if as_json:
        _print_json(rows)
        return
    shown = [
        {
            "model": row["name"],
            "kind": row["kind"],
            "parameters": f"{row['parameters'] / 1e9:.2f} B",
            "active": f"{row['active_parameters'] / 1e9:.1f} B",
            "weights": f"{row['weight_bytes'] / 1e9:.1f} GB ({row['weights']})",
            "KV a token": f"{row['kv_bytes_per_token'] / 1024:.1f} KiB",
            "accuracy": row["accuracy"],
            "source": f"{row['hub']}; {row['published']}",
        }
        for row in rows
    ]
    _print_table(shown)


def gpus(*, as_json: _Json = False) -> None:
    """List the GPUs known by name: rates, sources, accuracy.

    Args:
        as_json: Every field, as JSON.
    """
    from twinserve.profiles.overview import gpu_rows

    rows = gpu_rows()
    if as_json:
        _print_json(rows)
        return
    shown = [
        {
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
        }
        for row in rows
    ]
    _print_table(shown)


def policies(*, as_json: _Json = False) -> None:
    """List the policies known by name: sources, accuracy.

    Args:
        as_json: Every field, as JSON.
    """
    from twinserve.policies.overview import policy_rows

    rows = policy_rows()
    if as_json:
        _print_json(rows)
        return
    shown = [
        {
            "policy": row["name"],
            "accuracy": row["accuracy"],
            "source": row["source"],
            "summary": row["summary"],
        }
        for row in rows
    ]
    _print_table(shown)


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    print(json.dumps(rows, indent=2))


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for i, column in enumerate(rows[0]):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False).print(table)
