"""`twinserve profiles`: what hardware and models the simulator knows, and how to add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from ..profiles.profile import list_profiles, load_profile, save_profile

profiles_app = cyclopts.App(name="profiles", help="Hardware and model profiles.")
_Out = Annotated[Path, Parameter(name=["--out", "-o"])]


@profiles_app.command(name="list")
def list_() -> None:
    """The shipped profiles, one a line. Others are derived on demand: MODEL@GPU[:tpN]."""
    for name in list_profiles():
        print(load_profile(name).describe())


@profiles_app.command
def show(name: str) -> None:
    """A profile in full, as JSON.

    Parameters
    ----------
    name: str
        Shipped profile, MODEL@GPU[:tpN], or a file.
    """
    print(load_profile(name).model_dump_json(indent=2))


@profiles_app.command
def build(
    model: str,
    gpu: str,
    *,
    out: _Out,
    tp: int = 1,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> None:
    """A profile from measured operator tables (needs the [profiles] extra).

    Parameters
    ----------
    model: str
        Known name, or a config.json of a Llama, Qwen, Mistral, Yi, Mixtral or Qwen3-MoE model.
    gpu: str
        h100, h200, a100, l40s, b200 or rtxpro6000.
    out: Path
        The profile to write (.json).
    tp: int
        Tensor-parallel GPUs.
    num_blocks: int
        KV blocks that the engine reported; by default derived from memory.
    max_num_seqs: int
        Most requests in a batch; also sets the captured CUDA graphs.
    max_num_batched_tokens: int
        Most tokens in a step.
    """
    from ..profiles.catalog import find_gpu
    from ..profiles.shipped_operators import operator_profile
    from ..profiles.specs import ModelSpec

    spec = ModelSpec.from_config(model, Path(model).resolve().parent.name.lower()) if model.endswith(".json") else model
    settings = {
        "num_gpu_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    profile = operator_profile(spec, find_gpu(gpu).name, tp, **settings)
    save_profile(profile, out)
    print(profile.describe())


@profiles_app.command
def fit(
    steps: Path,
    *,
    profile: str | None = None,
    model: str | None = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
) -> None:
    """Fit the published latency forms to recorded steps, and compare their errors.

    Parameters
    ----------
    steps: Path
        Steps of one engine: .parquet of `calibrate --raw`, or CSV (docs/profiles.md lists the columns).
    profile: str
        Also compare this profile, as it is and with host terms fitted to the steps.
    model: str
        Only rows whose `model` column contains this.
    out: Path
        Write the profile with the fitted host terms (.json); needs --profile with operator tables.
    """
    from ..profiles.step_files import read_steps
    from ..profiles.step_fits import fit_forms
    from .config import SettingsError

    base = None if profile is None else load_profile(profile)
    if out is not None and (base is None or base.step_model.form != "operators"):
        raise SettingsError("--out writes a profile of operator tables with fitted host terms; name one with --profile")
    works, seconds = read_steps(steps, model)
    found = fit_forms(works, seconds, None if base is None else base.model())
    table = Table(box=None, pad_edge=False, header_style="")
    for column, side in (
        ("form", "left"),
        ("error", "right"),
        ("left out", "right"),
        ("largest", "right"),
        ("coefficients", "left"),
    ):
        table.add_column(column, justify=side, overflow="fold")
    for one in found:
        shown = ", ".join(f"{n} {c:.3g}" for n, c in zip(one.names, one.coefficients, strict=True) if c)
        table.add_row(one.form, f"{one.error:.1%}", f"{one.cross_error:.1%}", f"{one.largest_error:.0%}", shown)
    console = Console(highlight=False)
    console.print(f"{len(works)} steps, {seconds.min() * 1e3:.1f} to {seconds.max() * 1e3:.1f} ms; seconds a unit")
    console.print(table)
    if out is not None:
        save_profile(base.with_host_terms(*found[-1].coefficients, fit_error=found[-1].cross_error), out)
