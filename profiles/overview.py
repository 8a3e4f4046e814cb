"""What the catalogue knows, as rows: each model and GPU with its source, and how sure step times
on it are.

measured  marks of real engines are at hand (`evidence.py`)
table     kernel tables are shipped, or can be made with aiconfigurator-core
derived   from specifications alone
"""

from collections.abc import Iterable
from typing import Any

from twinserve.profiles.catalog import MODELS
from twinserve.profiles.evidence import kind_of_model, marks
from twinserve.profiles.forms.efficiency import BORROWED
from twinserve.profiles.gpus import FEW_BITS, GPUS, SYSTEMS, gpu_source
from twinserve.profiles.models.hub_ids import PUBLISHED, SEEN
from twinserve.profiles.names import ProfileName
from twinserve.profiles.operators.shipped import AIC, LAYERS


def model_rows() -> list[dict[str, Any]]:
    """A row a model, by name: sizes, bytes, source, accuracy and the GPUs it was measured on."""
    tables, measured = _tables(), _measured()
    rows = []
    for name, spec in sorted(MODELS.items()):
        gpus = sorted({gpu for model, gpu in measured if model == name})
        made = sorted({gpu for model, gpu in tables if model == name})
        rows.append(
            {
                "name": name,
                "hub": PUBLISHED[name].hub,
                "kind": kind_of_model(spec),
                "parameters": spec.parameters,
                "active_parameters": spec.active_parameters,
                "weights": spec.weights.name if spec.weights else f"{spec.dtype_bytes * 8:g} bits",
                "weight_bytes": spec.weight_bytes,
                "kv_bytes_per_token": spec.kv_bytes_per_token,
                "max_positions": spec.max_positions,
                "published": f"{PUBLISHED[name].billions} B ({PUBLISHED[name].source})",
                "config_seen": SEEN[PUBLISHED[name].seen],
                "accuracy": _accuracy(gpus, made),
                "measured_on": gpus,
                "tables_on": made,
            }
        )
    return rows


def gpu_rows() -> list[dict[str, Any]]:
    """A row a GPU, by name: rates, memory, source, accuracy and the models measured on it."""
    tables, measured = _tables(), _measured()
    rows = []
    for name, gpu in sorted(GPUS.items()):
        few = FEW_BITS[name]
        models = sorted({model for model, where in measured if where == name})
        made = name in SYSTEMS or any(where == name for _, where in tables)
        rows.append(
            {
                "name": name,
                "family": gpu.family,
                "constants": "borrowed" if gpu.family in BORROWED else "fitted",
                "peak_flops": gpu.peak_flops,
                "fp8_flops": few.fp8,
                "int8_flops": few.int8,
                "fp4_flops": few.fp4,
                "memory_bytes": gpu.memory_bytes,
                "memory_bytes_per_s": gpu.memory_bytes_per_s,
                "nvlink_bytes_per_s": gpu.nvlink_bytes_per_s,
                "pcie_bytes_per_s": gpu.pcie_bytes_per_s,
                "source": gpu_source(name),
                "accuracy": _accuracy(models, made),
                "measured_models": models,
            }
        )
    return rows


def _tables() -> set[tuple[str, str]]:
    """(model, GPU) of every shipped file of kernel tables."""
    return {key[:2] for key in (*AIC, *LAYERS)}


def _measured() -> set[tuple[str, str]]:
    """(model, GPU) of every mark."""
    return {(ProfileName.parse(mark.engine).model, mark.gpu) for mark in marks()}


def _accuracy(measured: Iterable[str], tables: object) -> str:
    return "measured" if measured else "table" if tables else "derived"
