"""`twinserve calibrate`: measure a live engine and write its profile."""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.cli.live import SEEDED, engine_arguments
from twinserve.sim.cli.options import (
    Doing,
    Engine,
    EngineArgs,
    Flag,
    Out,
    Overwrite,
    Starting,
    Writing,
)
from twinserve.sim.cli.profiles import check_target
from twinserve.sim.cli.profiles import fit as fit_steps
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup import option_groups as groups

if TYPE_CHECKING:
    from twinserve.backends.live.measure.measure import Effort
    from twinserve.profiles.measured.samples import Measurement
    from twinserve.profiles.profile import Profile
    from twinserve.profiles.specs import ModelSpec

_Fitting = Parameter(group=groups.FITTING)
# what --from-steps takes beside itself, and what an engine does not take
_FOR_STEPS = ("model", "profile", "form", "out", "overwrite")
_STEPS_ONLY = ("profile", "form")
# what --from-serving takes; the settings among them by their names in a run
_SERVER = {
    "profile": "profile",
    "num_blocks": "num_blocks",
    "block_tokens": "block_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_step_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
}
_FOR_SERVING = ("from_serving", "config", "saturated", "out", "name", "overwrite", *_SERVER)
# and what --front-end takes
_FOR_FRONT_END = (
    *("front_end", "model", "out", "name", "max_model_len", "quick", "seed", "overwrite"),
)


def calibrate(
    *,
    model: Annotated[str | None, Starting] = None,
    out: Out = None,
    from_steps: Annotated[Path | None, _Fitting] = None,
    from_serving: Annotated[
        list[Path] | None, Parameter(consume_multiple=True, negative=""), _Fitting
    ] = None,
    config: Annotated[Path | None, _Fitting] = None,
    saturated: Annotated[Flag, _Fitting] = False,
    front_end: Annotated[Flag, Starting] = False,
    profile: Annotated[str | None, _Fitting] = None,
    form: Annotated[str | None, _Fitting] = None,
    name: Annotated[str | None, Writing] = None,
    raw: Annotated[Path | None, Writing] = None,
    num_blocks: Annotated[int | None, Engine] = None,
    block_tokens: Annotated[
        int | None, Parameter(name=["--block-tokens", "--block-size"]), Engine
    ] = None,
    max_num_seqs: Annotated[int | None, Engine] = None,
    max_step_tokens: Annotated[
        int | None, Parameter(name=["--max-step-tokens", "--max-num-batched-tokens"]), Engine
    ] = None,
    max_model_len: Annotated[int | None, Engine] = None,
    dtype: Annotated[str | None, Engine] = None,
    weights: Annotated[str | None, Engine] = None,
    graphs: Annotated[Flag, Engine] = False,
    swap_blocks: Annotated[int, Engine] = 0,
    threads: Annotated[int, Engine] = 1,
    engine_arg: EngineArgs = None,
    quick: Annotated[Flag, Doing] = False,
    limit: Annotated[float | None, Doing] = None,
    seed: Annotated[int, Doing] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Measure the step times of a vLLM engine on this machine, or fit recorded steps or client
    measurements, and write a profile.

    For example:

    $ twinserve calibrate --model tiny --quick --out cpu.json
    $ twinserve calibrate --from-serving load.json --profile llama-3.1-8b@h100 --out mine.json

    Args:
        model: Folder with a config.json and weights, or tiny, deep or small: seeded models. With
            --from-steps: only rows whose `model` column contains this.
        out: The profile to write (.json).
        from_steps: Start no engine: fit the published latency forms, and the host terms of
            --profile, to the steps in this file (.parquet of --raw, or .csv), and compare their
            errors. The same as `twinserve profiles fit`.
        from_serving: Start no engine: correct a few terms of --profile by measurements of a server.
            The files are those of vllm bench serve --save-detailed; each is a load of the same
            server.
        config: With --from-serving: a run.json with the server's settings.
        saturated: With --from-serving: fit all of a file, even if the server's queue grew. By
            default only the time before that counts, and a file without such a time is refused.
        front_end: Measure the time between clients and the engine instead: start an API server
            before an emulated GPU, and write a file for simulate --front-end. --model: a folder
            with a tokenizer.
        profile: With --from-steps and --from-serving: the engine's profile, to compare and to
            correct.
        form: With --from-steps and --out: host (host terms on top of --profile; the default), bros,
            or table.
        name: Name of the profile; MODEL@DEVICE by default.
        raw: Also write every timed step (.parquet). Without --raw, steps are kept next to --out
            while the command measures, and stay there if it is stopped. Steps of an earlier run are
            never replaced.
        num_blocks: KV blocks of the engine; by default what vLLM finds room for.
        block_tokens: Tokens a KV block; by default 16 on a GPU, 32 on a CPU.
        max_num_seqs: Largest batch; by default 256 on a GPU, 64 on a CPU.
        max_step_tokens: Most tokens a step; by default 8192 on a GPU, 2048 on a CPU.
        max_model_len: Longest request in tokens; by default the model's, 32768 at most.
        dtype: Of weights and KV cache; by default the model's, as vLLM takes it: float32 becomes
            bfloat16.
        weights: safetensors, or dummy for random ones; by default what the folder has.
        graphs: CUDA graphs and compilation, as servers run by default (GPU only).
        swap_blocks: Blocks of host memory: measures swapping as well.
        threads: Threads of the CPU engine.
        engine_arg: A further vLLM engine argument, NAME=VALUE; may be repeated.
        quick: Fewer points and repeats, for a first look.
        limit: Stop measuring after so many seconds, and use the steps measured by then; by default
            320, 40 with --quick.
        seed: Order of the points, and the random ones among them.
        overwrite: Replace --out and --raw if they exist.
    """
    given = dict(locals())
    from twinserve.sim.setup.config import SettingsError
    from twinserve.sim.twin.limit import check_limit

    if from_steps is not None:
        _refuse(
            given,
            "--from-steps starts no engine; drop it",
            lambda option: option not in (*_FOR_STEPS, "from_steps"),
        )
        fit_steps(from_steps, profile=profile, model=model, form=form, out=out, overwrite=overwrite)
        return
    if from_serving is not None:
        _from_serving(given, from_serving)
        return
    _refuse(
        given,
        "is for --from-serving; add --from-serving, or drop this option",
        lambda option: option in ("config", "saturated"),
    )
    _refuse(
        given,
        "is for recorded steps; add --from-steps FILE, or drop it",
        lambda option: option in _STEPS_ONLY,
    )
    if front_end:
        _refuse(
            given,
            "is for the steps of an engine; drop it, or --front-end",
            lambda option: option not in _FOR_FRONT_END,
        )
    for option, what in (
        ("model", "name a folder with a config.json, or tiny, deep or small"),
        ("out", "name the file to write (.json)"),
    ):
        if given[option] is None and not (front_end and option == "model"):
            raise SettingsError(f"--{option} is needed to measure an engine: {what}")
    check_target(out, overwrite)
    if raw is not None:
        check_target(raw, overwrite, ".parquet")
    check_limit(limit)
    extra = engine_arguments(engine_arg)
    kept = raw or _beside(out)
    with (
        tempfile.TemporaryDirectory(prefix="twinserve-") as scratch,
        RunProgress(shown=True) as progress,
    ):
        if front_end:
            from twinserve.sim.cli.calibrate_front_end import calibrate_front_end

            calibrate_front_end(
                model,
                out,
                Path(scratch),
                name=name,
                max_model_len=max_model_len,
                quick=quick,
                seed=seed,
                progress=progress,
            )
            return
        if model in SEEDED:  # written in float32, which vLLM's "auto" would make smaller
            dtype = dtype or "float32"
        folder, llm = _model(model, Path(scratch), dtype)
        sizes = (num_blocks, block_tokens, max_num_seqs, max_step_tokens, max_model_len)
        chosen = (dtype, weights, graphs, swap_blocks, threads)
        with _told_where(kept):
            profile = _measure(
                folder, llm, sizes, chosen, extra, _effort(quick, limit), seed, progress, name, kept
            )
    _finish(profile, out)
    if raw is None:
        kept.unlink()


def _beside(out: Path) -> Path:
    """A file for the steps while they are measured: none that an interrupted run left."""
    kept, number = out.with_suffix(".steps.parquet"), 1
    while kept.exists():
        number += 1
        kept = out.with_suffix(f".steps-{number}.parquet")
    return kept


@contextlib.contextmanager
def _told_where(kept: Path) -> Iterator[None]:
    """If the measuring ends early, print the path of the measured steps."""
    before = kept.stat().st_mtime_ns if kept.exists() else None
    try:
        yield
    except BaseException:
        if kept.exists() and kept.stat().st_mtime_ns != before:
            print(f"note: the measured steps are in {kept}", file=sys.stderr)
        raise


def _from_serving(given: dict, files: list[Path]) -> None:
    from twinserve.sim.cli.calibrate_front_end import calibrate_serving
    from twinserve.sim.setup.config import SettingsError

    _refuse(
        given, "--from-serving starts no engine; drop it", lambda option: option not in _FOR_SERVING
    )
    settings = {
        setting: given[option] for option, setting in _SERVER.items() if given[option] is not None
    }
    if given["out"] is None:
        raise SettingsError(
            "--out is needed with --from-serving: name the profile to write (.json)"
        )
    if given["profile"] is None and given["config"] is None:
        raise SettingsError(
            "--profile is needed with --from-serving: name the profile to correct, as "
            "llama-3.1-8b@h100"
        )
    calibrate_serving(
        files,
        given["out"],
        settings,
        config=given["config"],
        name=given["name"],
        saturated=given["saturated"],
        overwrite=given["overwrite"],
    )


def _refuse(given: dict, why: str, unwanted) -> None:
    """Raises SettingsError for the first unwanted option that is not at its default."""
    from twinserve.sim.setup.config import SettingsError

    for option, parameter in inspect.signature(calibrate).parameters.items():
        if unwanted(option) and given[option] != parameter.default:
            raise SettingsError(f"--{option.replace('_', '-')}: {why}")


def _finish(profile: Profile, out: Path) -> None:
    from twinserve.profiles.measured.model import noise_lines
    from twinserve.profiles.profile import save_profile

    save_profile(profile, out)
    print(profile.describe())
    fit = profile.step_model.fit
    for kind, error in fit.errors.items():
        print(f"{kind:>10}  {error:.1%}")
    if fit.check_error is not None:
        print(f"{'check':>10}  {fit.check_error:.1%} on held-out steps")
    if fit.traffic_error is not None:
        print(
            f"{'traffic':>10}  {fit.traffic_error:.1%} over single steps of traffic, "
            f"{fit.traffic_total_error:+.1%} in sum"
        )
    print(f"{'spread':>10}  {fit.spread:.1%} between the quartiles of a point's repeats")
    for line in noise_lines(fit):
        print(f"note: {line}")
    print(out)


def _measure(
    folder,
    llm: ModelSpec,
    sizes,
    chosen,
    extra,
    effort: Effort,
    seed: int,
    progress: RunProgress,
    name: str | None,
    kept: Path,
) -> Profile:
    # torch and vLLM load here, and only here
    from twinserve.backends.live.measure.measure import SCHEDULER, measure
    from twinserve.backends.live.versions import installed_vllm
    from twinserve.profiles.measured.samples import write_samples

    installed_vllm()
    import torch

    from twinserve.backends.live.engine.engine import LiveSettings
    from twinserve.profiles.measured.profile import measured_profile, model_spec

    num_blocks, block_tokens, max_num_seqs, max_step_tokens, max_model_len = sizes
    dtype, weights, graphs, swap_blocks, threads = chosen
    gpu = torch.cuda.is_available()
    if graphs and not gpu:
        raise LiveEngineError("--graphs: this machine has no GPU; drop --graphs")
    has_weights = any(folder.glob("*.safetensors"))
    settings = LiveSettings(
        model=folder,
        num_blocks=num_blocks,
        block_tokens=block_tokens or (16 if gpu else 32),
        max_num_seqs=max_num_seqs or (256 if gpu else 64),
        max_step_tokens=max_step_tokens or (8192 if gpu else 2048),
        max_model_len=max_model_len or min(llm.max_positions, 32768),
        weights=weights or ("safetensors" if has_weights else "dummy"),
        dtype=dtype or "auto",
        # without it a request cannot start on blocks that were never computed; vLLM's default, too
        prefix_caching=extra.pop("enable_prefix_caching", True),
        swap_blocks=swap_blocks,
        graphs=graphs,
        threads=threads,
        scheduler=SCHEDULER,
        extra=extra,
    )
    progress.begin("calibrate")

    def profile_of(found: Measurement) -> Profile:
        return measured_profile(
            found, model_spec(folder, llm.name, found.provenance["dtype"]), name
        )

    def traffic(engine, found: Measurement, time_is_up: Callable[[], bool]) -> Iterator[list]:
        from twinserve.sim.twin.calibrate_traffic import traffic_steps

        engine.warm_up()
        profile = profile_of(found)
        ways = effort.quick, progress.part, time_is_up
        return traffic_steps(engine, profile, seed, *ways, whole_round=effort.whole_round)

    def keep(found: Measurement) -> None:
        write_samples(found, kept)

    measurement = measure(settings, effort, seed, progress.part, traffic, keep)
    keep(measurement)
    return profile_of(measurement)


def _effort(quick: bool, limit: float | None) -> Effort:
    from twinserve.backends.live.measure.measure import QUICK, Effort

    effort = QUICK if quick else Effort()
    return effort if limit is None else replace(effort, limit_s=limit, whole_round=False)


def _model(model: str, scratch: Path, dtype: str | None) -> tuple[Path, ModelSpec]:
    """Its folder and what it is. Refused before an engine starts if no profile can hold it."""
    from twinserve.profiles.measured.profile import model_spec

    if model not in SEEDED:
        return Path(model), model_spec(model, dtype=dtype)
    try:
        from twinserve.backends.live.engine.tiny_model import write_model

        folder = write_model(scratch / model, name=model)
    except ImportError:
        from twinserve.backends.live.versions import installed_vllm

        installed_vllm()
        raise
    return folder, model_spec(folder, dtype=dtype)
