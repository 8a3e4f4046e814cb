"""`twinserve profiles`: the hardware and models that the simulator knows, and how to add some."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

profiles_app = cyclopts.App(name="profiles", help="Hardware and model profiles.")
_Out = Annotated[Path, Parameter(name=["--out", "-o"])]
_StepTimes = Literal["auto", "roofline", "operators", "measured"]
_Flag = Annotated[bool, Parameter(negative="")]


@profiles_app.command(name="list")
def list_() -> None:
    """List the shipped profiles, one a line. Others are derived on demand: MODEL@GPU[:tpN]."""
    from twinserve.profiles.names import list_profiles
    from twinserve.profiles.profile import load_profile

    for name in list_profiles():
        print(load_profile(name).describe())


@profiles_app.command
def show(name: str, *, step_times: _StepTimes = "auto", engine_version: str | None = None) -> None:
    """Print a profile in full, as JSON; the accuracy of its step times goes to stderr.

    Args:
        name: Shipped profile, MODEL@GPU[:tpN], or a file.
        step_times: Form of the step times, as for simulate.
        engine_version: Release of vLLM whose KV memory and defaults are meant, as 0.19.
    """
    from twinserve.profiles.evidence import describe_step_times
    from twinserve.profiles.kv_memory.releases import check_release
    from twinserve.profiles.memory import with_server_flags
    from twinserve.profiles.step_times import choose

    chosen = choose(name, step_times)
    chosen.profile.model()  # what a run would refuse is refused here
    profile = chosen.profile
    if engine_version is not None:
        profile = with_server_flags(profile, engine_version=check_release(engine_version))
    print(profile.model_dump_json(indent=2))
    print(describe_step_times(chosen.profile, chosen.why), file=sys.stderr)


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
    engine_version: str | None = None,
    overwrite: _Flag = False,
) -> None:
    """Build a profile from measured operator tables (needs the [profiles] extra).

    Args:
        model: Known name, a config.json, or an id in the local Hugging Face cache.
        gpu: h100, h200, a100, l40s, b200 or rtxpro6000.
        out: The profile to write (.json).
        tp: Tensor-parallel GPUs.
        num_blocks: KV blocks that the engine reported; by default derived from memory.
        max_num_seqs: Most requests in a batch; also sets the captured CUDA graphs.
        max_num_batched_tokens: Most tokens in a step.
        engine_version: Release of vLLM whose KV memory and defaults are meant, as 0.19.
        overwrite: Replace the profile if it exists.
    """
    from twinserve.profiles.catalog import find_gpu
    from twinserve.profiles.kv_memory.releases import check_release
    from twinserve.profiles.operators.shipped import operator_profile
    from twinserve.profiles.profile import save_profile

    check_target(out, overwrite)
    settings = {
        "num_gpu_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "engine_version": None if engine_version is None else check_release(engine_version),
    }
    profile = operator_profile(model, find_gpu(gpu).name, tp, **settings)
    save_profile(profile, out)
    print(profile.describe())


@profiles_app.command
def scale(
    name: str,
    *,
    out: _Out,
    step: float = 1.0,
    prefill: float = 1.0,
    decode: float = 1.0,
    host: float = 1.0,
    pcie: float = 1.0,
    kv: float = 1.0,
    overwrite: _Flag = False,
) -> None:
    """Scale a profile's times on purpose, to see which results depend on them (docs/profiles.md).

    Args:
        name: Shipped profile, MODEL@GPU[:tpN], or a file.
        out: The profile to write (.json).
        step: Factor on all step times.
        prefill: Factor on the time that prompt tokens add to a step.
        decode: Factor on the time of a step's decodes alone, without the host's share.
        host: Factor on the host's share of a step.
        pcie: Factor on the PCIe rate.
        kv: Factor on the number of KV blocks.
        overwrite: Replace the profile if it is there already.
    """
    from twinserve.profiles.profile import load_profile, save_profile

    check_target(out, overwrite)
    changed = load_profile(name).scaled(
        step=step, prefill=prefill, decode=decode, host=host, pcie=pcie, kv=kv
    )
    save_profile(changed, out)
    print(changed.describe())


@profiles_app.command
def fit(
    steps: Path,
    *,
    profile: str | None = None,
    model: str | None = None,
    form: str | None = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    overwrite: _Flag = False,
) -> None:
    """Fit the published latency forms to recorded steps, and compare their errors. Also: calibrate
    --from-steps.

    Args:
        steps: Steps of one engine: .parquet of `calibrate --raw`, or CSV (docs/profiles.md lists
            the columns).
        profile: Also compare this profile, as it is and with host terms fitted to the steps.
        model: Only rows whose `model` column contains this.
        form: What --out writes: host (the profile's form with fitted host terms; the default),
            bros, or table.
        out: Write the profile with fitted step times (.json); needs --profile, the profile of the
            engine that made the steps.
        overwrite: Replace the profile if it is there already.
    """
    from twinserve.profiles.forms.step_fits import FITTED, fit_forms, fitted_profile
    from twinserve.profiles.measured.step_files import read_steps
    from twinserve.profiles.profile import load_profile, save_profile
    from twinserve.sim.setup.config import SettingsError

    if form is not None and form not in FITTED:
        raise SettingsError(
            f"--form {form!r}: a profile cannot hold it; choose {', '.join(FITTED)}"
        )
    if form is not None and out is None:
        raise SettingsError(f"--form {form}: says what --out writes; add --out FILE.json")
    if overwrite and out is None:
        raise SettingsError("--overwrite is for --out, which is not given")
    base = None if profile is None else load_profile(profile)
    if out is not None and base is None:
        raise SettingsError(
            "--out writes a profile with fitted step times; name the engine with --profile"
        )
    if out is not None:
        check_target(out, overwrite)
        if form in (None, "host"):
            base.with_host_terms(0.0, 0.0, None)  # refused before the work
    works, seconds = read_steps(steps, model)
    found = fit_forms(works, seconds, None if base is None else base.model())
    fitted = None if out is None else fitted_profile(base, form or "host", found, works, seconds)
    _show_fits(found, works, seconds)
    if fitted is not None:
        save_profile(fitted, out)
        print(out)


def _show_fits(found, works, seconds) -> None:
    from twinserve.sim.report.table import print_rows

    times = f"{seconds.min() * 1e3:.1f} to {seconds.max() * 1e3:.1f} ms"
    print(f"{len(works)} steps, {times}; seconds a unit")
    rows = []
    for one in found:
        terms = zip(one.names, one.coefficients, strict=True)
        errors = [f"{one.error:.1%}", f"{one.cross_error:.1%}", f"{one.largest_error:.0%}"]
        rows.append([one.form, *errors, ", ".join(f"{n} {c:.3g}" for n, c in terms if c)])
    numbers = ["error", "left out", "largest"]
    print_rows(["form", *numbers, "coefficients"], rows, right=numbers)


def check_target(path: Path, overwrite: bool = False, suffix: str = ".json") -> None:
    """Check `path` before minutes of work. Raises ResultsError if it cannot be written, has an
    ending that readers do not know, or exists and `overwrite` is not set."""
    from twinserve.sim.results.files import ResultsError
    from twinserve.traces.write import check_free

    check_free(path, overwrite, ResultsError)
    if path.suffix.lower() != suffix:
        raise ResultsError(
            f"{path}: name a file that ends in {suffix}; commands recognise it by this ending"
        )
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        handle, probe = tempfile.mkstemp(prefix=".twinserve-", dir=folder)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise ResultsError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None
